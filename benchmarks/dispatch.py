"""What an op costs under a policy."""

from __future__ import annotations

from collections.abc import Iterator

import torch

import amp_core
from benchmarks.ab import Ratio, compare


def run() -> Iterator[Ratio]:
    """Compare ops under the native policy, and softmax under a policy that overrides it."""
    x, w = torch.randn(8, 8), torch.randn(8, 8)
    ops = {
        "mm": lambda: torch.mm(x, w),
        "linear": lambda: torch.nn.functional.linear(x, w),
        "softmax": lambda: torch.softmax(x, -1),
        "add": lambda: x + w,
    }
    changed = amp_core.OpPolicy.default("cpu").override({"softmax": "lower_precision_fp"})
    for name, op in ops.items():
        for policy, text in ((None, "native policy"), (changed, "softmax overridden")):
            with torch.autocast("cpu"):
                theirs = _inside(torch.autocast("cpu"), op)
            yield compare(
                f"{name} 8x8, {text}", theirs, _inside(amp_core.autocast("cpu", policy=policy), op), rounds=15
            )


def _inside(region: torch.autocast, op):  # type: ignore[no-untyped-def]
    def run() -> None:
        with region:
            for _ in range(2000):
                op()

    return run
