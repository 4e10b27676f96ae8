"""Launches every program as on an NVIDIA GPU, up to the launch itself: binds, specializes and compiles.

Prints as JSON how many versions of each program that took.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from amp_core.kernels import ScaleTensors
from amp_core.kernels.triton_kernels import Triton
from amp_core.kernels.triton_tables import _written
from amp_core.states.loss_scale import Hysteresis, LossScaleSchedule


class NoGpu:
    """What Triton asks of the driver before it launches."""

    def get_current_target(self) -> GPUTarget:
        """Say that the GPU is an H100."""
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        """Return the only one."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Return the default one."""
        return 0


compiled: set[tuple[str, str]] = set()
_run = JITFunction.run


def _up_to_the_launch(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
    assert not warmup
    assert grid[0] > 0, "an empty grid cannot be launched"
    made = _run(self, *args, grid=grid, warmup=True, **kwargs)
    compiled.add((self.fn.__name__, made.hash))
    return made


def main() -> None:
    """Call each kernel with several lists, orders and schedules."""
    triton.runtime.driver.set_active(NoGpu())
    JITFunction.run = _up_to_the_launch
    kernels = Triton("cpu")
    factor, found = torch.ones(()), torch.zeros(1)
    for sizes in ((1,), (16, 1, 0), (70_000, 5), (16,) * 40, (0,)):
        for dtypes in ((torch.float32,), (torch.bfloat16, torch.float32, torch.complex64)):
            grads = [torch.ones(n, dtype=dtypes[i % len(dtypes)]) for i, n in enumerate(sizes)]
            kernels.grad_stats(grads)
            kernels.multiply_(grads, factor, found)
            real = [g for g in grads if not g.is_complex()]
            kernels.cast(real, torch.float16)
            kernels.add_([torch.ones(g.shape) for g in real], real)
    for order in (1.0, float("inf"), 3.0, 4.0):
        kernels.grad_stats([torch.ones(3)], order)
    for schedule in (
        LossScaleSchedule(),
        LossScaleSchedule(3.0, 0.25, 1, 16.0, 64.0, 1),
        LossScaleSchedule(growth_interval=2**40),
    ):
        for kind in Hysteresis:
            held = LossScaleSchedule(**{**vars(schedule), "hysteresis_kind": kind})
            counts = [torch.zeros((), dtype=torch.int32) for _ in range(2)]
            kernels.update_scale_(ScaleTensors(torch.ones(()), *counts), found, held)
    for values in ([1], [0, 2**40], list(range(17))):
        _written(values, torch.device("cpu"))
    print(json.dumps(Counter(name for name, _ in compiled)))


if __name__ == "__main__":
    main()
