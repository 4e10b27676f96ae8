"""Which writes to a weight scopes see: each way to write, in each surrounding."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import amp_core
from amp_core import GradScaler, OpPolicy, Recipe, autocast, cached_casts, master_weights
from amp_core.casts import accumulating, bulk
from amp_core.scaling import overlap

X = torch.linspace(-1, 1, 32).reshape(2, 16)
Write = Callable[[nn.Module], Any]


class Looking(TorchDispatchMode):
    """A mode of a user that changes nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))


def forward(model: nn.Module) -> Tensor:
    with autocast("cpu"):
        return model(X)


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach() for p in model.parameters()]


def averaged(model: nn.Module) -> None:
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    average.module = model
    average.n_averaged.fill_(1)
    other = copy.deepcopy(model)
    other[0].weight.data.mul_(3)  # type: ignore[index, operator, union-attr]
    average.update_parameters(other)


def stepped(**options: Any) -> Write:
    def write(model: nn.Module) -> None:
        for p in model.parameters():
            p.grad = -p.detach()
        torch.optim.SGD(model.parameters(), lr=1.0, **options).step()

    return write


def swapped(model: nn.Module) -> None:
    model[0].weight.data = model[0].weight.detach() * 2  # type: ignore[index, union-attr]


@torch.no_grad()
def reset(model: nn.Module) -> None:
    for p in model.parameters():
        p.set_(p * 2)


def through_functions(model: nn.Module) -> None:
    for p in weights(model):
        p[0] = p[0] * 2
        torch.mul(p, 2, out=p)
        p.view(-1)[1:].copy_(p.view(-1)[1:] * 3)


WRITES: dict[str, Write] = {
    "method": lambda model: [p.mul_(2) for p in weights(model)],
    "views": through_functions,
    "data": swapped,
    "set": reset,
    "load": lambda model: model.load_state_dict({k: v * 2 for k, v in model.state_dict().items()}),
    "assign": lambda model: model.load_state_dict(
        {k: v.detach() * 2 for k, v in model.state_dict().items()}, assign=True
    ),
    "list": lambda model: torch._foreach_mul_(weights(model), 2.0),
    "list_copy": lambda model: torch._foreach_copy_(weights(model), [p * 2 for p in weights(model)]),
    "list_out": lambda model: torch.ops.aten._foreach_mul.Scalar_out(weights(model), 2.0, out=weights(model)),
    "average": averaged,
    "plain_step": stepped(foreach=False),
    "list_step": stepped(foreach=True),
    "fused_step": stepped(fused=True),
    "vector": lambda model: nn.utils.vector_to_parameters(
        nn.utils.parameters_to_vector(weights(model)) * 2, model.parameters()
    ),
}
PLACES: dict[str, Callable[[], Any]] = {
    "nowhere": nullcontext,
    "mode": Looking,
    "flops": lambda: FlopCounterMode(display=False),
    "record": amp_core.record,
    "inference": torch.inference_mode,
    "region": lambda: autocast("cpu"),
}
SCOPES: dict[str, Callable[[nn.Module], Any]] = {
    "cached_casts": cached_casts,
    "master_weights": master_weights,
    "frozen": lambda model: cached_casts(model.requires_grad_(False)),
}


@pytest.mark.parametrize("scope", SCOPES.values(), ids=SCOPES)
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_every_write_is_seen(place: Callable[[], Any], scope: Callable[[nn.Module], Any]) -> None:
    """A weight that was written to is used as it was: torch's list ops count no write under a mode."""
    unseen = []
    for name, write in WRITES.items():
        model = make()
        with scope(model):
            before = forward(model)
            with place():
                write(model)
            got = forward(model)
        if torch.equal(got, before) or not torch.equal(got, forward(copy.deepcopy(model))):
            unseen.append(name)
    assert not unseen


HIDDEN: dict[str, Write] = {
    "data": lambda model: [p.data.mul_(2) for p in model.parameters()],
    "numpy": lambda model: [p.numpy().__imul__(2) for p in weights(model)],
    "dlpack": lambda model: [torch.from_dlpack(p).mul_(2) for p in weights(model)],
    "storage": lambda model: [
        p.untyped_storage().copy_((p * 2).contiguous().untyped_storage()) for p in weights(model)
    ],
    "fused": lambda model: torch._fused_sgd_(
        weights(model),
        [-p for p in weights(model)],
        [],
        weight_decay=0.0,
        momentum=0.0,
        lr=1.0,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=True,
    ),
}


@pytest.mark.parametrize("scope", [cached_casts, master_weights])
@pytest.mark.parametrize("write", HIDDEN.values(), ids=HIDDEN)
def test_writes_that_torch_does_not_count(write: Write, scope: Any) -> None:
    """What the documentation promises for them: an error in debug mode, and that invalidate() helps."""
    model = make()
    with scope(model, debug=True) as handle:
        forward(model)
        write(model)
        with pytest.raises(amp_core.StaleCastError):
            forward(model)
        handle.invalidate()
        assert torch.equal(forward(model), forward(copy.deepcopy(model)))


@pytest.mark.parametrize("limit", [0, 2**22])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("scope", [cached_casts, master_weights])
def test_a_step_of_one_of_two_parameters_with_one_memory(
    scope: Any, fused: bool, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``load_state_dict(assign=True)`` unties parameters but not their memory; a step of one changes both."""
    monkeypatch.setattr(bulk, "SMALL_ON_HOST", limit)
    monkeypatch.setattr(accumulating, "_BY_AUTOGRAD", limit)
    model = make()
    model[2].weight = model[0].weight
    with scope(model):
        model.load_state_dict(model.state_dict(), assign=True)
        assert model[2].weight is not model[0].weight
        optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1, fused=fused)
        for _ in range(3):
            forward(model).float().sum().backward()
            optimizer.step()
            assert torch.equal(forward(model), forward(copy.deepcopy(model)))


def test_an_inference_tensor_swapped_in_for_a_weight() -> None:
    """The scope asks it for a version, which it does not have."""
    model = make().requires_grad_(False)
    with cached_casts(model):
        forward(model)
        with torch.inference_mode():
            torch.utils.swap_tensors(model[0].weight, nn.Parameter(model[0].weight * 2, requires_grad=False))
            expected = forward(copy.deepcopy(model))
            assert torch.equal(forward(model), expected)
            model[0].weight.mul_(2)
            assert torch.equal(forward(model), forward(copy.deepcopy(model)))


def test_overlap_sees_lists_written_under_a_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scaler takes the norm of gradients that torch's clipping has changed since, if a mode is on."""
    monkeypatch.setattr(overlap, "_bucket_nbytes", lambda _: 1)
    norms = []
    for place in (nullcontext, Looking):
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = GradScaler("cpu", init_scale=4.0, overlap=True)
        for _ in range(2):
            optimizer.zero_grad()
            with place():
                scaler.scale(model(X).square().sum()).backward()
                torch._foreach_mul_([p.grad for p in model.parameters()], 0.25)
                scaler.step(optimizer, max_norm=1.0)
            scaler.update()
        norms.append(scaler.last_step[optimizer].total_norm)
    assert norms[0] == norms[1]


class Descent(torch.optim.Optimizer):
    """An optimizer that compiles into one graph."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(param.grad * group["lr"])


SURROUNDINGS: dict[str, Callable[[nn.Module, Any], Any]] = {
    "cached_casts": lambda model, _: cached_casts(model),
    "master_weights": lambda model, _: master_weights(model),
    "stochastic": lambda model, optimizer: master_weights(model, optimizer, "stochastic"),
    "delayed": lambda model, _: amp_core.delayed_scales(model),
    "record": lambda model, _: amp_core.record(),
    "lost": lambda model, optimizer: _Counting(model, optimizer),
}


class _Counting:
    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self.counts = amp_core.count_lost_updates(model.to(torch.bfloat16), optimizer)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.counts.remove()


@pytest.mark.filterwarnings("ignore:Profiler record function")
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "list"])
@pytest.mark.parametrize("around", SURROUNDINGS.values(), ids=SURROUNDINGS)
def test_compiled_steps(around: Callable[[nn.Module, Any], Any], fused: bool) -> None:
    """Dynamo traces the hook that follows a step, fails at what it does, or leaves it out of the graph."""
    policy = OpPolicy.default("cpu").override({"linear": Recipe.fp8_delayed(history=4)})
    results = []
    for compiled in (False, True):
        torch.compiler.reset()
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused, foreach=not fused)
        with around(model, optimizer) as handle:
            step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
            rules = policy if isinstance(handle, amp_core.DelayedScales) else None
            for _ in range(3):
                optimizer.zero_grad()
                with autocast("cpu", policy=rules):
                    loss = model(X.to(model[0].weight.dtype)).float().square().mean()
                loss.backward()
                step()
        results.append(weights(model))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("fused", [False, True])
def test_compiled_steps_inside_regions(fused: bool) -> None:
    """The rest of the region computes with the casts of the weights before the step."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, fused=fused, foreach=not fused)
    step = torch.compile(optimizer.step, backend="aot_eager")
    for _ in range(3):
        with autocast("cpu"):
            model(X).float().square().mean().backward()
            step()
            optimizer.zero_grad()
            after = model(X)
        with autocast("cpu"):
            assert torch.equal(after, model(X))


def test_a_step_that_compiles_into_one_graph_still_does() -> None:
    """The scope's hook breaks the graph of an optimizer whose writes torch counts."""
    torch.compiler.reset()
    model = make()
    optimizer = Descent(model.parameters())
    step = torch.compile(optimizer.step, backend="eager", fullgraph=True)
    with cached_casts(model):
        for _ in range(2):
            forward(model).float().square().mean().backward()
            step()
            assert torch.equal(forward(model), forward(copy.deepcopy(model)))
