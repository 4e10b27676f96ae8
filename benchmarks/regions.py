"""Entering and leaving a region."""

from __future__ import annotations

from collections.abc import Iterator

import torch

import amp_core
from benchmarks.ab import Ratio, compare


def run() -> Iterator[Ratio]:
    """Compare one instance used again, a new one each time, and the decorator; outermost and nested."""
    theirs, ours = torch.autocast("cpu"), amp_core.autocast("cpu")
    decorated = [region(_nothing) for region in (theirs, ours)]
    for where, outer in (("outermost", False), ("nested", True)):
        with torch.autocast("cpu", enabled=outer):
            yield compare(
                f"one region again, {where}", lambda: _enter(theirs), lambda: _enter(ours), calls=5000
            )
            yield compare(
                f"a new region, {where}",
                lambda: _enter(torch.autocast("cpu")),
                lambda: _enter(amp_core.autocast("cpu")),
                calls=5000,
            )
            yield compare(f"decorated function, {where}", *decorated, calls=5000)


def _enter(region: torch.autocast) -> None:
    with region:
        pass


def _nothing() -> None:
    pass
