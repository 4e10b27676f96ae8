"""`PrecisionPlan`: what its file says, and what becomes of it in one process."""

from __future__ import annotations

import copy
import dataclasses
import io
import itertools
import random
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.utils import prune

from amp_core import OpPolicy, PolicyError, PrecisionPlan, autocast

from ..drawn import programs

LOW = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
BY_PARAMETER = "param_dtype_override_fn" in {each.name for each in dataclasses.fields(MixedPrecisionPolicy)}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        self.head = nn.Linear(4, 4)
        self.register_buffer("angles", torch.linspace(0, 1, 4) / 3)
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x) + self.angles)


def plan(table: str, head: str = "") -> PrecisionPlan:
    return PrecisionPlan.from_toml(f'device_type = "cpu"\n{head}\n[distributed]\n{table}\n')


@pytest.fixture
def mesh(one_rank: None) -> object:
    return init_device_mesh("cpu", (1,))


def test_one_file_has_all_of_it(tmp_path: Path) -> None:
    """Regions, modules and sharding read different parts of one file, or refuse each other's."""
    path = tmp_path / "plan.toml"
    path.write_text(
        """
        device_type = "cpu"
        [rules]
        softmax = "fp32"
        [modules]
        head = "fp32"
        [distributed]
        param_dtype = "bfloat16"
        reduce_dtype = "float32"
        output_dtype = "float16"
        cast_forward_inputs = false
        float32_buffers = ["angles"]
        """
    )
    read = PrecisionPlan.from_toml(path)
    assert read.policy == OpPolicy.from_toml(path)
    assert read.policy.rule("softmax") == "fp32"
    assert read.modules == {"head": "fp32"}
    assert read.float32_buffers == ("angles",)
    model = Net()
    assert read.fsdp_policy(model, model.body) == MixedPrecisionPolicy(
        torch.bfloat16, torch.float32, torch.float16, False
    )
    with read.apply(model) as applied:
        assert (applied.modules, applied.buffers) == (("head",), ("angles",))


def test_without_a_table_torch_decides() -> None:
    """A file that a user has today is refused, or changes what torch does."""
    read = PrecisionPlan.from_toml('device_type = "cpu"\n[rules]\nmm = "fp32"\n')
    assert read.fsdp_policy() == MixedPrecisionPolicy()
    assert read.fsdp_policy(Net()) == MixedPrecisionPolicy()
    with read.apply(model := Net()) as applied:
        assert (applied.modules, applied.buffers) == ((), ())
        assert model.half().angles.dtype is torch.float16


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ('reduce_dtype = "fp32"', r"<toml>:4: reduce_dtype must be one of float32, .*'fp32'"),
        ("param_dtype = 16", r":4: param_dtype must be one of float32"),
        ('reduce = "float32"', r":4: unknown key 'reduce' in \[distributed\]; the keys are .*reduce_dtype"),
        ('policy = "x"', r":4: unknown key 'policy'"),
        ('float32_buffers = "rotary"', r':4: float32_buffers must be a list of globs, such as \["'),
        ("float32_parameters = [1]", ":4: float32_parameters must be a list of globs"),
        ('cast_forward_inputs = "no"', ":4: cast_forward_inputs must be true or false"),
    ],
)
def test_errors_name_the_line(table: str, message: str) -> None:
    """A misspelt dtype or key is found by the first step of a run on many machines."""
    with pytest.raises(PolicyError, match=message):
        plan(table)


def test_the_table_must_be_one() -> None:
    """A plain value ends in an AttributeError."""
    with pytest.raises(PolicyError, match=r":1: distributed must be a table, \[distributed\]"):
        PrecisionPlan.from_toml('distributed = 3\ndevice_type = "cpu"\n')


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("param_dtype", torch.int8, r"must be one of torch\.float32, torch\.bfloat16, .*, not torch\.int8"),
        ("cast_forward_inputs", "no", "must be true or false, not 'no'"),
        ("float32_buffers", "rotary", "must be a list of globs, .*, not 'rotary'"),
        ("modules", 3, "must map modules to rules"),
    ],
)
def test_attributes_are_checked(name: str, value: object, message: str) -> None:
    """``cast_forward_inputs="no"`` casts, and a wrong dtype fails inside FSDP2."""
    with pytest.raises(PolicyError, match=f"{name} {message}"):
        PrecisionPlan(OpPolicy.default("cpu"), **{name: value})


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ("float32", "'float32' is not a rule for a module; use 'fp32' or op rules"),
        (torch.float32, "Rules must be a mapping from op to rule, not dtype"),
        ({"linear": "fp16"}, "Unknown rule 'fp16' for 'linear'"),
    ],
)
def test_rules_of_modules_are_checked(rules: object, message: str) -> None:
    """FSDP2 computes with weights in low precision that "float32", which is no rule, should have kept."""
    with pytest.raises(PolicyError, match=rf"'\*\*\.norm': {message}"):
        PrecisionPlan(OpPolicy.default("cpu"), {"**.norm": rules}, torch.bfloat16)


def test_equal_plans_have_one_hash() -> None:
    """A plan is no key of a cache, as a policy is; or one with a list of globs is another plan."""
    policy, rules = OpPolicy.default("cpu"), {"norm": "fp32"}
    plans = [PrecisionPlan(policy, dict(rules), float32_buffers=globs) for globs in (["a"], ("a",))]
    assert plans[0] == plans[1]
    assert len({*plans, PrecisionPlan(policy, float32_buffers=("a",))}) == 2


def test_a_unit_of_float32_weights_computes_in_float32(mesh: object) -> None:
    """Norms run on rounded weights under FSDP2 although the plan keeps them."""
    read = plan('param_dtype = "bfloat16"\nreduce_dtype = "float32"\nfloat32_parameters = ["body.1.*"]')
    model, seen = Net(), {}
    for name, unit in (("body.1", model.body[1]), ("body.0", model.body[0]), ("head", model.head)):
        fully_shard(unit, mesh=mesh, mp_policy=read.fsdp_policy(model, unit))
        unit.register_forward_hook(lambda unit, _x, _y, name=name: seen.update({name: unit.weight.dtype}))
    assert read.fsdp_policy(model) == LOW
    model(torch.ones(2, 4))
    assert seen == {"body.0": torch.bfloat16, "body.1": torch.float32, "head": torch.bfloat16}


def test_modules_in_float32_keep_their_weights(mesh: object) -> None:
    """A module with the rule "fp32" gets float32 inputs and bfloat16 weights, and raises."""
    read = plan('param_dtype = "bfloat16"', '[modules]\nhead = "fp32"')
    model = Net()
    read.apply(model)
    for unit in (model.head, model):
        fully_shard(unit, mesh=mesh, mp_policy=read.fsdp_policy(model, unit))
    with autocast("cpu", policy=read.policy):
        assert model(torch.ones(2, 4)).dtype is torch.float32


def test_single_weights_of_a_unit(mesh: object) -> None:
    """A weight that the plan keeps is rounded in silence where torch cannot keep it."""
    read = plan('param_dtype = "bfloat16"\nfloat32_parameters = ["**.weight"]')
    model = Net()
    if not BY_PARAMETER:
        with pytest.raises(
            PolicyError, match=r"'head\.weight' in float32 but not 'head\.bias' .* torch 2\.15"
        ):
            read.fsdp_policy(model, model.head)
        return
    seen: list[torch.dtype] = []
    fully_shard(model.head, mesh=mesh, mp_policy=read.fsdp_policy(model, model.head))
    model.head.forward = lambda _x: seen.extend(p.dtype for p in (model.head.weight, model.head.bias))
    model.head(torch.ones(2, 4))
    assert seen == [torch.float32, torch.bfloat16]


@pytest.mark.parametrize(
    ("table", "head"),
    [("", '[modules]\nhead = "fp32"'), ('float32_parameters = ["head.*"]', "")],
    ids=["module", "parameter"],
)
def test_tied_weights_are_kept_by_each_of_their_names(mesh: object, table: str, head: str) -> None:
    """A head in float32 multiplies by rounded weights, because the embedding has them first."""
    read = plan(f'param_dtype = "bfloat16"\n{table}', head)
    model = nn.ModuleDict({"embedding": nn.Embedding(4, 8), "head": nn.Linear(8, 4, bias=False)})
    model["head"].weight = model["embedding"].weight
    assert read.fsdp_policy(model).param_dtype is torch.float32
    assert read.fsdp_policy(model, model["embedding"]).param_dtype is torch.float32


@pytest.mark.parametrize(
    ("table", "head"),
    [("", '[modules]\n"**.1" = "fp32"'), ('float32_parameters = ["**.1.*"]', "")],
    ids=["module", "parameter"],
)
@pytest.mark.parametrize("where", ["unit", "model"])
def test_blocks_in_a_checkpoint_wrapper(mesh: object, where: str, table: str, head: str) -> None:
    """A block is refused for norms that have a unit of their own, or they are rounded in silence.

    The names of the wrapper's parameters lack a part that those of its modules have.
    """
    read, model = plan(f'param_dtype = "bfloat16"\n{table}', head), Net()
    if where == "unit":
        model.body = checkpoint_wrapper(model.body)
    else:
        model = checkpoint_wrapper(model.body)
    block = model.body if where == "unit" else model
    assert read.fsdp_policy(model, block[1]).param_dtype is torch.float32
    fully_shard(block[1], mesh=mesh, mp_policy=read.fsdp_policy(model, block[1]))
    assert read.fsdp_policy(model, block).param_dtype is torch.bfloat16
    assert read.fsdp_policy(model).param_dtype is torch.bfloat16


def test_of_several_rules_for_a_module_the_last_decides_its_weights(mesh: object) -> None:
    """A module that a later rule takes out of float32 is gathered in float32, or the plan is refused."""
    read = plan('param_dtype = "bfloat16"', '[modules]\n"*" = "fp32"\nhead = { softmax = "fp32" }')
    model = Net()
    assert read.fsdp_policy(model, model.head).param_dtype is torch.bfloat16
    assert read.fsdp_policy(model, model.body).param_dtype is torch.float32
    read = plan('param_dtype = "bfloat16"', '[modules]\nhead = { softmax = "fp32" }\n"*" = "fp32"')
    assert read.fsdp_policy(model, model.head).param_dtype is torch.float32


def test_what_a_plan_of_weights_refuses(mesh: object) -> None:
    """Globs that match nothing, or weights that were rounded before, pass for kept ones."""
    read = plan('param_dtype = "bfloat16"\nfloat32_parameters = ["hed.*"]')
    with pytest.raises(PolicyError, match="pass the model whose names"):
        read.fsdp_policy()
    with pytest.raises(PolicyError, match=r"'hed\.\*' matches no parameter of Net; near names are 'head"):
        read.fsdp_policy(Net())
    with pytest.raises(PolicyError, match="is not a module of this Net"):
        plan('param_dtype = "float16"\nfloat32_parameters = ["head.*"]').fsdp_policy(Net(), nn.Linear(1, 1))
    read = plan('param_dtype = "float16"\nfloat32_parameters = ["head.*"]')
    model = Net().bfloat16()
    with pytest.raises(PolicyError, match=r"'head\.weight' in float32, but its weights are torch\.bfloat16"):
        read.fsdp_policy(model, model.head)


@pytest.mark.parametrize("cast", ["half", "to", "double", "copy", "saved"])
def test_buffers_keep_their_digits(cast: str) -> None:
    """Rotary frequencies are rounded with the weights, and positions far out go wrong."""
    model, exact = Net(), Net().angles.clone()
    applied = plan('float32_buffers = ["angles"]').apply(model)
    if cast == "copy":
        model = copy.deepcopy(model)
    elif cast == "saved":
        torch.save(model, file := io.BytesIO())
        file.seek(0)
        model = torch.load(file, weights_only=False)
    getattr(model, cast if cast in ("half", "double") else "bfloat16")()
    assert model.angles.dtype is torch.float32
    assert torch.equal(model.angles, exact)
    assert model.head.weight.dtype is not torch.float32
    assert model.to("meta").angles.is_meta
    if cast not in ("copy", "saved"):
        applied.remove()
        applied.remove()
        assert model.half().angles.dtype is torch.float16
        assert not any("amp" in key for key in vars(model))


def test_buffers_that_modules_share_keep_their_digits() -> None:
    """The first layer has the exact frequencies, and all others rounded ones."""
    layers = nn.ModuleList(Net() for _ in range(3))
    layers.append(layers[0])
    for layer in layers:
        layer.angles = layers[0].angles
    exact = layers[0].angles.clone()
    applied = plan('float32_buffers = ["*.angles"]').apply(layers)
    layers.bfloat16()
    assert all(layer.angles is layers[0].angles for layer in layers)
    assert torch.equal(layers[0].angles, exact)
    applied.remove()
    assert layers.bfloat16()[1].angles.dtype is torch.bfloat16
    assert not any("amp" in key or key == "_apply" for layer in layers for key in vars(layer))
    with plan('float32_buffers = ["1.angles"]').apply(copy.deepcopy(layers).float()) as kept:
        assert kept.buffers == ("1.angles",)


def test_a_buffer_that_is_deleted_later() -> None:
    """A model whose pruning was made final, which deletes the mask, can no longer be cast."""
    model = Net()
    prune.l1_unstructured(model.head, "weight", 0.5)
    with plan('float32_buffers = ["angles", "head.weight_mask"]').apply(model):
        prune.remove(model.head, "weight")
        model.bfloat16()
    assert model.angles.dtype is torch.float32
    assert model.head.weight.dtype is torch.bfloat16


def test_a_shallow_copy_outlives_the_plan() -> None:
    """It cannot be cast any more, as it looks for the plan's entry in the original."""
    model = Net()
    with plan('float32_buffers = ["angles"]').apply(model):
        shallow = copy.copy(model)
        shallow.bfloat16()
        assert shallow.angles.dtype is torch.float32
    shallow.bfloat16()
    assert shallow.angles.dtype is model.angles.dtype is torch.bfloat16


def test_a_rounded_buffer_is_refused() -> None:
    """A plan that comes too late leaves rounded values in float32."""
    read = plan('float32_buffers = ["*"]')
    with pytest.raises(PolicyError, match=r"'angles' should stay float32 but is torch\.float16"):
        read.apply(Net().half())
    with pytest.raises(PolicyError, match="'angels' matches no buffer of Net; near names are 'angles'"):
        plan('float32_buffers = ["angels"]').apply(Net())


@pytest.mark.parametrize(
    ("kept", "reduced"),
    [*itertools.product([torch.float32, torch.bfloat16], [None, "float32", "bfloat16", "float16"])],
)
def test_ddp_reduces_in_the_dtype_of_the_plan(mesh: object, kept: torch.dtype, reduced: str | None) -> None:
    """DDP refuses the hook, or gradients come back in another dtype or unaveraged."""
    read = plan("" if reduced is None else f'reduce_dtype = "{reduced}"')
    model = nn.Linear(3, 1, bias=False).to(kept)
    ddp = nn.parallel.DistributedDataParallel(model)
    ddp.register_comm_hook(None, read.ddp_hook())
    x = torch.tensor([[1.0, 1 / 3, 1e5]], dtype=kept)
    ddp(x).sum().backward()
    through = x.to(kept if reduced is None else getattr(torch, reduced))
    assert model.weight.grad.dtype is kept
    assert torch.equal(model.weight.grad, through.to(kept))


CASTS_AGAIN = torch.__version__ >= "2.13"
"""Whether FSDP2 casts the inputs of a part that a checkpoint calls again."""


def tree(draw: random.Random, depth: int = 2) -> nn.Module:
    """Return a random module of layers, of which some are called twice or in a checkpoint wrapper."""
    if not depth or draw.random() < 0.2:
        made: nn.Module = nn.Linear(4, 4)
    else:
        parts = [tree(draw, depth - 1) for _ in range(draw.randint(1, 3))]
        made = nn.Sequential(*parts, *parts[: draw.random() < 0.2])
    return checkpoint_wrapper(made) if draw.random() < 0.3 and CASTS_AGAIN else made


def test_random_models_compute_in_the_dtypes_of_their_plan(mesh: object) -> None:
    """A weight is gathered in another dtype than the plan says, or a good plan is refused."""
    for draw in programs(seconds=4, number="plans"):
        model = tree(draw)
        modules = dict(model.named_modules())
        leaves = {name: each for name, each in modules.items() if isinstance(each, nn.Linear)}
        whole = {each for each in modules.values() if draw.random() < 0.15}
        kept = {leaf for leaf in leaves.values() if draw.random() < 0.3}
        params = dict(model.named_parameters(remove_duplicate=False))
        ids = {id(param) for leaf in kept for param in leaf.parameters()}
        globs = [name for name, param in params.items() if id(param) in ids]
        read = PrecisionPlan(
            OpPolicy.default("cpu"),
            dict.fromkeys(whole, "fp32"),
            torch.bfloat16,
            float32_parameters=globs,
        )
        kept.update(leaf for each in whole for leaf in each.modules() if leaf in leaves.values())
        seen: dict[nn.Module, torch.dtype] = {}
        for leaf in leaves.values():  # before those of FSDP2, which free the weights
            leaf.register_forward_hook(lambda leaf, _x, _y, seen=seen: seen.update({leaf: leaf.weight.dtype}))
        read.apply(model)
        for module in reversed(list(model.modules())):  # the inner ones first
            if module in kept or module is model or draw.random() < 0.2:
                fully_shard(module, mesh=mesh, mp_policy=read.fsdp_policy(model, module))
        with autocast("cpu", policy=read.policy):
            loss = model(torch.ones(2, 4)).float().sum()
        loss.backward()
        wanted = {leaf: torch.float32 if leaf in kept else torch.bfloat16 for leaf in leaves.values()}
        assert seen == wanted, model
        assert {param.grad.dtype for param in model.parameters()} == {torch.float32}, model
