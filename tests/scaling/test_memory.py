"""The memory that steps take beside parameters, gradients and states."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from amp_core import GradScaler
from amp_core.scaling import step_record


class Largest(TorchDispatchMode):
    """Note the most elements that a tensor has which an op makes."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        if isinstance(result, Tensor) and not (func.is_view or result is args[0]):
            self.elements = max(self.elements, result.numel())
        return result


@pytest.mark.parametrize("shape", [(64, 1, 40), (4, 640), (2560,), (2, 1, 1280)])
def test_a_skipped_step_takes_little_memory(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """A skipped step of a model that fills a device ends in an error: out of memory."""
    monkeypatch.setattr(step_record, "_COUNTED", 256)
    weight = nn.Parameter(torch.zeros(shape))
    optimizer, scaler = torch.optim.SGD([weight], lr=1.0), GradScaler("cpu")
    scaler.scale(torch.ones(()))
    weight.grad = torch.randn(shape)
    weight.grad.view(-1)[::7] = torch.inf
    with Largest() as largest:
        scaler.step(optimizer)
    (bad,) = scaler.history[-1].bad_parameters
    assert (bad.nonfinite, bad.elements) == (366, 2560)
    assert largest.elements <= 256
