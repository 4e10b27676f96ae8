"""Rules for some modules of a model: put on by glob, eager and compiled, and taken off again."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import functools
import inspect
import pickle
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from amp_core import OpPolicy, PolicyError, apply_policy, autocast

pytestmark = pytest.mark.usefixtures("nothing_left")
LOW, HIGH = torch.bfloat16, torch.float32


class Encoder(nn.Module):
    """Two nn.TransformerEncoderLayer and a head; says in which dtype the attention weights came out."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.ModuleList([layer, copy.deepcopy(layer)])
        self.probe = nn.MultiheadAttention(16, 2, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        for layer in self.encoder:
            x = layer(x)
        _, weights = self.probe(x, x, x)
        return self.encoder[1].linear1(x), weights, self.head(x)


X = torch.randn(2, 5, 16)


def dtypes(model: object) -> list[torch.dtype]:
    with autocast("cpu"):
        return [out.dtype for out in model(X)]  # type: ignore[operator]


@pytest.fixture
def model() -> Encoder:
    torch.manual_seed(0)
    return Encoder()


def test_softmax_of_one_module_to_float32_and_back_eager_and_compiled(model: Encoder) -> None:
    """The promise of the whole: one op, one module, no edit of the model, and off again without a trace."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda x: model(x), backend=counter, fullgraph=True)
    assert dtypes(model) == dtypes(compiled) == [LOW, LOW, LOW]
    assert counter.frame_count == 1
    applied = apply_policy(model, {"probe": {"softmax": "fp32"}})
    assert dtypes(model) == dtypes(compiled) == dtypes(compiled) == [LOW, HIGH, LOW]
    assert counter.frame_count == 2
    applied.remove()
    assert dtypes(model) == dtypes(compiled) == [LOW, LOW, LOW]
    assert counter.frame_count == 2


def test_one_star_is_one_part_of_a_name(model: Encoder) -> None:
    """The glob of one part selects the model itself too, so that the ops of its own forward change."""
    assert apply_policy(model, {"*": "fp32"}).modules == ("encoder", "probe", "head")
    assert apply_policy(model, {"": {"softmax": "fp32"}}).modules == ("",)
    assert apply_policy(model, {"**": {"softmax": "fp32"}}).modules[0] == ""


def test_layer_of_torch_by_glob(model: Encoder) -> None:
    """`*` is one part of a name; torch's fast path for the layer must not pass the rules by."""
    with apply_policy(model, {"encoder.*.linear1": {"linear": "fp32"}}) as applied:
        assert applied.modules == ("encoder.0.linear1", "encoder.1.linear1")
        assert dtypes(model.eval())[0] is HIGH
    assert dtypes(model)[0] is LOW


def test_a_module_wholly_in_float32(model: Encoder) -> None:
    """The head in float32 (pytorch#49038), its arguments too."""
    with apply_policy(model, {"head": "fp32"}):
        assert dtypes(model) == [LOW, LOW, HIGH]
        with autocast("cpu"):
            low = X.bfloat16()
            with torch.autocast("cpu", enabled=False):
                expected = nn.functional.linear(low.float(), model.head.weight, model.head.bias)
            assert torch.equal(model.head(low), expected)


def test_rules_change_the_policy_of_the_region_around(model: Encoder) -> None:
    """Inside a region with a policy, the module changes that policy, not the default."""
    policy = OpPolicy.default("cpu").override({"linear": "fp32"})
    with apply_policy(model, {"probe": {"softmax": "fp32"}}), autocast("cpu", policy=policy):
        linear, weights, head = model(X)
    assert [linear.dtype, weights.dtype, head.dtype] == [HIGH, HIGH, HIGH]


def test_a_shared_module_is_selected_by_each_of_its_names() -> None:
    """A glob that matches the second name of a module leaves it in low precision, and says nothing."""
    model = nn.ModuleDict({"encoder": nn.ModuleDict({"proj": nn.Linear(16, 16)})})
    model["decoder"] = nn.ModuleDict({"proj": model["encoder"]["proj"], "norm": nn.LayerNorm(16)})
    with apply_policy(model, {"decoder.*": "fp32"}) as applied, autocast("cpu"):
        assert applied.modules == ("encoder.proj", "decoder.norm")
        assert model["decoder"]["proj"](X).dtype is HIGH
    with apply_policy(model, {"*.proj": {"linear": "fp32"}}) as applied:
        assert applied.explain("encoder.proj", "linear")[0].origin == "module glob '*.proj'"


def test_explain_names_the_glob(model: Encoder) -> None:
    """Who wonders about a dtype must be led to the glob."""
    with apply_policy(model, {"pro*": {"softmax": "fp32"}}) as applied:
        assert applied.explain("probe", "softmax")[0].origin == "module glob 'pro*'"
        with pytest.raises(PolicyError, match="The module 'head' has no rules of its own"):
            applied.explain("head", "softmax")
        with pytest.raises(PolicyError, match=r"The module \['probe'\] has no rules"):
            applied.explain(["probe"], "softmax")


def test_copies_compute_with_their_own_weights(model: Encoder) -> None:
    """A copy whose forward were bound to the original would train the wrong weights, silently."""
    with apply_policy(model, {"head": {"linear": "fp32"}}):
        twin = copy.deepcopy(model)
        with torch.no_grad():
            twin.head.weight.zero_()
            twin.head.bias.zero_()
        assert torch.count_nonzero(twin(X)[2]) == 0
        assert dtypes(twin)[2] is HIGH
        read = pickle.loads(pickle.dumps(model))
        assert dtypes(read)[2] is HIGH
        assert all(map(torch.equal, read(X), model(X)))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_of_a_compiled_module_have_its_rules(duplicate: Callable[[nn.Module], nn.Module]) -> None:
    """An EMA copy or a saved model computes a compiled layer in low precision, though its rule is fp32."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.ones(2, 4)
    model[1] = torch.compile(model[1], backend="eager")
    applied = apply_policy(model, {"1": "fp32"})
    twin = duplicate(model)
    with torch.no_grad(), autocast("cpu"):
        assert model(x).dtype is twin(x).dtype is HIGH
        applied.remove()
        assert (model(x).dtype, twin(x).dtype) == (LOW, HIGH)


@pytest.mark.parametrize("rules", ["fp32", {"linear": "fp32"}])
@pytest.mark.parametrize("exported", [False, True])
def test_a_model_of_fx_with_rules_compiles(exported: bool, rules: object) -> None:
    """Dynamo reads the code of the forward of a graph module: an AttributeError about one of our classes."""
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.ones(1, 4)
    graph = torch.export.export(model, (x,)).module() if exported else torch.fx.symbolic_trace(model)
    for outer, glob in ((graph, ""), (nn.Sequential(graph), "0")):
        with apply_policy(outer, {glob or graph: rules}), autocast("cpu"):
            assert torch.compile(outer, backend="eager", fullgraph=True)(x).dtype is HIGH


def test_a_later_rule_of_a_compiled_module_wins() -> None:
    """A glob that selects a compiled module and what is in it overrides the rule that comes after it."""
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.ones(2, 4)
    model[0] = torch.compile(model[0], backend="eager")
    applied = apply_policy(model, {"**": {"linear": "fp32"}, "0": {"linear": "lower_precision_fp"}})
    assert applied.modules == ("", "0")
    with torch.no_grad(), applied, autocast("cpu"):
        assert model(x).dtype is LOW
    assert "forward" not in vars(model[0]._orig_mod)


def test_copies_of_attributes_compute_with_their_own_weights_or_raise(model: Encoder) -> None:
    """Replicas of nn.DataParallel, and shallow copies that get other weights, use those of the original."""
    with apply_policy(model, {"head": "fp32"}):
        replica, shallow = model.head._replicate_for_data_parallel(), copy.copy(model.head)
        assert torch.equal(shallow(X), model.head(X))  # it has the same weights
        for each in (replica, shallow):
            each._parameters = {"weight": torch.zeros(4, 16), "bias": torch.zeros(4)}
        with autocast("cpu"):
            assert replica(X).dtype is HIGH
        assert torch.count_nonzero(replica(X)) == 0
        with pytest.raises(PolicyError, match="This Linear has the attributes of a module with rules"):
            shallow(X)
    assert model.head._replicate_for_data_parallel.__func__ is nn.Module._replicate_for_data_parallel


@pytest.mark.parametrize("rules", ["fp32", {"linear": "fp32"}], ids=["fp32", "op"])
def test_forward_keeps_its_signature(rules: object, model: Encoder) -> None:
    """Trainers that pass the columns which forward names pass none, and exports know no argument's name."""
    wanted = inspect.signature(model.forward)
    with apply_policy(model, {"": rules}) as applied, apply_policy(model, {"": rules}):
        for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert inspect.signature(each.forward) == wanted
    applied.remove()
    model.forward = lambda own: own  # type: ignore[assignment]
    with apply_policy(model, {"": rules}):
        assert [*inspect.signature(model.forward).parameters] == ["own"]


@pytest.mark.parametrize("strict", [False, True])
def test_exported_with_sizes_by_name(strict: bool) -> None:
    """torch.export refuses dynamic_shapes that name the arguments of a model with a rule of its own."""
    model = nn.Linear(4, 4)
    with apply_policy(model, {"": "fp32"}):
        shapes = {"input": {0: torch.export.Dim.DYNAMIC}}
        program = torch.export.export(model, (torch.ones(2, 4),), dynamic_shapes=shapes, strict=strict)
    assert program.module()(torch.ones(5, 4)).shape == (5, 4)


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        ({"hed": "fp32"}, "'hed' matches no module of Encoder; near names are 'head'"),
        ({"head": "fp16"}, "'fp16' is not a rule for a module"),
        ({"head": {"linaer": "fp32"}}, "'head': .*Did you mean 'linear'"),
        ({"probe": {"softmax": "fp32"}, "nothing.*": "fp32"}, "matches no module"),
    ],
)
def test_bad_input_leaves_the_model_as_it_was(rules: dict, text: str, model: Encoder) -> None:
    """Half of the rules on the model would be worse than none."""
    before = {name: set(module.__dict__) for name, module in model.named_modules()}
    with pytest.raises(PolicyError, match=text):
        apply_policy(model, rules)
    assert {name: set(module.__dict__) for name, module in model.named_modules()} == before


def test_removing_under_a_later_wrapper_is_refused(model: Encoder) -> None:
    """Taking off what is underneath would take the later wrapper with it."""
    first = apply_policy(model, {"head": {"linear": "fp32"}})
    second = apply_policy(model, {"head": {"linear": "unchanged"}})
    with pytest.raises(PolicyError, match="replaced after the policy was applied"):
        first.remove()
    second.remove()
    assert dtypes(model)[2] is HIGH
    first.remove()
    first.remove()
    assert dtypes(model)[2] is LOW


def test_rules_are_removed_while_the_module_is_called(model: Encoder) -> None:
    """A thread that has looked up the module's forward before ends in a KeyError."""
    applied = apply_policy(model, {"head": "fp32"})
    forward = model.head.forward
    applied.remove()
    with autocast("cpu"):
        assert forward(X).dtype is HIGH


@pytest.mark.parametrize("strict", [False, True])
def test_export_refuses_rather_than_dropping_the_rules(model: Encoder, strict: bool) -> None:
    """torch.export would keep the region and drop the policy: the program would compute otherwise."""
    from torch._dynamo.exc import TorchRuntimeError

    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu"):
                return self.inner(x)[1]

    with (
        apply_policy(model, {"probe": {"softmax": "fp32"}}),
        pytest.raises((PolicyError, TorchRuntimeError), match=r"torch\.export cannot keep"),
    ):
        torch.export.export(Inside(), (X,), strict=strict)


@pytest.mark.filterwarnings("ignore:.torch.jit")
@pytest.mark.parametrize("outer", [lambda head: head, nn.Sequential])
def test_scripting_is_refused(outer: object, model: Encoder) -> None:
    """TorchScript has op rules of its own and would drop these."""
    scripted = outer(model.head)  # type: ignore[operator]
    with (
        apply_policy(model, {"head": {"linear": "fp32"}}),
        pytest.raises(PolicyError, match=r"cannot compile Linear, .*Call remove\(\)"),
    ):
        torch.jit.script(scripted)
    assert torch.equal(torch.jit.script(scripted)(X), scripted(X))


@pytest.mark.filterwarnings("ignore:.torch.jit")
@pytest.mark.parametrize("make", [torch.jit.script, lambda module: torch.jit.trace(module, torch.ones(1, 2))])
def test_rules_of_scripted_modules_are_refused(make: Callable[[nn.Module], nn.Module]) -> None:
    """The call of a traced module, or apply_policy, ends with an internal error of torch."""
    model = nn.Sequential(nn.Linear(2, 2), make(nn.Linear(2, 2)))
    with pytest.raises(PolicyError, match=r"'1' is compiled by TorchScript"):
        apply_policy(model, {"*": "fp32"})
    assert "forward" not in vars(model[0])
    with pytest.raises(PolicyError, match=r"The model is compiled by TorchScript"):
        apply_policy(model[1], {nn.Module: "fp32"})


class InParts(nn.Module):
    """A forward of each kind that runs after it was called; yields what its layer returns, twice."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.__class__ = {"generator": Yielding, "coroutine": Awaited, "async generator": AsyncYielding}[kind]


class Yielding(InParts):
    def forward(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        yield self.layer(x)
        yield self.layer(x)


class Awaited(InParts):
    async def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        first = self.layer(x)
        await asyncio.sleep(0)
        return [first, self.layer(x)]


class AsyncYielding(InParts):
    async def forward(self, x: torch.Tensor) -> AsyncIterator[torch.Tensor]:
        yield self.layer(x)
        await asyncio.sleep(0)
        yield self.layer(x)


async def collected(result: object) -> list[torch.Tensor]:
    if isinstance(result, AsyncIterator):
        return [each async for each in result]
    return list(await result if inspect.isawaitable(result) else result)  # type: ignore[call-overload]


@pytest.mark.parametrize("kind", ["generator", "coroutine", "async generator"])
@pytest.mark.parametrize("rules", ["fp32", {"linear": "fp32"}], ids=["fp32", "op"])
@pytest.mark.parametrize("own", [False, True], ids=["of its class", "of its own"])
def test_rules_hold_in_a_forward_that_runs_later(rules: object, kind: str, own: bool) -> None:
    """The rules are off when the body of a generator or a coroutine runs: it computes in low precision."""
    model, x = InParts(kind), torch.ones(1, 4)
    if own:  # as trainers replace it
        model.forward = model.forward
    applied = apply_policy(model, {"": rules})
    with autocast("cpu"):
        for each in (model, copy.deepcopy(model)):
            assert [result.dtype for result in asyncio.run(collected(each(x)))] == [HIGH, HIGH]
            assert torch.is_autocast_enabled("cpu")
        applied.remove()
        assert [result.dtype for result in asyncio.run(collected(model(x)))] == [LOW, LOW]


class Collecting(nn.Linear):
    """Writes to a list and a dict that it is given, as layers do that collect attentions or losses."""

    def forward(
        self, x: torch.Tensor, seen: list[torch.Tensor], *, losses: dict[str, object]
    ) -> torch.Tensor:
        seen.append(super().forward(x))
        losses["own"] = seen[-1].square().mean()
        return seen[-1]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("earlier", [LOW, HIGH])
def test_what_a_float32_module_writes_to_its_arguments_arrives(earlier: torch.dtype, compiled: bool) -> None:
    """In a region, a list or dict that a module with the rule fp32 fills stays empty."""
    model, x, kept = Collecting(4, 4), torch.ones(1, 4, dtype=LOW), torch.ones(1, dtype=earlier)
    seen, losses = [kept], dict[str, object](kept=kept)
    with apply_policy(model, {"": "fp32"}), torch.no_grad(), autocast("cpu"):
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        result = run(x, seen, losses=losses)
    assert (result.dtype, seen[1].dtype, len(seen), list(losses)) == (HIGH, HIGH, 2, ["kept", "own"])
    assert seen[0] is losses["kept"] is kept


@dataclasses.dataclass
class Batch:
    """What layers of some models take, and write to."""

    x: torch.Tensor
    seen: list[torch.Tensor]
    named: dict[str, torch.Tensor]
    window: deque[torch.Tensor]
    whole: Batch | None = None
    out: torch.Tensor | None = None


@dataclasses.dataclass(eq=False)
class Replacing(nn.Module):
    """Reads a dataclass, and replaces, inserts and removes what it holds."""

    width: int

    def __post_init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(self.width, self.width)

    def forward(self, batch: Batch, *, again: Batch) -> None:
        batch.out = self.linear(again.x)
        batch.seen.insert(0, batch.seen[0] + 1)
        batch.window.append(batch.out)
        batch.named["both"] = batch.named.pop("a") + batch.named["b"]


@pytest.mark.parametrize("compiled", [False, True])
def test_a_float32_module_takes_and_writes_dataclasses(compiled: bool) -> None:
    """Tensors in a dataclass, also one given twice, stay in low precision, or what is written is lost."""
    model, low = Replacing(4), [torch.full((1, 4), float(n), dtype=LOW) for n in range(4)]
    batch = Batch(low[0], [low[1]], {"a": low[2], "b": low[3]}, deque(low, maxlen=5))
    batch.whole = batch  # as parts of trees know where they belong
    with apply_policy(model, {"": "fp32"}), torch.no_grad(), autocast("cpu"):
        run = torch.compile(model, backend="aot_eager") if compiled else model
        run(batch, again=batch)
    assert batch.out is not None
    assert batch.x is low[0]
    assert batch.named["b"] is low[3]
    assert [*batch.window][:-1] == low
    assert batch.window[-1] is batch.out
    assert list(batch.named) == ["b", "both"]
    assert batch.out.dtype is batch.seen[0].dtype is batch.named["both"].dtype is HIGH
    assert [t[0, 0].item() for t in (*batch.seen, batch.named["both"])] == [2, 1, 5]


@pytest.mark.parametrize("compiled", [False, True])
def test_a_tensor_that_a_float32_module_is_given_twice_is_one_tensor(compiled: bool) -> None:
    """Attention takes its queries and keys for different tensors: it projects and rounds in another way."""

    class Comparing(nn.Module):
        def forward(
            self, query: torch.Tensor, key: torch.Tensor, *, values: list[torch.Tensor]
        ) -> torch.Tensor:
            assert query.dtype is HIGH
            return query + 1 if query is key and key is values[0] else query

    model, x = nn.Sequential(Comparing()), torch.zeros(2, 4, dtype=LOW)
    with apply_policy(model, {"0": "fp32"}, device_type="cpu"), autocast("cpu"):
        run = torch.compile(model[0], backend="aot_eager") if compiled else model[0]
        assert torch.equal(run(x, x, values=[x]), torch.ones(2, 4))


class Remembering(nn.Linear):
    """Moves tensors within the containers that it is given, and from one to the other."""

    def forward(
        self, x: torch.Tensor, window: deque[torch.Tensor], *, old: list[torch.Tensor]
    ) -> torch.Tensor:
        old.insert(0, window.popleft())
        window.append(super().forward(x))
        return torch.stack([*window, *old]).sum(0)


@pytest.mark.parametrize("compiled", [False, True])
def test_what_a_float32_module_moves_is_what_it_was_given(compiled: bool) -> None:
    """A queue to which a module with the rule fp32 appends holds float32 copies of what it held before."""
    model, low = Remembering(4, 4), [torch.full((1, 4), float(n), dtype=LOW) for n in range(4)]
    window, old = deque(low[:3], maxlen=3), [low[3]]
    with apply_policy(model, {"": "fp32"}), torch.no_grad(), autocast("cpu"):
        run = torch.compile(model, backend="aot_eager") if compiled else model
        result = run(low[0], window, old=old)
    assert result.dtype is window[-1].dtype is HIGH
    assert len(window) == 3
    assert window[0] is low[1]
    assert window[1] is low[2]
    assert old[0] is low[0]
    assert old[1] is low[3]


class Norm(nn.LayerNorm):
    """A subclass, which a rule for its base covers."""


Norm.__module__ = "repo-name.<version>.norm"  # of a module that `importlib` or `torch.package` loaded


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), Norm(8), nn.Linear(8, 8))


@pytest.mark.parametrize(
    ("select", "text", "selected"),
    [
        (lambda _model: nn.LayerNorm, "torch.nn.modules.normalization:LayerNorm", ("1",)),
        (lambda _model: "torch.nn.modules.linear:Linear", "torch.nn.modules.linear:Linear", ("0", "2")),
        (lambda _model: Norm, "repo-name.<version>.norm:Norm", ("1",)),
        (lambda model: model[2], "2", ("2",)),
        (lambda model: model, "", ("",)),
    ],
    ids=["class", "name of a class", "class of a module with an odd name", "module", "the model"],
)
def test_rules_by_class_and_by_module(select, text, selected, tmp_path) -> None:
    """A rule for a class or a module misses it, or is lost on the way through a file."""
    model = layers()
    path = tmp_path / "rules.toml"
    with apply_policy(model, {select(model): "fp32"}) as applied:
        assert applied.modules == selected
        path.write_text(applied.to_toml())
        assert f'"{text}" = "fp32"' in applied.to_toml()
        with autocast("cpu"):
            for name in selected:
                assert model.get_submodule(name)(torch.ones(2, 8)).dtype is HIGH
    with apply_policy(layers(), path) as again:
        assert again.modules == selected


def test_a_later_rule_wins_whatever_selects_the_module() -> None:
    """A rule for one module does not refine the rule of its class."""
    model = layers()
    linear = {"linear": "fp32"}
    with apply_policy(model, {nn.Linear: linear, model[2]: {"linear": "lower_precision_fp"}}) as applied:
        assert applied.explain("0", "linear")[0].rule == "fp32"
        assert applied.explain("0", "linear")[0].origin == "module class 'torch.nn.modules.linear:Linear'"
        assert applied.explain("2", "linear")[0].rule == "lower_precision_fp"


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("between", [False, True], ids=["", "another wrapper between"])
def test_rules_of_a_second_call_come_on_top(compiled: bool, between: bool) -> None:
    """Advice applied to a model that has rules calls itself without end, or loses to them."""
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.ones(2, 4)
    outer = model[0]
    linear, both = {"0": {"linear": "fp32"}}, {"0": {"linear": "lower_precision_fp", "softmax": "fp32"}}

    def results() -> list[torch.dtype]:
        run = torch.compile(model, backend="aot_eager") if compiled else model
        with autocast("cpu"):
            return [run(x).dtype, copy.deepcopy(model)(x).dtype, pickle.loads(pickle.dumps(model))(x).dtype]

    first = apply_policy(model, linear)
    assert results() == [HIGH] * 3
    if between:
        outer.forward = functools.partial(forward_as_float32, outer.forward)
    second = apply_policy(model, both)
    assert results() == [HIGH if between else torch.bfloat16] * 3
    second.remove()
    assert results() == [HIGH] * 3
    if not between:
        first.remove()
        assert results() == [torch.bfloat16] * 3


def forward_as_float32(forward: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return forward(x).float()


@pytest.mark.parametrize(
    ("selector", "message"),
    [
        (nn.Conv2d, "'torch.nn.modules.conv:Conv2d' matches no module of Sequential"),
        (nn.Linear(1, 1), "The Linear is not a module of this Sequential"),
        (3, "3 does not select modules; use a glob, a module or a module class"),
    ],
    ids=["class", "module", "number"],
)
def test_selections_without_a_module_are_refused(selector, message) -> None:
    """A rule that applies to nothing is ignored."""
    model = layers()
    with pytest.raises(PolicyError, match=message):
        apply_policy(model, {"0": "fp32", selector: "fp32"})
    assert "forward" not in model[0].__dict__


@pytest.mark.parametrize("rules", [OpPolicy.uniform("cpu"), "policy.toml", ["fp32"], None])
def test_rules_of_another_kind_are_refused_in_words(rules: object, model: Encoder) -> None:
    """A whole policy, or a path as a string, ends in an AttributeError."""
    with pytest.raises(TypeError, match=r"must map modules to op rules"):
        apply_policy(model, rules)


def test_a_name_that_an_error_proposes_selects_its_module() -> None:
    """A model with a part `a[0]` is told again and again to write `a[0]`, which as a glob means `a0`."""
    model = nn.Sequential(OrderedDict({"a[0]": nn.Linear(4, 4), "b*:": nn.Linear(4, 4)}))
    for wrong, name in (("a[1]", "a[0]"), ("b*;", "b*:")):
        with pytest.raises(PolicyError, match="near names are '") as caught:
            apply_policy(model, {wrong: "fp32"})
        proposed = str(caught.value).rpartition("near names are '")[2].partition("'")[0]
        assert [*apply_policy(model, {proposed: "fp32"}).modules] == [name]


def test_a_module_used_twice_in_a_region_casts_its_weights_once() -> None:
    """Casts end with the module's call, and each use's gradient is rounded to float32 by itself."""
    layer, x = nn.LayerNorm(16), torch.randn(4, 16)
    low = {"layer_norm": "lower_precision_fp"}

    def gradient(policy: OpPolicy | None) -> torch.Tensor:
        with autocast("cpu", policy=policy):
            loss = (layer(x) + layer(2 * x) + layer(3 * x)).float().square().sum()
        return torch.autograd.grad(loss, [layer.weight])[0]

    expected = gradient(OpPolicy.default("cpu").override(low))
    with apply_policy(nn.Sequential(layer), {"0": low}):
        assert torch.equal(gradient(None), expected)


@pytest.mark.parametrize("rules", ["fp32", {"linear": "fp32"}])
def test_rules_of_a_model_on_the_meta_device_hold_where_its_weights_go(rules: object) -> None:
    """A model without memory, as ensembles build it, gets no rules: no backend serves "meta"."""
    with torch.device("meta"):
        layer = nn.Sequential(nn.Linear(2, 2))
    with apply_policy(layer, {"0": rules}), autocast("cpu"):
        weights = {name: torch.ones(p.shape) for name, p in layer.named_parameters()}
        assert torch.func.functional_call(layer, weights, torch.ones(1, 2)).dtype is HIGH
