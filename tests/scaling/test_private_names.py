"""What programs do with the private names of torch's scaler: the same is true of ours."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import _refresh_per_optimizer_state

from amp_core import GradScaler

BOTH = (torch.amp.GradScaler, GradScaler)


def started(fused: bool = False) -> tuple[nn.Parameter, torch.optim.Optimizer]:
    param = nn.Parameter(torch.ones(2))
    return param, torch.optim.SGD([param], lr=1.0, fused=fused)


@pytest.mark.parametrize("base", BOTH)
def test_a_scaler_that_takes_the_scale_of_another(base: Any) -> None:
    """As in mmrazor: `update` ends in an AssertionError without a text."""
    (param, optimizer), scaler, other = started(), base("cpu", 4.0, growth_interval=1), base("cpu", 16.0)
    scaler.scale(param.sum()).backward()
    other._scale, other._growth_tracker = scaler._scale, scaler._growth_tracker
    other.step(optimizer)
    other.update()
    assert param.tolist() == [0.0, 0.0]
    assert (other.state_dict()["scale"], other.state_dict()["_growth_tracker"]) == (4.0, 1)


@pytest.mark.parametrize("save", [lambda s: s, copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
@pytest.mark.parametrize("base", BOTH)
def test_a_scale_that_is_set_before_the_first_loss_is_saved(base: Any, save: Any) -> None:
    """A checkpoint holds the scale from the constructor in place of the one in use."""
    scaler = base("cpu", 16.0)
    scaler._scale = torch.tensor(2048.0)
    assert save(scaler).state_dict()["scale"] == scaler.get_scale() == 2048.0


@pytest.mark.parametrize("take", [lambda state: state, copy.deepcopy])
@pytest.mark.parametrize("factor", [1.0, float("inf")])
@pytest.mark.parametrize("base", BOTH)
def test_a_wrapper_that_passes_its_state_on_to_what_it_wraps(base: Any, factor: float, take: Any) -> None:
    """As in hivemind: the gradients are divided by the scale twice, and the overflow counts for another."""
    (param, outer), scaler = started(), base("cpu", 4.0)
    inner = torch.optim.SGD(outer.param_groups, lr=1.0)
    scaler.scale(param.sum() * factor).backward()
    scaler.unscale_(outer)
    scaler._per_optimizer_states[id(inner)] = take(scaler._per_optimizer_states[id(outer)])
    scaler.step(inner)
    scaler.update()
    assert param.tolist() == ([0.0, 0.0] if factor == 1.0 else [1.0, 1.0])
    assert scaler.get_scale() == (4.0 if factor == 1.0 else 2.0)


@pytest.mark.parametrize("base", BOTH)
def test_the_state_of_an_optimizer_is_a_mapping(base: Any) -> None:
    """Code that asks `state.get("stage")`, or keeps a count in the state, fails."""
    (param, optimizer), scaler = started(), base("cpu", 4.0)
    scaler.scale(param.sum()).backward()
    scaler.unscale_(optimizer)
    state = scaler._per_optimizer_states[id(optimizer)]
    assert state.get("stage").name == "UNSCALED"
    assert ("stage" in state, state.get("tries", 0), len(state)) == (True, 0, 2)
    state["tries"] = 1
    assert {**state} == state != _refresh_per_optimizer_state()
    scaler._per_optimizer_states[id(optimizer)] = {**state, "tries": 2}
    scaler.step(optimizer)
    assert scaler._per_optimizer_states[id(optimizer)].pop("tries") == 2
    assert param.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("base", BOTH)
def test_a_shallow_copy_has_a_scale_of_its_own(base: Any) -> None:
    """Each of the two moves the scale of the other, which then has gradients of another scale."""
    (param, optimizer), scaler = started(), base("cpu", 4.0, growth_interval=1)
    scaler.scale(param.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    copied = copy.copy(scaler)
    scaler.update(2.0)
    copied.set_growth_factor(3.0)
    assert (copied.get_scale(), scaler.get_scale(), scaler.get_growth_factor()) == (8.0, 2.0, 2.0)
    param.grad = None
    copied.scale(param.sum()).backward()
    copied.step(optimizer)
    copied.update()
    assert (copied.get_scale(), scaler.get_scale(), param.tolist()) == (24.0, 2.0, [-1.0, -1.0])
    scaler.scale(param.sum())
    scaler.unscale_(optimizer)
    with pytest.raises(AssertionError, match="may only be pickled at the beginning"):
        copy.copy(scaler)


WRAPPERS = {
    "tensor": (lambda loss: loss, lambda scaled: scaled),
    "iterator": (lambda loss: iter([loss]), next),
    "nested": (lambda loss: [(loss, loss.detach())], lambda scaled: scaled[0][0]),
}


@pytest.mark.parametrize(("wrap", "unwrap"), WRAPPERS.values(), ids=WRAPPERS)
@pytest.mark.parametrize("base", BOTH)
def test_a_subclass_that_makes_the_scale_itself(base: Any, wrap: Any, unwrap: Any) -> None:
    """The scale is another than the one that the subclass makes, or on a device that it does not want."""

    class Scaler(base):  # type: ignore[misc]
        calls = 0

        def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
            self.calls += 1
            self._init_scale /= 2
            super()._lazy_init_scale_growth_tracker(dev)

    (param, optimizer), scaler = started(), Scaler("cpu", 4.0)
    for _ in range(2):
        optimizer.zero_grad()
        unwrap(scaler.scale(wrap(param.sum()))).backward()
        scaler.step(optimizer)
        scaler.update()
    assert (scaler.calls, scaler.get_scale(), param.tolist()) == (1, 2.0, [-1.0, -1.0])


@pytest.mark.parametrize("base", BOTH)
def test_one_flag_for_the_gradients_of_several_optimizers(base: Any) -> None:
    """The overflow of one optimizer becomes that of all that a loop unscales after it, or before."""
    (good, one), (bad, other), scaler = started(), started(), base("cpu", 4.0)
    scaler.scale(good.sum() + bad.sum() * float("inf")).backward()
    found_inf, inverse = torch.zeros(()), torch.tensor(0.25)
    found = [scaler._unscale_grads_(each, inverse, found_inf, False) for each in (one, other, one)]
    assert [[flag.item() for flag in flags.values()] for flags in found] == [[0.0], [1.0], [0.0]]
    assert found_inf == 0.0


PUT = {
    "update": lambda states, key, state: states.update({key: state}),
    "or": lambda states, key, state: states.__ior__({key: state}),
    "setdefault": lambda states, key, state: (states.pop(key), states.setdefault(key, state)),
}


@pytest.mark.parametrize("put", PUT.values(), ids=PUT)
@pytest.mark.parametrize("base", BOTH)
def test_states_that_are_put_in_by_the_methods_of_a_dict(base: Any, put: Any) -> None:
    """A state in torch's form stays one, and the step finds no attributes."""
    (param, optimizer), scaler = started(), base("cpu", 4.0)
    scaler.scale(param.sum()).backward()
    scaler.unscale_(optimizer)
    param.grad = torch.full((2,), 4.0)
    put(scaler._per_optimizer_states, id(optimizer), _refresh_per_optimizer_state())
    scaler.step(optimizer)
    scaler.update()
    assert param.tolist() == [0.0, 0.0]
