"""Optimizers and scalers that were written for torch's scaler do the same with ours."""

from __future__ import annotations

import enum
import io
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import _refresh_per_optimizer_state

from amp_core import GradScaler, guard

BOTH = (torch.amp.GradScaler, GradScaler)


class Compared(torch.optim.SGD):
    """Has ``__eq__`` and so no hash."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Compared)


@dataclass
class Wrapping:
    optimizer: torch.optim.Optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def step(self) -> Any:
        return self.optimizer.step()


class Slotted:
    __slots__ = ("optimizer",)  # and no __weakref__

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    param_groups, step = Wrapping.param_groups, Wrapping.step


class Mapped(dict[str, Any]):
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.param_groups, self.step = optimizer.param_groups, optimizer.step


MAKERS = {
    "compared": lambda params: Compared(params, lr=0.1),
    "dataclass": lambda params: Wrapping(torch.optim.SGD(params, lr=0.1)),
    "slotted": lambda params: Slotted(torch.optim.SGD(params, lr=0.1)),
    "mapping": lambda params: Mapped(torch.optim.SGD(params, lr=0.1)),
}


def train(scaler: Any, make: Any = MAKERS["compared"]) -> list[Any]:
    """Take four steps with two optimizers, of which one overflows in the second; return all numbers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizers = [make(part.parameters()) for part in model]
    scales = []
    for number in range(4):
        loss = model(torch.full((2, 4), number + 1.0)).sum()
        scaler.scale(loss).backward()
        if number == 1:
            next(model.parameters()).grad[0] = math.inf
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        model.zero_grad()
        scales.append(scaler.get_scale())
    return [scales, *(param.tolist() for param in model.parameters())]


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_optimizers_without_a_hash(make: Any) -> None:
    """An optimizer that is a dataclass, or compares, cannot step, or gets the record of an equal one."""
    expected, got = (train(scaler("cpu"), make) for scaler in BOTH)
    assert got == expected


def test_equal_optimizers_have_records_of_their_own() -> None:
    """The record of one optimizer replaces that of another that equals it."""
    scaler = GradScaler("cpu")
    train(scaler)
    assert [record.skipped for record in scaler.history] == [False, False, True, *[False] * 5]
    params = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizers = [Compared([param], lr=0.1) for param in params]
    params[0].grad, params[1].grad = torch.full((2,), math.inf), torch.ones(2)
    for optimizer in optimizers:
        scaler.step(optimizer)
    assert [scaler.last_step[optimizer].skipped for optimizer in optimizers] == [True, False]


def test_guard_with_an_optimizer_without_a_hash() -> None:
    """`guard` cannot tell whether a scaler watches such an optimizer."""
    with guard(nn.Linear(2, 2)):
        train(GradScaler("cpu", 1.0, growth_interval=1000))


def overriding(base: Any) -> Any:
    """Return a scaler like those of FSDP 1, Megatron and apex, and the calls that it notes."""

    class Scaler(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__("cpu")
            self.calls: list[Any] = []
            self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)

        def unscale_(self, optimizer: Any) -> None:
            self.calls.append("unscale_")
            super().unscale_(optimizer)
            for flag in self._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
                flag.fill_(float(len(self.calls) == 9))  # what another rank says

        def _maybe_opt_step(self, optimizer: Any, optimizer_state: Any, *args: Any, **kwargs: Any) -> Any:
            self.calls.append([flag.item() for flag in optimizer_state["found_inf_per_device"].values()])
            return super()._maybe_opt_step(optimizer, optimizer_state, *args, **kwargs)

        def update(self, new_scale: Any = None) -> None:
            scale, tracker = self._check_scale_growth_tracker("update")
            states = self._per_optimizer_states.values()
            found = torch.stack([f for s in states for f in s["found_inf_per_device"].values()]).sum()
            torch._amp_update_scale_(scale, tracker, found, 2.0, 0.5, 2)
            self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)

    return Scaler()


def test_overridden_methods_are_called() -> None:
    """A subclass agrees with other ranks in methods that `step` no longer calls: ranks diverge in silence."""
    expected, got = map(overriding, BOTH)
    assert train(got) == train(expected)
    assert got.calls == expected.calls
    assert sum(len(records) for records in got._log._pending.values()) <= 2


@pytest.mark.parametrize("base", BOTH)
def test_a_method_that_is_replaced_on_the_instance_is_called(base: Any) -> None:
    """A library that wraps `unscale_` of one scaler, as a mock does, no longer sees the gradients."""
    scaler, param, seen = base("cpu", 4.0), nn.Parameter(torch.ones(2)), []
    unscale_ = scaler.unscale_
    scaler.unscale_ = lambda optimizer: (unscale_(optimizer), seen.append(param.grad.tolist()))
    scaler.scale(param.sum()).backward()
    scaler.step(torch.optim.SGD([param], lr=1.0))
    assert seen == [[1.0, 1.0]]


@pytest.mark.parametrize("base", BOTH)
def test_private_names_that_read_the_scale_and_replace_the_states(base: Any) -> None:
    """A library finds no scale, or what it says of the gradients is lost and the step is taken."""
    scaler, param = base("cpu", 4.0), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([param], lr=1.0)
    assert scaler._get_scale_async() is None
    scaler.scale(param.sum()).backward()
    assert scaler._get_scale_async() == 4.0
    scaler.unscale_(optimizer)
    state = {**_refresh_per_optimizer_state(), "stage": scaler._per_optimizer_states[id(optimizer)]["stage"]}
    state["found_inf_per_device"] = {torch.device("cpu"): torch.ones(())}
    scaler._per_optimizer_states = defaultdict(_refresh_per_optimizer_state, {id(optimizer): state})
    scaler.step(optimizer)
    assert param.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("base", BOTH)
def test_an_overridden_check_decides_on_fused_steps(base: Any) -> None:
    """A subclass that asks other ranks, or leaves out gradients, has no say in fused steps."""

    class Scaler(base):  # type: ignore[misc]
        def _check_inf_per_device(self, optimizer: Any) -> Any:
            found = super()._check_inf_per_device(optimizer)
            for flag in found.values():
                flag.fill_(1.0 - flag)
            return found

    scaler, param = Scaler("cpu", 4.0), nn.Parameter(torch.ones(2))
    scaler.scale(param.sum()).backward()
    scaler.step(torch.optim.SGD([param], lr=1.0, fused=True))
    scaler.update()
    assert (scaler.get_scale(), param.tolist()) == (2.0, [1.0, 1.0])


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("base", BOTH)
def test_an_overridden_unscaling_decides(base: Any, fused: bool) -> None:
    """A subclass whose optimizers unscale by themselves, as NeMo's, has no say in fused steps."""

    class Scaler(base):  # type: ignore[misc]
        def _unscale_grads_(self, *args: Any) -> Any:
            return {device: 1.0 - flag for device, flag in super()._unscale_grads_(*args).items()}

    scaler, param = Scaler("cpu", 4.0), nn.Parameter(torch.ones(2))
    scaler.scale(param.sum()).backward()
    scaler.step(torch.optim.SGD([param], lr=1.0, fused=fused))
    scaler.update()
    assert (scaler.get_scale(), param.tolist()) == (2.0, [1.0, 1.0])


STEPS: dict[str, Callable[[GradScaler, Any, Callable[[], Any]], Any]] = {
    "step": lambda scaler, optimizer, closure: (closure(), scaler.step(optimizer)),
    "clipped step": lambda scaler, optimizer, closure: (closure(), scaler.step(optimizer, max_norm=9.0)),
    "clipping": lambda scaler, optimizer, closure: (closure(), scaler.clip_grad_norm_(optimizer, 9.0)),
    "closure": lambda scaler, optimizer, closure: scaler.step_closure(optimizer, closure),
    "clipped closure": lambda scaler, optimizer, closure: scaler.step_closure(optimizer, closure, max_norm=9),
}


def take(how: str, scaler: GradScaler, optimizer: Any, param: nn.Parameter) -> None:
    """Take one of `STEPS` with the gradient 1 for each element of `param`."""

    def closure() -> Tensor:
        optimizer.zero_grad()
        scaler.scale(param.sum()).backward()
        return param.sum()

    STEPS[how](scaler, optimizer, closure)


@pytest.mark.parametrize("name", ["unscale_", "_unscale_grads_"])
@pytest.mark.parametrize("how", STEPS)
def test_overridden_methods_are_called_however_it_steps(how: str, name: str) -> None:
    """A subclass agrees with other ranks in methods that clipping and closures go past."""
    calls: list[str] = []

    class Scaler(GradScaler):
        def unscale_(self, *args: Any) -> Any:
            calls.append("unscale_")
            return super().unscale_(*args)

        def _unscale_grads_(self, *args: Any) -> Any:
            calls.append("_unscale_grads_")
            return {device: torch.ones_like(flag) for device, flag in super()._unscale_grads_(*args).items()}

    for other in {"unscale_", "_unscale_grads_"} - {name}:
        delattr(Scaler, other)
    scaler, param = Scaler("cpu", 4.0), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([param], lr=1.0)

    take(how, scaler, optimizer, param)
    if how == "clipping":
        assert torch.equal(param.grad, torch.ones(2))  # type: ignore[arg-type]
        scaler.step(optimizer)
    scaler.update()
    assert calls == [name]
    assert param.tolist() == ([0.0, 0.0] if name == "unscale_" else [1.0, 1.0])


@pytest.mark.parametrize("name", ["unscale_", "_unscale_grads_"])
@pytest.mark.parametrize("how", STEPS)
def test_overridden_methods_that_clip(how: str, name: str) -> None:
    """The method and the clipping call each other without end."""

    class Scaler(GradScaler):
        def unscale_(self, optimizer: Any, *_: Any) -> None:
            self.clip_grad_norm_(optimizer, 0.5)

        def _unscale_grads_(self, optimizer: Any, *_: Any) -> Any:
            self.clip_grad_norm_(optimizer, 0.5)
            return self._found_inf_per_device(optimizer)

    for other in {"unscale_", "_unscale_grads_"} - {name}:
        delattr(Scaler, other)
    scaler, param = Scaler("cpu", 4.0), nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([param], lr=1.0)

    take(how, scaler, optimizer, param)
    if how == "clipping":
        scaler.step(optimizer)
    scaler.update()
    assert param.item() == pytest.approx(-0.5, rel=1e-4)


@pytest.mark.parametrize("key", [None, "a"])
@pytest.mark.parametrize("max_norm", [None, 9.0])
def test_an_overridden_unscaling_decides_on_keyed_and_clipped_fused_steps(
    key: str | None, max_norm: float | None
) -> None:
    """A subclass whose optimizers check by themselves has no say in fused steps with a key or a norm."""

    class Scaler(GradScaler):
        def _unscale_grads_(self, *args: Any) -> Any:
            return {device: torch.ones_like(flag) for device, flag in super()._unscale_grads_(*args).items()}

    scaler, param = Scaler("cpu", 4.0), nn.Parameter(torch.ones(2))
    scaler.scale(param.sum(), key).backward()
    scaler.step(torch.optim.SGD([param], lr=1.0, fused=True), max_norm=max_norm, key=key)
    assert param.tolist() == [1.0, 1.0]


def test_flags_that_are_summed_over_ranks() -> None:
    """A fused kernel skips at 1.0 alone: it takes a step with inf that the record says was skipped."""
    scaler, param = GradScaler("cpu", 4.0), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([param], lr=1.0, fused=True)
    scaler.scale(param.sum() * math.inf).backward()
    scaler.unscale_(optimizer)
    for flag in scaler._found_inf_per_device(optimizer).values():
        flag.mul_(2.0)  # as all_reduce does where two ranks have inf
    scaler.step(optimizer)
    assert scaler.history[-1].skipped
    assert param.tolist() == [1.0, 1.0]


def test_several_optimizers_and_an_overridden_unscaling() -> None:
    """Optimizers that step as one go past the method: one of them steps although it says no."""
    asked: list[Any] = []

    class Scaler(GradScaler):
        def _unscale_grads_(self, optimizer: Any, *args: Any) -> Any:
            asked.append(optimizer)
            found = super()._unscale_grads_(optimizer, *args)
            return {device: flag + (optimizer is optimizers[0]) for device, flag in found.items()}

    scaler, params = Scaler("cpu", 4.0), [nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizers = [torch.optim.SGD([param], lr=1.0) for param in params]
    scaler.scale((params[0] + params[1]).sum()).backward()
    scaler.unscale_(optimizers)
    for optimizer in optimizers:
        scaler.step(optimizer)
    assert asked == optimizers
    assert [param.tolist() for param in params] == [[1.0, 1.0], [1.0, 1.0]]


def test_an_overridden_decision_and_a_closure() -> None:
    """A subclass that asks other ranks before it steps is not asked: ranks diverge in silence."""

    class Scaler(GradScaler):
        def _maybe_opt_step(self, *args: Any, **kwargs: Any) -> Any:
            return super()._maybe_opt_step(*args, **kwargs)

    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1.0)
    with pytest.raises(RuntimeError, match="Scaler overrides _maybe_opt_step, which decides on a step"):
        Scaler("cpu").step_closure(optimizer, lambda: None)


def test_a_subclass_that_decides_on_closures_too() -> None:
    """A subclass that overrides step_closure, as the error advises, cannot call the method of its base."""

    class Scaler(GradScaler):
        def _maybe_opt_step(self, *args: Any, **kwargs: Any) -> Any:
            return super()._maybe_opt_step(*args, **kwargs)

        def step_closure(self, *args: Any, **kwargs: Any) -> Any:
            return super().step_closure(*args, **kwargs)

    scaler, param = Scaler("cpu", 4.0), nn.Parameter(torch.ones(2))
    scaler.step_closure(torch.optim.SGD([param], lr=1.0), lambda: scaler.scale(param.sum()).backward())
    assert param.tolist() == [0.0, 0.0]


class Stage(enum.Enum):
    """Stages of a scaler that is a copy of torch's, as that of FairScale."""

    READY = 0
    UNSCALED = 1


@pytest.mark.parametrize("base", BOTH)
def test_a_step_of_its_own(base: Any) -> None:
    """A subclass with a copy of torch's `step` and stages finds no record of the step, nor its stages."""

    class Scaler(base):  # type: ignore[misc]
        def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            state = self._per_optimizer_states[id(optimizer)]
            if state["stage"] is Stage.READY:
                inverse = self._scale.double().reciprocal().float()
                found = self._unscale_grads_(optimizer, inverse, torch.zeros(()), False)
                state["found_inf_per_device"], state["stage"] = found, Stage.UNSCALED
            return self._maybe_opt_step(optimizer, state, *args, **kwargs)

    scaler, param = Scaler("cpu", 4.0), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([param], lr=0.5)
    for factor in (1.0, math.inf, 1.0):
        optimizer.zero_grad()
        scaler._per_optimizer_states = defaultdict(lambda: {"stage": Stage.READY, "found_inf_per_device": {}})
        scaler.scale(param.sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    assert (scaler.get_scale(), param.tolist()) == (2.0, [0.0, 0.0])
    if isinstance(scaler, GradScaler):
        assert [record.skipped for record in scaler.history] == [False, True, False]


@pytest.mark.parametrize("scaler_class", BOTH)
def test_unscaling_again_after_a_reset(scaler_class: Any) -> None:
    """The state that programs put in to unscale twice before an update is not understood."""
    scaler = scaler_class("cpu", 8.0)
    param = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([param], lr=1.0)
    for _ in range(2):
        scaler.scale(param.sum()).backward()
        scaler.unscale_(optimizer)
        assert param.grad.tolist() == [1.0, 1.0]
        scaler._per_optimizer_states[id(optimizer)] = _refresh_per_optimizer_state()
        param.grad = None
    scaler.scale(param.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert param.tolist() == [0.0, 0.0]


def test_numbers_of_numpy() -> None:
    """An integer of NumPy is refused, or ends up in a checkpoint that torch refuses to load."""
    np = pytest.importorskip("numpy")
    scaler = GradScaler(
        "cpu",
        np.float32(8.0),
        growth_factor=np.float64(2.0),
        growth_interval=np.int64(2),
        history=np.int64(1),
        warn_after=np.int64(3),
    )
    train(scaler)
    file = io.BytesIO()
    torch.save(scaler.state_dict(), file)
    file.seek(0)
    assert torch.load(file, weights_only=True) == scaler.state_dict()
    assert len(scaler.history) == 1


@pytest.mark.parametrize("scaler_class", [torch.amp.GradScaler, GradScaler])
def test_numbers_in_tensors(scaler_class: type[torch.amp.GradScaler]) -> None:
    """A setting that a program keeps in a tensor, as a buffer, is refused."""
    two, half, one = torch.tensor(2.0), torch.tensor(0.5), torch.tensor(1)
    scaler = scaler_class("cpu", 8 * one, growth_factor=two, backoff_factor=half, growth_interval=one)
    scaler.set_backoff_factor(half / 2)
    scaler.scale(torch.ones(()))
    train(scaler)
    assert scaler.get_scale() == 16.0


class Passing(torch.optim.Optimizer):
    """Steps a fused optimizer, to which its properties pass on what the scaler sets."""

    _step_supports_amp_scaling = True
    grad_scale, found_inf = (
        property(
            lambda self, name=name: getattr(self.inner, name),
            lambda self, value, name=name: setattr(self.inner, name, value),
            lambda self, name=name: delattr(self.inner, name),
        )
        for name in ("grad_scale", "found_inf")
    )

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.fails = inner, False
        super().__init__(inner.param_groups, {})

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise KeyError
        return self.inner.step(closure)


class Delegating:
    """Has nothing of its own, as wrappers that pass on each attribute."""

    def __init__(self, inner: Any) -> None:
        vars(self)["inner"] = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["inner"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.inner, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.inner, name)


@pytest.mark.parametrize("wrap", [Passing, Delegating, lambda inner: Delegating(Passing(inner))])
@pytest.mark.parametrize("base", BOTH)
def test_wrappers_that_pass_on_what_a_fused_optimizer_gets(base: Any, wrap: Any) -> None:
    """The inner optimizer steps on scaled gradients, and on those that are infinite."""
    scaler, param = base("cpu", 4.0), nn.Parameter(torch.ones(2))
    inner = torch.optim.SGD([param], lr=0.25, fused=True)
    optimizer = wrap(inner)
    for factor in (1.0, math.inf, 1.0):
        optimizer.zero_grad()
        scaler.scale(param.sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        assert not {"grad_scale", "found_inf"} & vars(inner).keys()
    assert (scaler.get_scale(), param.tolist()) == (2.0, [0.5, 0.5])


def test_a_wrapper_whose_step_raises_gets_back_what_was_set_before() -> None:
    """The retry divides by the scale twice, or forgets the divisor of the program."""
    scaler, param = GradScaler("cpu", 4.0), nn.Parameter(torch.ones(2))
    optimizer = Passing(torch.optim.SGD([param], lr=1.0, fused=True))
    scaler.scale(param.sum()).backward()
    optimizer.grad_scale, optimizer.fails = torch.tensor(2.0), True
    with pytest.raises(KeyError):
        scaler.step(optimizer)
    assert optimizer.grad_scale == 2.0
    optimizer.fails = False
    scaler.step(optimizer)
    assert param.tolist() == [0.5, 0.5]


@pytest.mark.parametrize("given", [{"max_norm": 1.0}, {"key": "a"}, {"key": "a", "max_norm": 1.0}])
def test_an_optimizer_that_takes_the_scaler_neither_clips_nor_knows_keys(given: dict[str, Any]) -> None:
    """The step is taken without clipping, or divided by the scale of other losses, in silence."""

    class Old(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure: Any = None, *, grad_scaler: Any = None) -> Any:
            grad_scaler.unscale_(self)
            return super().step(closure)

    scaler, param = GradScaler("cpu", 4.0), nn.Parameter(torch.ones(2))
    optimizer = Old([param], lr=1.0)
    scaler.scale(torch.ones(()))
    scaler.scale(param.sum() * 8, given.get("key")).backward()
    name = "max_norm" if "max_norm" in given else "key"
    with pytest.raises(ValueError, match=rf"step\({name}=...\) has no effect on this Old: its step takes"):
        scaler.step(optimizer, **given)
    assert param.tolist() == [1.0, 1.0]
    assert not scaler.history


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("base", BOTH)
def test_parameter_groups_that_are_no_list(base: Any, fused: bool) -> None:
    """An optimizer that makes its groups anew for each request fails in `len`, or in an index.

    Or it fails because its defaults are none.
    """

    class Grouped:
        defaults = None

        def __init__(self, inner: Any) -> None:
            self.inner, self._step_supports_amp_scaling = inner, fused

        @property
        def param_groups(self) -> Any:
            return ({"params": iter([param])} for param in self.inner.param_groups[0]["params"])

        def step(self) -> None:
            if fused:
                self.inner.grad_scale, self.inner.found_inf = self.grad_scale, self.found_inf
            self.inner.step()

    scaler, param = base("cpu", 4.0), nn.Parameter(torch.ones(2))
    optimizer = Grouped(torch.optim.SGD([param], lr=0.5, fused=fused))
    for factor in (1.0, math.inf):
        param.grad = None
        scaler.scale(param.sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    assert (scaler.get_scale(), param.tolist()) == (2.0, [0.5, 0.5])
