"""The third kernel of a policy cannot be installed. For test_installed_kernels.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from amp_core import OpPolicy, autocast
from amp_core.dispatch import engine

REAL, CALLS = engine.install, []


def failing(name: str, key: str, kernel: Callable[..., Any]) -> Callable[[], None]:
    """Install two kernels and raise."""
    CALLS.append(name)
    if len(CALLS) == 3:
        raise MemoryError("third install")
    return REAL(name, key, kernel)


engine.install = failing
try:
    with autocast("cpu", policy=OpPolicy.uniform("cpu")):
        raise AssertionError("entered")
except MemoryError:
    assert len(CALLS) == 3
x = torch.ones(2, 2)
assert not torch.is_autocast_enabled("cpu")
with torch.autocast("cpu"):
    assert torch.softmax(x.bfloat16(), -1).dtype is torch.bfloat16
    assert torch.mm(x, x).dtype is torch.bfloat16
engine.install = REAL
with autocast("cpu", policy=OpPolicy.default("cpu").override({"softmax": "fp32"})):
    assert torch.softmax(x.bfloat16(), -1).dtype is torch.float32
