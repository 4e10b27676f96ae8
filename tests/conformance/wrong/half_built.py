"""What is built for later calls, and seen by another thread before it is done."""

from __future__ import annotations

from dataclasses import replace

import torch

from amp_core.kernels import Portable

THREADS = ("kernels_serve_many_threads_at_once",)


class Cached(Portable):
    """Kernels that keep something small."""

    def __init__(self):
        super().__init__()
        self.known = {}


class ScheduleIsHalfBuilt(Cached):
    fails = THREADS

    def update_scale_(self, state, found_inf, schedule):
        if schedule not in self.known:
            self.known[schedule] = replace(schedule, growth_interval=1)
            self.known[schedule] = schedule
        super().update_scale_(state, found_inf, self.known[schedule])


class ShapesAreHalfBuilt(Cached):
    fails = THREADS

    def grad_stats(self, grads, norm_type=2.0):
        key = tuple(g.shape for g in grads)
        if key not in self.known:
            sizes = self.known[key] = []
            for grad in grads:
                sizes.append(grad.numel())  # one at a time, which is the fault
        count = len(self.known[key])
        return super().grad_stats([*grads[:count], *[torch.zeros_like(g) for g in grads[count:]]], norm_type)


class TargetsAreHalfBuilt(Cached):
    fails = THREADS

    def cast(self, tensors, dtype, out=None):
        key = (dtype, tuple(t.shape for t in tensors))
        if key not in self.known:
            self.known[key] = torch.float16
            self.known[key] = dtype
        return super().cast(tensors, self.known[key], out)
