"""The dispatch modes of a program that begin and end while tools look at its ops, in any order."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import amp_core
from amp_core import NonFiniteError

from ..modes import Passing

X = torch.linspace(-1, 1, 12).reshape(3, 4)


@pytest.mark.parametrize("mode", [Passing, functools.partial(FlopCounterMode, display=False)])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_guard_looks_on_after_a_mode_has_ended(mode: Callable[[], Any], where: str) -> None:
    """The end of a mode around the forward pass ends the checks of the guard in its place."""
    model = nn.Linear(4, 4)
    with torch.no_grad():
        model.weight.fill_(3e38 if where == "forward" else 1.0)

    def step() -> None:
        with mode():
            result = model(X + 3)
        result.backward(torch.full_like(result, 3e38))

    with amp_core.guard(model, steps=[0]), pytest.raises(NonFiniteError, match=f"{where} pass of step 0"):
        step()
