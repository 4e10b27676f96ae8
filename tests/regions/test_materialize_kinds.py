"""materialize: kinds of modules and weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from amp_core import MaterializeError, OpPolicy, autocast, materialize

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch copies its own graphs

LOW = torch.bfloat16


def in_region(model: nn.Module, *args: Any, policy: OpPolicy | None = None) -> Any:
    with torch.no_grad(), autocast("cpu", LOW, policy=policy):
        return model(*args)


class Masked(nn.Module):
    """Attention with a mask that is trained, and a float32 product of rows that lie apart in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.mask, self.linear = nn.Parameter(torch.randn(5, 5)), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.linear(x.transpose(0, 1)).transpose(0, 1).unsqueeze(1)
        with torch.autocast("cpu", enabled=False):
            y = self.linear(x.transpose(0, 1)).transpose(0, 1)
        return F.scaled_dot_product_attention(heads, heads, heads, self.mask).squeeze(1) + y


class Attending(nn.Module):
    def __init__(self, layer: nn.Module, arguments: int) -> None:
        super().__init__()
        self.layer, self.arguments = layer, arguments

    def forward(self, x: Tensor) -> Any:
        return self.layer(*[x] * self.arguments)


ATTENTION = {
    "mask": Masked,
    "attention": lambda: Attending(nn.MultiheadAttention(16, 2, batch_first=True), 3),
    "encoder": lambda: Attending(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True), 1),
    "decoder": lambda: Attending(nn.TransformerDecoderLayer(16, 2, 32, 0.0, batch_first=True), 2),
}


@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize("policy", [None, OpPolicy.float32("cpu")], ids=["default", "float32"])
def test_weights_that_require_gradients(name: str, policy: OpPolicy | None) -> None:
    """Torch gives them other kernels than the frozen ones of the graph, and the check would refuse that."""
    torch.manual_seed(0)
    model, x = ATTENTION[name]().eval(), torch.randn(3, 5, 16)
    frozen = list(model.parameters())[-1].requires_grad_(False)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        low = materialize(model, (x,), policy=policy, dtype=LOW)
        assert [p.requires_grad for p in model.parameters()] == [p is not frozen for p in model.parameters()]
        wanted = in_region(model.requires_grad_(False), x, policy=policy)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    torch.testing.assert_close(low(x), wanted, rtol=0, atol=0)


def test_a_tied_table_that_is_rounded_and_widened() -> None:
    """The cast that joins both uses of the table was made anew, and said no dtype: a KeyError."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(10, 8), nn.Linear(8, 10, bias=False)
            self.head.weight = self.table.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(torch.relu(self.head(self.table(ids)) @ self.table.weight))

    policy = OpPolicy.default("cpu").override({"linear": "low_in_fp32_out"})
    model, batch = Tied().eval(), ({0: torch.export.Dim.AUTO},)
    low = materialize(model, (torch.arange(6).view(2, 3),), policy=policy, dtype=LOW, dynamic_shapes=batch)
    ids = torch.arange(9).view(3, 3)
    assert torch.equal(low(ids), in_region(model, ids, policy=policy))
    assert low.get_parameter("table.weight").dtype is LOW


class Resizing(nn.Module):
    def __init__(self, dims: int, options: dict[str, Any]) -> None:
        super().__init__()
        self.conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1](4, 4, 1)
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        return F.interpolate(self.conv(x), **self.options)


RESIZING: list[tuple[int, dict[str, Any]]] = [
    (1, {"scale_factor": 2, "mode": "linear"}),
    (2, {"scale_factor": 1.7}),
    (2, {"scale_factor": 0.7, "recompute_scale_factor": True, "mode": "nearest-exact"}),
    (2, {"scale_factor": (2.5, 0.5), "mode": "bilinear", "align_corners": True}),
    (2, {"scale_factor": 1.3, "mode": "bicubic"}),
    (2, {"size": (5, 9), "mode": "bilinear"}),
    (3, {"size": 4, "mode": "trilinear"}),
    (3, {"scale_factor": 1.5}),
]


@pytest.mark.parametrize(("dims", "options"), RESIZING)
@pytest.mark.parametrize("policy", [None, OpPolicy.float32("cpu")], ids=["default", "float32"])
def test_resizing_keeps_a_dynamic_batch(dims: int, options: dict[str, Any], policy: OpPolicy | None) -> None:
    """The batch of the example would be that of the graph, although `dynamic_shapes` names it."""
    model, batch = Resizing(dims, options).eval(), ({0: torch.export.Dim("batch")},)
    low = materialize(
        model, (torch.randn(3, 4, *[6] * dims),), policy=policy, dtype=LOW, dynamic_shapes=batch
    )
    x = torch.randn(5, 4, *[6] * dims)
    assert torch.equal(low(x), in_region(model.requires_grad_(False), x, policy=policy))


@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")  # torch 2.12's load
def test_what_pickle_cannot_load_is_stored_as_a_program(tmp_path: Path) -> None:
    """Fx runs the code of a pickled model on stand-ins, which neither containers nor `cond` accept."""

    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, inputs: dict[str, Tensor]) -> Tensor:
            x = inputs["x"]
            return torch.cond(x.sum() > 0, self.linear, lambda x: self.linear(x) * 2, (x,))

    model, x = Branching().eval(), torch.rand(2, 8)
    low = materialize(model, ({"x": x},), dtype=LOW)
    torch.export.save(torch.export.export(low, ({"x": x},)), tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    for inputs in ({"x": x}, {"x": -x}):
        wanted = in_region(model, inputs)
        for copied in (copy.deepcopy(low), loaded):
            assert torch.equal(copied(inputs), wanted)


@pytest.mark.parametrize(
    ("wrap", "text"),
    [
        (nn.parallel.DistributedDataParallel, r"'0' is a DistributedDataParallel.*pass its `\.module`"),
        (fully_shard, "'0' is sharded.*before the model is sharded"),
        (
            lambda layer: parallelize_module(layer, init_device_mesh("cpu", (1,)), ColwiseParallel()),
            "'0' is sharded.*before the model is sharded",
        ),
    ],
    ids=["ddp", "fsdp", "tensors"],
)
def test_models_that_are_wrapped_for_several_ranks(one_rank: None, wrap: Any, text: str) -> None:
    """The trace leaves FSDP's state half made, so the model cannot run any more; the error is torch's."""
    model, x = nn.Sequential(wrap(nn.Linear(4, 4)), nn.ReLU()).eval(), torch.ones(2, 4)
    with pytest.raises(MaterializeError, match=text):
        materialize(model, (x,))
    assert model(x).shape == (2, 4)


class Forks(nn.Module):
    """A model that is no graph."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


class Leaves(torch.fx.Tracer):
    """Traces a model, but not the modules in it."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def test_the_place_is_named_among_code_that_was_made_at_run_time() -> None:
    """What cannot be traced within a model of torch.fx ends in an AttributeError of amp-core."""
    model = nn.Sequential(nn.Linear(2, 2), Forks())
    made = torch.fx.GraphModule(model, Leaves().trace(model))
    with pytest.raises(MaterializeError, match=r'in forward: "return x if x\.sum\(\) > 0'):
        materialize(made, (torch.ones(1, 2),))


@pytest.mark.filterwarnings("ignore:.torch.jit")
@pytest.mark.parametrize("traces", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_torchscript_is_refused(traces: bool, inside: bool) -> None:
    """The error is one of a container of TorchScript, and the advice about control flow that there is not."""
    layer, x = nn.Linear(2, 2).eval(), torch.ones(1, 2)
    compiled = torch.jit.trace(layer, x) if traces else torch.jit.script(layer)
    model = nn.Sequential(compiled) if inside else compiled
    where = "The module '0'" if inside else "The model"
    with pytest.raises(MaterializeError, match=f"{where} is compiled by TorchScript.*before torch.jit"):
        materialize(model, (x,))


@pytest.mark.parametrize("lazy", [nn.LazyLinear(2), nn.LazyBatchNorm1d(affine=False)])
def test_a_model_that_is_not_initialised_is_refused(lazy: nn.Module) -> None:
    """The advice is about control flow on values, while the model has only to be called once."""
    with pytest.raises(MaterializeError, match=r"0\.\w+ is not initialised yet\. Call the model once"):
        materialize(nn.Sequential(lazy), (torch.ones(4, 2),))


class Trained(nn.Module):
    """A model that gives its optimizer some of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def parameters(self) -> Iterator[nn.Parameter]:  # type: ignore[override]
        return self.head.parameters()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.base(x))


def test_a_model_whose_parameters_take_no_arguments() -> None:
    """A TypeError: Trained.parameters() got an unexpected keyword argument 'recurse'."""
    model, x = Trained().eval(), torch.ones(1, 4)
    low = materialize(model, (x,), dtype=LOW)
    assert torch.equal(low(x), in_region(model.requires_grad_(False), x))


class Edges(Tensor):
    """Pairs of indices, whose ops are not defined for the tensors of a trace."""

    pairs: Tensor

    @staticmethod
    def __new__(cls, pairs: Tensor) -> Edges:
        edges = Tensor._make_wrapper_subclass(cls, pairs.shape, dtype=pairs.dtype)
        edges.pairs = pairs
        return edges

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["pairs"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], *_: Any) -> Edges:
        return cls(inner["pairs"])

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [a.pairs if isinstance(a, Edges) else a for a in args]
        if any(type(a) is not Tensor for a in plain if isinstance(a, Tensor)):
            return NotImplemented
        return op(*plain, **kwargs or {})


class Graph(nn.Linear):
    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return super().forward(x)[edges.flatten()]


def test_a_subclass_of_tensor_that_cannot_be_traced_is_named() -> None:
    """The EdgeIndex of PyG is refused with advice for language models, and without its name."""
    model, x, pairs = Graph(4, 4).eval(), torch.randn(2, 4), torch.tensor([[0, 1], [1, 0]])
    with pytest.raises(MaterializeError, match=r"Pass plain tensors: .* as Edges\.$") as caught:
        materialize(model, (x, Edges(pairs)), dtype=LOW)
    assert "transformers" not in str(caught.value)
    assert torch.equal(materialize(model, (x, pairs), dtype=LOW)(x, pairs), in_region(model, x, pairs))
