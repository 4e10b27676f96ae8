"""A region that names no dtype has that of the region around it.

Also on a device whose default is not torch's setting.
"""

from __future__ import annotations

import random
from typing import Any

import torch

import amp_core
from amp_core.plugin import get_backend
from amp_core.testing.fixtures import serving

from ..drawn import programs


class Float16(type(get_backend("cpu"))):  # type: ignore[misc]
    """A backend as most plugins write it: its default dtype does not follow torch's setting."""

    def default_dtype(self) -> torch.dtype:
        return torch.float16


def _drawn(draw: random.Random, depth: int) -> list[Any]:
    """Return nested regions: whether torch's, their arguments, and what is inside them."""
    found = []
    for _ in range(draw.randrange(1, 3) if depth else 0):
        dtype = draw.choice([None, None, torch.bfloat16, torch.float16])
        enabled = draw.random() < 0.7
        found.append((enabled and draw.random() < 0.3, dtype, enabled, _drawn(draw, depth - 1)))
    return found


def _states(program: list[Any], *, ours: bool) -> list[Any]:
    """Return the state within each region; only torch's regions count if not `ours`."""
    states = []
    for is_torchs, dtype, enabled, inner in program:
        cls: Any = torch.autocast if is_torchs or not ours else amp_core.autocast
        with cls("cpu", dtype=dtype, enabled=enabled):
            states.append((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
            states += _states(inner, ours=ours)
    return states


def test_nested_regions_have_the_dtypes_of_torchs() -> None:
    """Library code that names no dtype would leave the dtype that the program has chosen around it."""
    before = torch.get_autocast_dtype("cpu")
    torch.set_autocast_dtype("cpu", torch.float16)
    try:
        for draw in programs(most=300):
            program = _drawn(draw, 4)
            expected = _states(program, ours=False)
            with serving(Float16()):
                assert _states(program, ours=True) == expected, program
    finally:
        torch.set_autocast_dtype("cpu", before)


def test_a_region_within_a_disabled_one_keeps_the_outer_dtype() -> None:
    """A region in a float32 part of the model would run in another dtype than the rest."""
    exact = amp_core.autocast("cpu", enabled=False)
    with serving(Float16()), amp_core.autocast("cpu", torch.bfloat16), exact, amp_core.autocast("cpu"):
        assert torch.get_autocast_dtype("cpu") is torch.bfloat16
    with serving(Float16()), amp_core.autocast("cpu"):
        assert torch.get_autocast_dtype("cpu") is torch.float16
