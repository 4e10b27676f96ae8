"""The tools where values or calls are not what they seem: transformed, traced, fake, batched, repeated."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import amp_core
from amp_core import AmpError, NonFiniteError, autocast, cached_casts, master_weights

X = torch.linspace(-1, 1, 24).reshape(4, 6)


def make(*, lazy: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.LazyLinear(5) if lazy else nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def low(model: nn.Module, x: Tensor) -> Tensor:
    with autocast("cpu", cache_enabled=False):
        return model(x).float()


def per_sample_gradients(model: nn.Module) -> list[Tensor]:
    weights = {name: weight.detach() for name, weight in model.named_parameters()}

    def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        with autocast("cpu"):
            return functional_call(model, weights, (x,)).float().square().sum()

    return [*torch.vmap(torch.func.grad(loss), (None, 0))(weights, X).values()]


def hessian(model: nn.Module) -> list[Tensor]:
    return [torch.func.hessian(lambda x: low(model, x).sum())(X[0])]


def forward_mode(model: nn.Module) -> list[Tensor]:
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(X, torch.ones_like(X))
        return [torch.autograd.forward_ad.unpack_dual(low(model, dual)).tangent.clone()]


def batched_gradients(model: nn.Module) -> list[Tensor]:
    result = low(model, X)[0]
    return [*torch.autograd.grad(result, [*model.parameters()], torch.eye(3), is_grads_batched=True)]


def weights_that_are_results(model: nn.Module) -> list[Tensor]:
    weights = {name: weight * 2 for name, weight in model.named_parameters()}
    with autocast("cpu"):
        loss = functional_call(model, weights, (X,)).float().square().sum()
    loss.backward()
    return [weight.grad for weight in model.parameters()]


class Stop(torch.autograd.Function):
    """A function that has no gradient for its input: autograd gives None to what computed that."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        return None


def no_gradients(model: nn.Module) -> list[Tensor]:
    first = low(model[0], X)
    stopped = Stop.apply(first)  # type: ignore[no-untyped-call]
    model[2](stopped).sum().backward()
    return [stopped, model[2].weight.grad]


def fake(model: nn.Module) -> list[Tensor]:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        result = low(model, mode.from_tensor(X))
    assert result.shape == (4, 3)
    return [low(model, X)]


def meta(model: nn.Module) -> list[Tensor]:
    low(copy.deepcopy(model).to("meta"), X.to("meta")).sum().backward()
    return [low(model, X)]


def exported(model: nn.Module) -> list[Tensor]:
    return [torch.export.export(model, (X,), strict=strict).module()(X) for strict in (False, True)]


def traced(model: nn.Module) -> list[Tensor]:
    graph = torch.jit.trace(model, (X,), check_trace=False)
    assert not [
        node for node in graph.inlined_graph.nodes() if "norm" in node.kind() or "isfin" in node.kind()
    ]
    return [graph(X)]


TOOLS: dict[str, Callable[[nn.Module], Any]] = {
    "guard": amp_core.guard,
    "guard every op": lambda model: amp_core.guard(model, steps=lambda _: True),
    "watch": lambda model: amp_core.watch(model, every=1),
    "record": amp_core.record,
    "cached_casts": cached_casts,
    "cached_casts(debug=True)": lambda model: cached_casts(model, debug=True),
    "master_weights": master_weights,
}


@pytest.mark.filterwarnings("ignore:.torch.jit", "ignore:Tried to trace", "ignore:.*TracerWarning")
@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize(
    "program",
    [
        per_sample_gradients,
        hessian,
        forward_mode,
        batched_gradients,
        weights_that_are_results,
        no_gradients,
        fake,
        meta,
        exported,
        traced,
    ],
)
def test_a_program_goes_on(program: Callable[[nn.Module], list[Tensor]], tool: str) -> None:
    """A tool reads a value that is not there: the program ends in an error of torch's internals."""
    if program is exported and tool in {"record", "guard every op"}:
        pytest.skip("torch.export(strict=True) compiles, and compiled functions run eagerly in a recording")
    expected = program(make())
    model = make()
    with TOOLS[tool](model):
        low(model, X)  # as a tool meets it in training
        got = program(model)
    assert all(map(torch.equal, got, expected))


@pytest.mark.parametrize("tool", [amp_core.compare, amp_core.advise])
def test_a_step_without_some_gradients(tool: Callable[..., Any]) -> None:
    """The tool ends in an error of its own, as autograd hands it None where a module has no gradient."""
    model = make()

    def step() -> None:
        model[2](Stop.apply(model[0](X))).float().sum().backward()  # type: ignore[no-untyped-call]

    assert str(tool(step, "cpu", model=model))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("tool", ["guard", "guard every op", "watch"])
def test_a_model_in_a_checkpoint(tool: str, reentrant: bool) -> None:
    """The repeated forward pass counts as a step, or a tool that begins in it ends in an error of torch's."""
    model, x = make(), X.clone().requires_grad_()
    with TOOLS[tool](model) as handle:
        for step in range(3):
            with autocast("cpu"):
                checkpoint(model, x, use_reentrant=reentrant).float().sum().backward()
            assert handle.step == step
    if tool == "watch":
        kinds = Counter(entry.kind for entry in handle.entries if entry.step == 1)
        assert (kinds["gradient"], kinds["weight gradient"]) == (3, 4)
    with torch.no_grad():
        model[2].weight.fill_(3e38)
    with pytest.raises(NonFiniteError) if tool != "watch" else nullcontext(), TOOLS[tool](model):
        checkpoint(model, x + 5, use_reentrant=reentrant).sum().backward()


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature", "ignore:This scope leaves")
@pytest.mark.parametrize("tool", TOOLS)
def test_parameters_that_have_no_size_yet(tool: str) -> None:
    """A lazy model fails in its first step, or is not watched in its second."""
    model = make(lazy=True)
    with TOOLS[tool](model) as handle:
        for _ in range(2):
            low(model, X).sum().backward()
    if tool == "watch":
        assert {(e.step, e.name) for e in handle.entries if e.kind == "weight gradient"} == {
            *((0, name) for name in ("2.weight", "2.bias")),
            *((1, name) for name in ("0.weight", "0.bias", "2.weight", "2.bias")),
        }


class Swapping:
    """A student and the average of its weights, which a step computes with in the student's place."""

    def __init__(self) -> None:
        self.model = nn.Sequential(*make(), nn.BatchNorm1d(3))
        self.average = copy.deepcopy(self.model)
        self.own = [*self.model.parameters(), *self.model.buffers()]
        self.state = copy.deepcopy((self.model.state_dict(), self.average.state_dict()))

    def _averaged(self) -> Tensor:
        other = {**dict(self.average.named_parameters()), **dict(self.average.named_buffers())}
        with autocast("cpu"):
            return functional_call(self.model, other, (X,)).float()

    def with_average(self) -> Tensor:
        result = self._averaged()
        return result @ torch.ones(result.shape[-1])  # an op outside of the region

    def with_results(self) -> Tensor:
        other = {name: weight * 2 for name, weight in self.model.named_parameters()}
        return functional_call(self.model, other, (X,)).float()

    def with_both(self) -> Tensor:
        return (self.model(X) - self._averaged()).square()

    def transformed(self) -> Tensor:
        return self.model(X).float() + sum(g.square().sum() for g in per_sample_gradients(self.model[:3]))


@pytest.mark.parametrize("step", ["with_average", "with_results", "with_both", "transformed"])
@pytest.mark.parametrize(
    "tool",
    [
        lambda step: amp_core.compare(step, "cpu"),
        lambda step: amp_core.advise(step, "cpu"),
        lambda step: amp_core.advise(step, "cpu", goal="speed"),
    ],
    ids=["compare", "advise", "advise for speed"],
)
def test_weights_that_a_call_swaps_are_not_those_to_restore(tool: Callable[[Any], Any], step: str) -> None:
    """After a comparison the model holds the weights that torch.func.functional_call gave it for one call."""
    with_weights = Swapping()
    tool(lambda: getattr(with_weights, step)().sum())
    now = [*with_weights.model.parameters(), *with_weights.model.buffers()]
    assert all(a is b for a, b in zip(now, with_weights.own, strict=True))
    for model, state in zip((with_weights.model, with_weights.average), with_weights.state, strict=True):
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
        assert all(weight.grad is None for weight in model.parameters())


def test_watch_measures_gradients_of_weights_that_are_results() -> None:
    """The inner steps of meta-learning are left out."""
    model = make()
    with amp_core.watch(model, every=1) as ranges:
        weights_that_are_results(model)
    assert {e.name for e in ranges.entries if e.kind == "weight gradient"} == {
        "0.weight",
        "0.bias",
        "2.weight",
        "2.bias",
    }


@pytest.mark.filterwarnings("ignore:.torch.jit")  # torch's own forward mode, when first used
def test_traced_calls_are_no_steps() -> None:
    """The count of steps moves where nothing is trained."""
    with amp_core.guard(model := make()) as guard:
        hessian(model)
        exported(model)
        assert guard.step == -1
        low(model, X)
        assert guard.step == 0


class Quantised(Tensor):
    """A weight of eight bits that can do no more than multiply, as other libraries have them."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Quantised:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=torch.float32)  # type: ignore[attr-defined, no-any-return]

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            return func(args[0], args[1].inner.to(args[0].dtype) / 64, *args[2:])
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default), f"no {func} of these"
        return cls(args[0].inner)


def quantised() -> nn.Sequential:
    model = make()
    inner = (model[0].weight.detach() * 64).to(torch.int8)
    model[0].weight = nn.Parameter(Quantised(inner), requires_grad=False)
    return model


@pytest.mark.parametrize("tool", ["guard", "watch", "record", "compare"])
def test_weights_that_can_only_multiply(tool: str) -> None:
    """The tool read such a weight, and its library raised inside the training step."""
    model, plain = quantised(), quantised()
    expected = low(plain, X)
    expected.sum().backward()
    if tool == "compare":
        assert amp_core.compare(lambda: low(model, X).sum(), device="cpu").differences
    with {
        "guard": lambda: amp_core.guard(model, steps=[0]),
        "watch": lambda: amp_core.watch(model),
        "record": amp_core.record,
        "compare": nullcontext,
    }[tool]():
        model.zero_grad()
        result = low(model, X)
        result.sum().backward()
    assert torch.equal(result, expected)
    assert torch.equal(model[2].weight.grad, plain[2].weight.grad)


@pytest.mark.filterwarnings("ignore:This scope leaves")
@pytest.mark.parametrize("tool", TOOLS)
def test_wrappers_that_compute(tool: str) -> None:
    """Torch refuses to list the values of a wrapper, in the middle of a training step."""

    def train(tool: Callable[[nn.Module], Any]) -> tuple[list[Tensor], Any]:
        model = make()
        model[0].weight = nn.Parameter(TwoTensor(*[model[0].weight.detach().clone() for _ in range(2)]))
        with tool(model) as handle:
            (result := low(model, X)).sum().backward()
        return [result, *(p.grad for p in model.parameters())], handle

    (expected, _), (got, handle) = train(nullcontext), train(TOOLS[tool])
    for wanted, given in zip(expected, got, strict=True):
        assert torch.equal(wanted.a, given.a)  # type: ignore[attr-defined]
    if tool == "watch":
        entry = next(e for e in handle.entries if (e.kind, e.name) == ("weight", "0.weight"))
        assert sum(entry.exponents.values()) == 30


def test_quantised_operands_of_another_class() -> None:
    """A report on a format ends in an error: torch reads a list of numbers from no subclass."""
    found = []
    for wrap in (torch.clone, lambda x: TwoTensor(x, x.clone())):
        model, x = make(), wrap(X)

        def step(model: nn.Module = model, x: Tensor = x) -> Tensor:
            return model(x).float().square().sum()

        with amp_core.record(model) as recording, autocast("cpu", torch.float8_e4m3fn):
            step()
        fits = amp_core.compare(step, "cpu", format="mxfp8", model=model).fits
        found.append(([*recording.quantized.values()], [*fits.values()]))
    assert found[0] == found[1]
    assert found[0][0]


def test_weights_made_in_inference_mode_are_compared() -> None:
    """Such weights count no versions, and the comparison raised when it asked for one."""
    with torch.inference_mode():
        model = make()
    assert model[0].weight.is_inference()

    def forward() -> Tensor:
        with torch.inference_mode():
            return low(model, X).sum()

    assert amp_core.compare(forward, device="cpu", model=model).differences


def test_storage_refuses_weights_of_other_libraries() -> None:
    """Their memory was replaced, and the first step ended in an error about sizes."""
    model = quantised()
    model[0].weight.requires_grad_()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(ValueError, match=r"0\.weight is a Quantised, .* keep="):
        master_weights(model, optimizer, "remainder")
    assert model[2].weight.dtype is torch.float32
    master_weights(model, optimizer, "remainder", keep=["0.weight"])
    assert model[2].weight.dtype is torch.bfloat16


class OnGraph(nn.Module):
    """A layer on a graph whose edges are a sparse buffer, which a call changes, and a sparse parameter."""

    def __init__(self, layout: torch.layout) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        dense = torch.eye(4) + torch.eye(4).roll(1, 0)
        self.register_buffer("edges", dense.to_sparse(layout=layout))
        self.weights = nn.Parameter(dense.to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.edges.mul_(0.5)
        x = self.layer(x)
        with autocast("cpu", enabled=False):
            return torch.sparse.mm(self.weights, torch.sparse.mm(self.edges, x.float()))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.parametrize("goal", ["accuracy", "speed"])
def test_sparse_weights_are_compared_and_put_back(layout: torch.layout, goal: str) -> None:
    """Graph networks cannot be compared, or their edges stay changed."""
    torch.manual_seed(0)
    model = OnGraph(layout)
    edges, weights = model.edges.to_dense(), model.weights.detach().to_dense()

    def step() -> Tensor:
        return model(X).square().mean()

    if goal == "accuracy":
        assert any(each.size for each in amp_core.compare(step, "cpu").differences)
    amp_core.advise(step, "cpu", goal=goal)
    assert torch.equal(model.edges.to_dense(), edges)
    assert torch.equal(model.weights.detach().to_dense(), weights)
    assert model.weights.grad is None


def test_parts_on_the_meta_device_are_left_there() -> None:
    """A model with parts that are loaded later, or offloaded, cannot be compared."""
    model = make()
    model.later = nn.Linear(3, 3, device="meta")
    forward = model[:3]

    def step() -> Tensor:
        return forward(X).square().mean()

    assert amp_core.compare(step, "cpu", format="mxfp8", model=model).differences
    assert model.later.weight.is_meta

    def without_values() -> Tensor:
        return make().to("meta")(X.to("meta")).sum()

    with pytest.raises(AmpError, match="no values to compare"):
        amp_core.compare(without_values, "cpu")


@pytest.mark.filterwarnings("ignore:.torch.jit", "ignore:Lazy modules are a new feature")
def test_models_that_cannot_run_twice_are_refused_in_words() -> None:
    """The error is one of the restoring, or the reference run is in low precision as well."""
    for model, message in (
        (make(lazy=True), r"0\.weight is not initialised yet"),
        (torch.jit.script(make()), r"The model \(Sequential\) is compiled by TorchScript"),
        (nn.Sequential(torch.jit.trace(make(), X)), r"^0 \(Sequential\) is compiled by TorchScript"),
    ):
        for tool in (amp_core.compare, amp_core.advise):
            with pytest.raises(AmpError, match=message):
                tool(lambda model=model: model(X).sum(), "cpu")
