"""materialize: a model with the casts of a region written into it."""

from __future__ import annotations

import copy
import dataclasses
import operator
import pickle
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, given
from hypothesis import strategies as st
from torch import Tensor, nn

import amp_core
from amp_core import MaterializeError, OpPolicy, PolicyError, autocast, materialize

from ..drawn import examples

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch copies its own graphs

LOW = torch.bfloat16
DEFAULT = OpPolicy.default("cpu")
POLICIES = {
    "default": None,
    "uniform": OpPolicy.uniform("cpu"),
    "exact": DEFAULT.override({"softmax": "fp32", "gelu": "fp32", "linear": "low_in_fp32_out"}),
}


class Norm(nn.Module):
    """As in many language models: it goes back to the dtype that it was given."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class Block(nn.Module):
    """Attention and a feed-forward part, with an island of float32 and a branch on a dtype."""

    def __init__(self, size: int = 16) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = Norm(size), nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.mlp = nn.Sequential(nn.LayerNorm(size), nn.Linear(size, 32), nn.GELU(), nn.Linear(32, size))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        if q.dtype is LOW:
            q = q * 1.5
        x = x + self.out(F.scaled_dot_product_attention(q, k, v))
        with torch.autocast("cpu", enabled=False):
            x = x.float() * 1.001
        return torch.softmax(self.mlp(x), -1)


def in_region(model: nn.Module, *args: Any, policy: OpPolicy | None = None, dtype: torch.dtype = LOW) -> Any:
    with torch.no_grad(), autocast("cpu", dtype, policy=policy):
        return model(*args)


def block() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Block().eval(), torch.randn(2, 5, 16)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bit_equal_to_the_region(policy: OpPolicy | None, dtype: torch.dtype) -> None:
    """A cast in another place gives other results in production than in the tests."""
    model, x = block()
    low = materialize(model, (x,), policy=policy, dtype=dtype)
    wanted = in_region(model, x, policy=policy, dtype=dtype)
    assert low(x).dtype is wanted.dtype
    assert torch.equal(low(x), wanted)
    with autocast("cpu", torch.float16, enabled=False):
        assert torch.equal(low(x), wanted)


LAYERS = [
    lambda: nn.Linear(8, 8),
    lambda: nn.LayerNorm(8),
    nn.GELU,
    lambda: nn.Softmax(-1),
    lambda: Norm(8),
    lambda: nn.BatchNorm1d(8),
]


class Program(nn.Module):
    """A generated program: layers, skips, casts of its own and nested regions."""

    def __init__(self, steps: list[tuple[int, str]]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(LAYERS[kind]() for kind, _ in steps)
        self.steps = steps

    def forward(self, x: Tensor) -> Tensor:
        for layer, (_, around) in zip(self.layers, self.steps, strict=True):
            if around == "float":
                x = x.float()
            if around == "off":
                with torch.autocast("cpu", enabled=False):
                    x = layer(x.float())
            elif around == "fp16":
                with amp_core.autocast("cpu", torch.float16):
                    x = layer(x.float())
            else:
                x = x + layer(x) if around == "skip" else layer(x)
        return x


@examples(12, phases=[Phase.explicit, Phase.generate])
@given(
    st.lists(
        st.tuples(st.integers(0, len(LAYERS) - 1), st.sampled_from(["", "", "skip", "float", "off", "fp16"])),
        min_size=1,
        max_size=6,
    ),
    st.sampled_from(list(POLICIES)),
)
def test_random_programs_are_bit_equal(steps: list[tuple[int, str]], policy: str) -> None:
    """Casts of the program's own, nested regions and mixed inputs, in every order."""
    torch.manual_seed(0)
    model, x = Program(steps).eval(), torch.randn(4, 8)
    try:
        wanted = in_region(model, x, policy=POLICIES[policy])
    except RuntimeError:  # torch's own kernel refuses mixed dtypes
        with pytest.raises((MaterializeError, RuntimeError)):
            materialize(model, (x,), policy=POLICIES[policy], dtype=LOW)
        return
    got = materialize(model, (x,), policy=POLICIES[policy], dtype=LOW)(x)
    assert got.dtype is wanted.dtype
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_ops_without_a_rule_that_torch_composes_of_others(policy: OpPolicy | None) -> None:
    """Their parts have rules: kept whole in the graph, they would run in float32."""

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = torch.inner(x, x).sum() + torch.einsum("bij,bkj->bik", x, x).sum()
            return y + torch.tensordot(x, x.transpose(0, 2), 1).sum()

    torch.manual_seed(0)
    model, x = Model(), torch.randn(3, 3, 8)
    wanted = in_region(model, x, policy=policy)
    assert torch.equal(materialize(model, (x,), policy=policy, dtype=LOW)(x), wanted)


def test_parts_that_are_composed_themselves() -> None:
    """`inner` calls `tensordot`, which calls `mm`: the graph keeps `tensordot`, in float32.

    In a process of its own: a policy that was in force before may have put kernels in place that hide it.
    """
    code = (
        "import torch, amp_core\n"
        "class Model(torch.nn.Module):\n"
        "    def forward(self, x): return torch.inner(x, x)\n"
        "x = torch.randn(3, 3, 8)\n"
        "assert amp_core.materialize(Model(), (x,), dtype=torch.bfloat16)(x).dtype is torch.bfloat16\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.filterwarnings("ignore:The tensor attributes")  # by torch.export, on every RNN
@pytest.mark.parametrize("rnn", [nn.LSTM, nn.GRU])
def test_what_is_not_bit_equal_is_refused(rnn: Any) -> None:
    """Torch traces its recurrent layers with other kernels than it runs: no silent difference."""
    torch.manual_seed(0)
    model, x = nn.Sequential(rnn(8, 8)).eval(), torch.randn(2, 3, 8)
    try:
        low = materialize(model, (x,), dtype=LOW)
    except MaterializeError:
        return
    assert torch.equal(low(x)[0], in_region(model, x)[0])


def test_weights_are_stored_once_in_their_dtype() -> None:
    """Casts at each call cost time, a second copy costs memory."""
    model, x = block()
    before = copy.deepcopy(model.state_dict())
    low = materialize(model, (x,), dtype=LOW)
    dtypes = {name: weight.dtype for name, weight in low.named_parameters()}
    assert dtypes.keys() == dict(model.named_parameters()).keys()
    assert dtypes["qkv.weight"] is dtypes["mlp.3.bias"] is LOW
    assert dtypes["norm.weight"] is dtypes["mlp.0.weight"] is torch.float32
    assert not any(p.requires_grad for p in low.parameters())
    weights = [n for n in low.graph.nodes if n.op == "get_attr"]
    assert not [user for n in weights for user in n.users if "_to_copy" in str(user.target)]
    after = model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert all(p.requires_grad for p in model.parameters())


def test_a_weight_of_both_precisions_keeps_float32() -> None:
    """A tied embedding is read in float32 and multiplied in low precision: neither may change."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(10, 8)
            self.head = nn.Linear(8, 10, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: Tensor) -> Tensor:
            rows = self.embed(ids)
            return self.head(rows) + rows.sum()

    model, ids = Tied().eval(), torch.arange(4)
    low = materialize(model, (ids,), dtype=LOW)
    assert torch.equal(low(ids), in_region(model, ids))
    assert {p.dtype for p in low.parameters()} == {torch.float32}


def test_a_table_of_which_rows_are_cast_is_stored_low() -> None:
    """Rows are cast one by one as the whole is: a float32 table would cost twice the memory for nothing."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.other = nn.Embedding(10, 8), nn.Embedding(10, 8)
            self.head = nn.Linear(8, 10, bias=False)
            self.head.weight = self.table.weight
            self.start = nn.Parameter(torch.randn(1, 1, 8))

        def forward(self, ids: Tensor) -> Tensor:
            hidden = self.head(self.other(ids).unsqueeze(1).transpose(0, 1))
            return hidden + self.head(self.start.expand(1, len(ids), 8)[:, :1]) + self.head(self.table(ids))

    torch.manual_seed(0)
    model, ids = Tied().eval(), torch.arange(4)
    low = materialize(model, (ids,), dtype=LOW)
    assert torch.equal(low(ids), in_region(model, ids))
    stored = {name: p.dtype for name, p in low.named_parameters()}
    assert stored == dict.fromkeys(("table.weight", "other.weight", "start"), LOW)
    assert not any(p.requires_grad for p in low.parameters())


def test_memory_and_nodes_of_a_deep_model() -> None:
    """The figure that users measure: half of float32, and one op per op."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))).eval()
    low = materialize(model, (torch.randn(2, 64),), dtype=LOW)
    nbytes = sum(p.nbytes for p in low.parameters())
    assert nbytes == sum(p.nbytes for p in model.parameters()) // 2
    assert [n.target for n in low.graph.nodes if n.op == "call_method"] == ["size", "size", "to"]
    calls = [n.target for n in low.graph.nodes if n.op == "call_function"]
    checks = 2 * [operator.getitem, operator.eq, torch._assert]
    assert sorted(map(str, calls)) == sorted(map(str, checks + 8 * [torch._C._nn.linear]))


@pytest.mark.parametrize(
    "shapes", [None, ({0: torch.export.Dim("batch", max=9)},)], ids=["static", "dynamic"]
)
def test_pickled_and_copied_with_its_conditions(shapes: Any) -> None:
    """A server loads the file elsewhere; a shape that the graph was not made for must not pass there."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
            self.register_buffer("shift", torch.randn(8), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.linear(x)) + self.shift + torch.ones(8)

    model, x = Model().eval(), torch.randn(3, 8)
    low = materialize(model, (x,), dtype=LOW, dynamic_shapes=shapes)
    assert low.state_dict().keys() <= model.state_dict().keys()
    for other in (low, copy.deepcopy(low), pickle.loads(pickle.dumps(low))):
        assert torch.equal(other(x), in_region(model, x))
        assert torch.equal(other(x=x), low(x))
        with pytest.raises(AssertionError, match="size"):
            other(torch.randn(10, 8))
        with pytest.raises(TypeError, match="argument"):
            other(x, x)


def test_pickled_with_buffers_that_ops_take_alone() -> None:
    """Such ops run where fx loads the file: a counter stops, and values loaded later are not used."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.register_buffer("scale", torch.rand(8))
            self.register_buffer("steps", torch.tensor(0))
            self.register_buffer("decay", torch.rand(8), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            self.steps.add_(1)
            self.decay.mul_(0.5)
            return self.linear(x) * self.scale.sqrt() * self.steps + self.decay.sin()

    def results(model: nn.Module) -> Tensor:
        first = model(x)
        model.load_state_dict({**model.state_dict(), "scale": torch.full((8,), 0.25)})
        return torch.stack([first, model(x)])

    model, x = Model().eval(), torch.randn(3, 8)
    low = materialize(model, (x,), dtype=LOW)
    data = pickle.dumps(copy.deepcopy(low))
    assert b"amp_core" not in data
    loaded = pickle.loads(pickle.dumps(pickle.loads(data)))
    assert {name for name, _ in low.named_buffers()} == {"scale", "steps", "decay"}
    with torch.no_grad(), autocast("cpu", LOW):
        wanted = results(copy.deepcopy(model))  # the graph writes to the buffers of the model itself
    for each in (low, loaded):
        assert torch.equal(results(each), wanted)


def test_sizes_that_a_model_reads() -> None:
    """With dynamic shapes, a model that reads its batch size would be traced again without end."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, int]:
            rows = self.linear(x).view(x.shape[0], -1)
            return rows * x.shape[0] + torch.zeros(x.shape[0], 1), x.numel()

    model, batch = Model().eval(), ({0: torch.export.Dim("batch")},)
    for policy in (None, OpPolicy.uniform("cpu")):
        low = materialize(model, (torch.randn(3, 2, 4),), dtype=LOW, policy=policy, dynamic_shapes=batch)
        x = torch.randn(5, 2, 4)
        with torch.no_grad(), autocast("cpu", LOW, policy=policy):
            wanted = model(x)
        assert torch.equal(low(x)[0], wanted[0])
        assert low(x)[1] == wanted[1] == 40


def test_structures_of_arguments_are_compared() -> None:
    """A dict with another key would be computed from the wrong values."""

    class Model(nn.Module):
        def forward(self, inputs: dict[str, Tensor], *, gain: Tensor) -> dict[str, Any]:
            return {"out": [inputs["x"] @ inputs["y"] * gain], "x": inputs["x"]}

    x, gain = torch.randn(4, 4), torch.ones(())
    low = materialize(Model(), ({"x": x, "y": x},), {"gain": gain}, dtype=LOW)
    assert low({"x": x, "y": x}, gain=gain)["out"][0].dtype is LOW
    with pytest.raises(ValueError, match="tree spec"):
        low({"x": x, "z": x}, gain=gain)


def test_ops_whose_bindings_have_other_defaults() -> None:
    """A loss would be summed up in another way, or an image not be resized, only after materialize."""

    class Model(nn.Module):
        def forward(self, x: Tensor, rows: Tensor) -> list[Tensor]:
            target = torch.zeros(4, dtype=torch.int64)
            image = F.interpolate(x.view(1, 1, 4, 8), scale_factor=2, mode="nearest")
            losses = [F.cross_entropy(x, target), F.binary_cross_entropy_with_logits(x, x), F.mse_loss(x, -x)]
            return [image, x[:, rows], x[rows], F.triplet_margin_loss(x, x + 1, -x), *losses]

    args = (torch.randn(4, 8), torch.tensor([2, 0]))
    low, wanted = materialize(Model(), args, dtype=LOW, check=False)(*args), in_region(Model(), *args)
    assert [torch.equal(a, b) for a, b in zip(low, wanted, strict=True)] == [True] * 7


def test_conditions_on_shapes_of_several_arguments() -> None:
    """What the trace took for granted holds for each call, and once more after a second export."""

    class Model(nn.Module):
        def forward(self, x: Tensor, y: Tensor, half: bool = True) -> Tensor:
            return (x.view(2, -1, 8).sum(0) @ y.T) if half and x.shape[0] > y.shape[0] else x @ y.T

    auto = torch.export.Dim.AUTO
    x, y = torch.randn(6, 8), torch.randn(3, 8)
    model, shapes = Model(), {"x": {0: auto}, "y": {0: auto}, "half": None}
    low = materialize(model, (x, y, True), dtype=LOW, dynamic_shapes=shapes)
    again = torch.export.export(low, (x, y, True), dynamic_shapes=shapes).module()
    for module in (low, again):
        for rows in ((8, 2), (10, 7)):
            x, y = torch.randn(rows[0], 8), torch.randn(rows[1], 8)
            assert torch.equal(module(x, y, True), in_region(model, x, y))
        for bad in ((7, 3), (4, 6)):
            with pytest.raises((AssertionError, RuntimeError)):
                module(torch.randn(bad[0], 8), torch.randn(bad[1], 8), True)


def test_sizes_on_both_sides_of_a_threshold() -> None:
    """The error would ask for other control flow, and not say which sizes the graph does not hold for."""
    policy = OpPolicy.default("cpu").override({"linear": "lower_precision_fp above 2 kFLOP"})
    shapes = {"input": {0: torch.export.Dim("rows", min=2, max=100)}}
    with pytest.raises(MaterializeError, match=r"(?s)Not all values of rows .* dynamic_shapes= .* threshold"):
        materialize(nn.Linear(8, 8), (torch.ones(4, 8),), policy=policy, dynamic_shapes=shapes)


def test_dynamic_shapes_and_keyword_arguments() -> None:
    """A server sees batches of every size."""
    model, x = block()
    auto = torch.export.Dim.AUTO
    low = materialize(model, (), {"x": x}, dtype=LOW, dynamic_shapes={"x": {0: auto, 1: auto}})
    other = torch.randn(3, 9, 16)
    assert torch.equal(low(x=other), in_region(model, other))


def test_the_result_needs_no_amp_core_to_export_and_compile() -> None:
    """What torch.export refuses under a policy goes through materialize."""
    model, x = block()
    policy = POLICIES["exact"]
    low = materialize(model, (x,), policy=policy, dtype=LOW)
    wanted = in_region(model, x, policy=policy)
    exported = torch.export.export(low, (x,))
    assert not [n for n in exported.graph.nodes if "autocast" in str(n.target) or "amp_core" in str(n.target)]
    assert torch.equal(exported.module()(x), wanted)
    assert torch.equal(torch.compile(low, backend="aot_eager", fullgraph=True)(x), wanted)
    assert torch.equal(copy.deepcopy(low).eval()(x), wanted)


@pytest.mark.slow
def test_ahead_of_time_compiled(tmp_path: Path) -> None:
    """AOTInductor writes a library that is loaded without Python code of the model."""
    model, x = block()
    low = materialize(model, (x,), dtype=LOW)
    package = torch._inductor.aoti_compile_and_package(
        torch.export.export(low, (x,)), package_path=str(tmp_path / "model.pt2")
    )
    result = torch._inductor.aoti_load_package(package)(x)
    torch.testing.assert_close(result, low(x), rtol=0.02, atol=0.01)


@pytest.mark.filterwarnings("ignore")  # of the exporter
def test_onnx(tmp_path: Path) -> None:
    """Another runtime runs the same casts."""
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    model, x = Block().mlp.eval(), torch.randn(3, 16)
    low = materialize(model, (x,), policy=OpPolicy.uniform("cpu"), dtype=torch.float16)
    path = tmp_path / "model.onnx"
    torch.onnx.export(low, (x,), dynamo=True, verbose=False).save(str(path))
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (result,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(result), low(x), rtol=1e-2, atol=1e-3)


@pytest.mark.filterwarnings("ignore")
def test_control_flow_on_values_is_refused_with_its_place() -> None:
    """An error from the depth of torch does not say which line of the model to change."""

    class Gated(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.sum() > 0:  # this line
                return x
            return -x

    model = nn.Sequential(Gated(), nn.Linear(3, 3))
    with pytest.raises(
        MaterializeError, match=r'test_materialize\.py:\d+ in forward: "if x\.sum\(\) > 0:'
    ) as caught:
        materialize(model, (torch.randn(3),))
    assert "torch.cond" in str(caught.value)
    assert not torch.is_autocast_enabled("cpu")
    assert all(p.requires_grad for p in model.parameters())


def test_a_custom_op_that_only_the_trace_has_is_named() -> None:
    """Experts of transformers run as another op when traced; the refusal does not name it."""
    multiply = torch.library.custom_op("amp_core_tests::multiply_traced", mutates_args=())(_multiply)
    multiply.register_fake(_multiply)

    class Experts(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return (multiply if torch.compiler.is_compiling() else _multiply)(x, self.weight)

    model, x = Experts(8, 8).eval(), torch.randn(4, 8)
    with pytest.raises(MaterializeError, match=r"without a rule: amp_core_tests::multiply_traced\.default;"):
        materialize(model, (x,), dtype=LOW)
    policy = DEFAULT.override({"amp_core_tests::multiply_traced": "lower_precision_fp"})
    low = materialize(model, (x,), policy=policy, dtype=LOW)
    assert torch.equal(low(x), in_region(model, x, policy=policy))


def _multiply(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight


@pytest.mark.filterwarnings("ignore")
def test_the_place_is_named_where_modules_have_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a notebook the refusal is an AttributeError: `__main__` has no file there."""
    notebook = types.ModuleType("notebook")
    monkeypatch.setitem(sys.modules, "notebook", notebook)
    code = """
class Gated(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x
"""
    notebook.__dict__["nn"] = nn
    exec(compile(code, "cell-3", "exec"), notebook.__dict__)
    with pytest.raises(MaterializeError, match=r"cell-3:4 in forward"):
        materialize(notebook.Gated(), (torch.randn(3),))


def test_an_op_whose_inner_ops_are_cast_is_named() -> None:
    """`_trilinear` calls `bmm`, which autocast casts: the graph cannot say so."""
    model, x = nn.Bilinear(8, 8, 8).eval(), torch.randn(4, 8)
    with pytest.raises(MaterializeError, match=r"aten::_trilinear\.default"):
        materialize(model, (x, x), dtype=LOW)
    policy = DEFAULT.override({"_trilinear": "lower_precision_fp"})
    low = materialize(model, (x, x), policy=policy, dtype=LOW)
    assert torch.equal(low(x, x), in_region(model, x, x, policy=policy))


class Counting(nn.Module):
    """Replaces a buffer and writes to one, in the mode of training."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return self.drop(self.norm(self.linear(x))) * self.calls


def test_the_check_leaves_buffers_and_generators_as_they_are() -> None:
    """The example arguments enter running statistics, and a seeded training goes on with other numbers."""
    model = Counting()
    before, generator = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    buffers = dict(model.named_buffers())
    low = materialize(model, (torch.randn(5, 6, generator=torch.Generator().manual_seed(0)),))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(buffers[name] is buffer for name, buffer in model.named_buffers())
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(b, before[name]) for name, b in low.named_buffers() if name in before)


def test_the_check_leaves_parameters_as_they_are() -> None:
    """A model that clamps or scales its weights has other ones afterwards, or is refused for them."""

    class Scaling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.gain = nn.Linear(6, 6), nn.Parameter(torch.ones(6))

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.linear.weight.clamp_(-0.1, 0.1)
                self.gain.mul_(0.5)
            return self.linear(x) * self.gain

    model, x = Scaling(), torch.randn(5, 6)
    before = copy.deepcopy(model.state_dict())
    low = materialize(model, (x,), dtype=LOW)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(copy.deepcopy(low)(x), in_region(model, x))


class Replacing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = self.mean + x.mean(0)
        return x - self.mean


def test_a_buffer_whose_replacement_the_trace_loses() -> None:
    """The graph gives the bits of the first call forever, and the check makes only that one."""
    x, model = torch.randn(5, 6), nn.Sequential(nn.Linear(6, 6), Replacing())
    with pytest.raises(MaterializeError, match=r"called again.*loses the buffers that a submodule replaces"):
        materialize(model, (x,), dtype=LOW)
    low, again = copy.deepcopy(materialize(Replacing(), (x,), dtype=LOW)), Replacing()  # no submodule
    for _ in range(2):
        assert torch.equal(low(x), in_region(again, x))


class Positions(nn.Module):
    def __init__(self, refuses: bool) -> None:
        super().__init__()
        self.refuses = refuses
        self.register_buffer("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            self.register_buffer("bias", torch.arange(x.shape[0]).float().unsqueeze(1))
        return x + self.bias if not self.refuses or x.sum() > 0 else x


@pytest.mark.parametrize("refuses", [True, False])
def test_a_buffer_that_the_first_call_fills_is_not_left_without_memory(refuses: bool) -> None:
    """The buffer has a FakeTensor of the trace, the check fails on it, and the model returns such tensors."""
    x, model = torch.randn(5, 6), Positions(refuses)
    with pytest.raises(MaterializeError, match="cannot be one graph" if refuses else "called again"):
        materialize(model, (x,), dtype=LOW)
    assert model.bias is None
    if not refuses or torch.__version__ >= (2, 13):  # a failed torch.export of 2.11 leaves a hook of its own
        assert torch.equal(in_region(model, x), in_region(Positions(refuses), x))


class Caching(nn.Module):
    """Writes to an argument, before it uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, cache: dict[str, Tensor]) -> Any:
        return self.linear(cache["seen"].mul_(0.5).add_(self.linear(x)))


def test_a_model_that_writes_to_its_arguments() -> None:
    """The check runs one model on what the other has written and refuses both, or spoils the arguments."""
    model, x, cache = Caching().eval(), torch.randn(2, 6), {"seen": torch.randn(2, 6)}
    before = cache["seen"].clone()
    low = materialize(model, (x, cache), dtype=LOW)
    assert torch.equal(cache["seen"], before)
    ours, wanted = {"seen": before.clone()}, {"seen": before.clone()}
    assert torch.equal(low(x, ours), in_region(model, x, wanted))
    assert torch.equal(ours["seen"], wanted["seen"])
    assert not torch.equal(ours["seen"], before)


@pytest.mark.parametrize("puts", [True, False])
def test_a_model_that_fills_its_arguments_is_refused(puts: bool) -> None:
    """The check counts one tensor more or less than the graph has, and fails with an error of zip()."""

    class Filling(nn.Module):
        def forward(self, values: dict[str, Tensor]) -> Tensor:
            if puts:
                values["twice"] = 2 * values["x"]
                return values["twice"]
            return 2 * values.pop("x")

    with pytest.raises(MaterializeError, match="Filling puts tensors into the containers"):
        materialize(Filling(), ({"x": torch.ones(3)},), dtype=LOW)


@dataclasses.dataclass
class Outputs:
    """What a model may return, once `torch.export` knows it."""

    logits: Tensor


torch.export.register_dataclass(Outputs)


@pytest.mark.parametrize("writes", [False, True])
def test_results_in_dataclasses_and_what_is_written_are_compared(writes: bool) -> None:
    """The check of a model with wrong results compares nothing, and so passes."""

    class Differing(nn.Module):
        def forward(self, x: Tensor) -> Outputs:
            logits = x + 1
            traced = 2 * logits if torch.compiler.is_compiling() else logits
            if not writes:
                return Outputs(traced)
            x.copy_(traced)
            return Outputs(logits)

    with pytest.raises(MaterializeError, match=r"example arguments\. A model that asks whether it is traced"):
        materialize(Differing().eval(), (torch.randn(2, 6),), dtype=LOW)


def test_results_that_are_casts_are_the_callers() -> None:
    """A caller that writes to a result, such as a table of cosines, changes the model or another result."""

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cos", torch.randn(8, 4))
            self.weight, self.scale = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            parts = self.weight.t().to(LOW).split(2)
            return (*parts, self.cos[:3].to(LOW), self.scale.to(LOW), x.to(LOW), x.to(LOW) + 1, x.to(LOW)[1:])

    model, x = Table().eval(), torch.randn(3, 4)
    low = materialize(model, (x,), dtype=LOW)
    for _ in range(2):
        results = low(x)
        assert all(map(torch.equal, results, in_region(model, x)))
        wanted = [each.clone().add_(1) for each in results]
        assert all(map(torch.equal, [each.add_(1) for each in results], wanted))


@pytest.mark.parametrize("dtype", [torch.float32, LOW, torch.complex64, torch.float8_e4m3fn])
def test_zeros_of_another_sign_are_other_bits(dtype: torch.dtype) -> None:
    """The check takes -0.0 for 0.0, by which a later division is infinite with the other sign."""

    class Differing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            zeros = torch.zeros_like(x)
            return (-zeros if torch.compiler.is_compiling() else zeros).to(dtype)

    with pytest.raises(MaterializeError, match="does not give the bits"):
        materialize(Differing().eval(), (torch.randn(2, 6),), dtype=LOW)


def test_the_fused_path_of_torch_is_named() -> None:
    """Torch's own encoder runs as one kernel without gradients: without a word, nobody finds why."""
    torch.manual_seed(0)
    layer, x = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), torch.randn(2, 5, 16)
    model = nn.Sequential(layer, nn.Linear(16, 4)).eval()
    with pytest.raises(MaterializeError, match=r" 0 runs as .*mha\.set_fastpath_enabled\(False\)"):
        materialize(model, (x,), dtype=LOW)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        assert torch.equal(materialize(model, (x,), dtype=LOW)(x), in_region(model, x))
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def test_a_policy_inside_the_model_is_refused() -> None:
    """The graph would keep the region, but not its policy."""

    class Inner(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with autocast("cpu", policy=POLICIES["exact"]):
                return torch.softmax(x, -1)

    with pytest.raises(PolicyError, match=r"torch\.export cannot keep"):
        materialize(Inner(), (torch.randn(3),))


@pytest.mark.parametrize(
    "around",
    [
        {"dtype": torch.float16},
        {"dtype": LOW, "policy": POLICIES["exact"]},
        {"dtype": LOW, "policy": DEFAULT.override({"linear": "recipe mxfp8"})},
    ],
)
@pytest.mark.parametrize("policy", [None, DEFAULT.override({"linear": "fp32", "softmax": "fp32"})])
def test_a_region_around_the_call_changes_nothing(policy: OpPolicy | None, around: Any) -> None:
    """A server that makes its models within a region is refused, or gets the casts of that region."""
    model, x = nn.Sequential(nn.Linear(16, 4), nn.Softmax(-1)).eval(), torch.randn(3, 16)
    with autocast("cpu", **around):
        low = materialize(model, (x,), policy=policy, dtype=LOW)
    assert torch.equal(low(x), in_region(model, x, policy=policy))


@pytest.mark.parametrize(
    "asked",
    [
        {"policy": OpPolicy.default("cpu").override({"linear": "recipe mxfp8"})},
        {"dtype": torch.float8_e4m3fn},
    ],
)
def test_recipes_are_refused(asked: Any) -> None:
    """The product of quantised operands is rounded to bfloat16, or its parts are taken apart without end."""
    with pytest.raises(PolicyError, match="no recipes, such as 'recipe"):
        materialize(nn.Linear(16, 4), (torch.randn(3, 16),), check=False, **asked)


def test_a_policy_without_rules_is_not_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipes of AMP_POLICY are refused, which this policy does not have."""
    path = tmp_path / "policy.toml"
    path.write_text('device_type = "cpu"\n[rules]\nlinear = "recipe mxfp8"\n')
    monkeypatch.setenv("AMP_POLICY", str(path))
    x = torch.randn(3, 16)
    with pytest.raises(PolicyError, match="no recipes"):
        materialize(nn.Linear(16, 4), (x,))
    assert materialize(nn.Linear(16, 4), (x,), policy=OpPolicy("cpu", {}))(x).dtype is torch.float32


def test_op_rules_of_a_module_are_refused_by_their_name() -> None:
    """The error advises materialize, which raised it, and does not name the rules of the module."""
    model = nn.Sequential(nn.Linear(3, 3))
    amp_core.apply_policy(model, {"0": {"linear": "fp32"}})
    with pytest.raises(PolicyError, match=r"what apply_policy returned"):
        materialize(model, (torch.randn(3),))
