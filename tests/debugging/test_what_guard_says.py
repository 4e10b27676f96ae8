"""`guard`: what it says of the op at which it stops is true."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import amp_core


def fault_of(model: nn.Module, *inputs: torch.Tensor) -> amp_core.debugging.OpFault:
    """Return where the guard stops in a step of `model`."""
    with amp_core.guard(model, steps=[0]), pytest.raises(amp_core.NonFiniteError) as caught:
        model(*inputs).sum().backward()
    assert caught.value.fault is not None, caught.value
    return caught.value.fault


def test_ranges_of_float64_numbers_that_float32_does_not_hold() -> None:
    """Finite inputs are said to be inf, and the smallest magnitude to be 0."""
    model = nn.Linear(2, 1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1e200, 1e-200]], dtype=torch.float64))
    fault = fault_of(model, torch.full((1, 2), 1e150, dtype=torch.float64))
    given, weight = fault.inputs
    assert (given.largest, given.not_finite) == (1e150, 0.0)
    assert (weight.smallest, weight.largest, weight.not_finite) == (1e-200, 1e200, 0.0)
