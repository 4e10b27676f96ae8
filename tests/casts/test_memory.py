"""Memory of casts and gradients, used again from step to step."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import amp_core
from amp_core._torch import op_kernels
from amp_core.casts.memory import KeptMemory

SIDE = 600
"""A weight of this side is too large to be cast by itself, without kept memory."""
LAYOUT = torch.empty(SIDE, SIDE, dtype=torch.bfloat16)


def test_memory_comes_back_when_nobody_has_it() -> None:
    """Each request takes fresh pages, or two tensors that are in use share memory."""
    memory = KeptMemory()
    one, two = memory.empty_like(LAYOUT, torch.float32), memory.empty_like(LAYOUT, torch.float32)
    places = {one.data_ptr(), two.data_ptr()}
    assert len(places) == 2
    view = one[3:]
    del one
    three = memory.empty(SIDE * SIDE, torch.float32, LAYOUT.device)
    assert three.data_ptr() not in places, "a view still uses it"
    assert memory.idle_nbytes() == 0
    del view, two
    assert memory.idle_nbytes() == 2 * SIDE * SIDE * 4
    again = [memory.empty_like(LAYOUT.t(), torch.float32) for _ in range(2)]
    assert {tensor.data_ptr() for tensor in again} == places
    assert again[0].stride() == (1, SIDE)
    memory.clear()
    assert memory.idle_nbytes() == 0


def test_growth_takes_linear_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first backward pass of a deep model asks of each gradient whether it is in use, for every other."""
    from amp_core.casts import memory as module

    asked, is_in_use = [], module.is_in_use
    monkeypatch.setattr(module, "is_in_use", lambda storage: asked.append(0) or is_in_use(storage))
    memory, count = KeptMemory(), 300
    held = [memory.empty(20_000, torch.float32, LAYOUT.device) for _ in range(count)]
    assert len({tensor.data_ptr() for tensor in held}) == count
    assert len(asked) < 15 * count
    places = {tensor.data_ptr() for tensor in held}
    for _ in range(2):
        held.clear()
        asked.clear()
        held += [memory.empty(20_000, torch.float32, LAYOUT.device) for _ in range(count)]
        assert {tensor.data_ptr() for tensor in held} == places
        assert len(asked) < 3 * count


def test_memory_that_was_resized_or_shared_is_not_used_again() -> None:
    """Another process reads the next gradient in place of the one it was given, or a small one is overrun."""
    memory = KeptMemory()
    shared = memory.empty_like(LAYOUT, torch.float32).share_memory_()
    place = shared.data_ptr()
    del shared
    resized = memory.empty_like(LAYOUT, torch.float32)
    assert resized.data_ptr() != place
    resized.untyped_storage().resize_(0)
    del resized
    memory.empty_like(LAYOUT, torch.float32).fill_(1.0)
    assert memory.idle_nbytes() == LAYOUT.numel() * 4


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(SIDE, SIDE).t(),
        torch.zeros(4, SIDE, SIDE).permute(2, 0, 1),
        torch.zeros(SIDE, 2 * SIDE)[:, ::2],
        torch.zeros(SIDE, 1).expand(SIDE, SIDE),
        torch.zeros(()),
        torch.zeros(0, 3),
        torch.zeros(9).as_strided((3, 3), (2, 2)),
    ],
)
def test_layouts_are_those_of_torch(tensor: torch.Tensor) -> None:
    """A gradient of a layout with gaps or overlaps is written over its own elements."""
    made = KeptMemory().empty_like(tensor, torch.float64)
    expected = torch.empty_like(tensor, dtype=torch.float64)
    assert (made.shape, made.stride(), made.dtype) == (expected.shape, expected.stride(), torch.float64)


@pytest.mark.parametrize("scope", [amp_core.cached_casts, amp_core.master_weights])
def test_a_gradient_that_someone_holds_is_left_alone(scope) -> None:
    """The next backward writes into gradients of the last one, which a logger or an average still reads."""
    model, x = nn.Linear(SIDE, SIDE), torch.randn(4, SIDE)
    with scope(model):
        places = []
        for held in (False, True, False):
            model.zero_grad()
            with amp_core.autocast("cpu"):
                model(x).float().square().sum().backward()
            if held:
                kept, value = model.weight.grad, model.weight.grad.clone()
            places.append(model.weight.grad.data_ptr())
            with torch.no_grad():
                model.weight.add_(0.1)
    assert places[0] == places[1] != places[2]
    assert torch.equal(kept, value)


def test_a_graph_keeps_the_casts_that_it_was_made_with() -> None:
    """A step between a forward and its backward puts new weights into the old graph."""
    model, x = nn.Linear(SIDE, SIDE, bias=False), torch.randn(4, SIDE, requires_grad=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def loss_of(module: nn.Module) -> torch.Tensor:
        with amp_core.autocast("cpu"):
            return module(x).float().sum()

    with amp_core.cached_casts(model):
        for _ in range(2):
            (expected,) = torch.autograd.grad(loss_of(copy.deepcopy(model)), x)
            loss = loss_of(model)
            model.weight.grad = torch.ones_like(model.weight)
            optimizer.step()
            loss_of(model)
            (got,) = torch.autograd.grad(loss, x)
            assert torch.equal(got, expected)


def test_a_scope_leaves_no_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch keeps some bytes of every library of kernels: entering a scope at each step leaks kilobytes."""
    made = []
    library = op_kernels._library
    monkeypatch.setattr(op_kernels, "_library", lambda *args: made.append(args) or library(*args))
    model = torch.nn.Linear(2, 2)
    for _ in range(2):
        before = len(made)
        with amp_core.cached_casts(model), amp_core.record():
            model(torch.ones(1, 2))
    assert len(made) == before


def test_copies_of_replaced_weights_are_freed() -> None:
    """A loop that loads weights with ``assign=True`` keeps each weight that it ever had."""
    model = nn.Linear(8, 8, bias=False)
    replaced = []
    with amp_core.master_weights(model):
        for _ in range(4):
            with amp_core.autocast("cpu"):
                model(torch.ones(1, 8)).sum().backward()
            replaced.append(weakref.ref(model.weight.untyped_storage()))
            model.load_state_dict({"weight": model.weight.detach().clone()}, assign=True)
        gc.collect()
        assert [ref() is None for ref in replaced[:2]] == [True, True]
