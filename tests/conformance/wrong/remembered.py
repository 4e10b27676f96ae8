"""Kernels that keep what they should not; `fails` names the checks that must say so."""

from __future__ import annotations

import torch

from amp_core.kernels import Portable

STALE, ALIVE = ("kernels_read_the_values_of_the_moment",), ("kernels_keep_nothing_alive",)
GROWS = ("kernels_need_no_more_memory_with_every_call",)


class CastIsKeptById(Portable):
    fails = STALE

    def __init__(self):
        super().__init__()
        self.known = {}

    def cast(self, tensors, dtype, out=None):
        if out is not None:
            return super().cast(tensors, dtype, out)
        results = super().cast(tensors, dtype)
        first = [self.known.setdefault((id(t), dtype), r) for t, r in zip(tensors, results, strict=True)]
        return [f.clone() if f.shape == r.shape else r for f, r in zip(first, results, strict=True)]


class CastIsKeptByVersion(Portable):
    fails = STALE

    def __init__(self):
        super().__init__()
        self.known = {}

    def cast(self, tensors, dtype, out=None):
        if out is not None:
            return super().cast(tensors, dtype, out)
        keys = [(id(t), t._version, dtype, t.shape) for t in tensors]
        results = super().cast(tensors, dtype)
        return [self.known.setdefault(k, r).clone() for k, r in zip(keys, results, strict=True)]


class MeasureIsKeptForAPreparedList(Portable):
    fails = STALE

    class Prepared(list):
        stats = None

    def prepare(self, tensors, layout=None):
        return self.Prepared(tensors)

    def grad_stats(self, grads, norm_type=2.0):
        if not isinstance(grads, self.Prepared) or norm_type != 2.0:
            return super().grad_stats(grads, norm_type)
        grads.stats = grads.stats or super().grad_stats(grads)
        return type(grads.stats)(*[t.clone() for t in vars(grads.stats).values()])


class PrepareCopiesSmallTensors(Portable):
    fails = ("kernels_read_the_values_of_the_moment", "multiply_of_every_memory_layout")

    def prepare(self, tensors, layout=None):
        return [t.detach().clone() if t.numel() < 20 else t for t in tensors]


class FactorIsKeptById(Portable):
    fails = ("multiply_reads_the_factor_of_the_moment",)

    def __init__(self):
        super().__init__()
        self.known = {}

    def multiply_(self, grads, factor, found_inf=None):
        known = self.known.setdefault((id(factor), factor.data_ptr(), factor._version), factor.clone())
        super().multiply_(grads, known, found_inf)


class ScheduleIsKeptById(Portable):
    fails = ("update_reads_each_schedule_anew",)

    def __init__(self):
        super().__init__()
        self.known = {}

    def update_scale_(self, state, found_inf, schedule):
        growth = self.known.setdefault(id(schedule), vars(schedule).copy())
        super().update_scale_(state, found_inf, type(schedule)(**growth))


class LayoutIsKeptById(Portable):
    fails = ("cast_of_every_memory_layout",)

    def __init__(self):
        super().__init__()
        self.known = {}

    def layout(self, tensors):
        return self.known.setdefault(id(tensors), [t.shape for t in tensors])

    def prepare(self, tensors, layout=None):
        shapes = self.layout(tensors) if layout is None else layout
        return [t.view(s) if t.numel() == s.numel() else t[:1] for t, s in zip(tensors, shapes, strict=False)]


class KeepsItsSources(Portable):
    fails = ALIVE

    def cast(self, tensors, dtype, out=None):
        self.last = list(tensors)
        return super().cast(tensors, dtype, out)


class KeepsItsGradients(Portable):
    fails = ALIVE

    def multiply_(self, grads, factor, found_inf=None):
        self.last = grads
        super().multiply_(grads, factor, found_inf)


class KeepsTheMemoryOfGradients(Portable):
    fails = ALIVE

    def grad_stats(self, grads, norm_type=2.0):
        self.last = [g.detach() for g in grads]
        return super().grad_stats(grads, norm_type)


class KeepsTheMemoryOfTotals(Portable):
    fails = ALIVE

    def add_(self, totals, grads):
        super().add_(totals, grads)
        self.last = [g.untyped_storage() for g in grads]


class KeepsItsResults(Portable):
    fails = ALIVE

    def grad_stats(self, grads, norm_type=2.0):
        self.last = super().grad_stats(grads, norm_type)
        return self.last


class LayoutKeepsAView(Portable):
    fails = ALIVE

    def layout(self, tensors):
        return [t[:0] for t in tensors]


class GrowsByASetAStep(Portable):
    fails = GROWS
    steps = ()

    def multiply_(self, grads, factor, found_inf=None):
        self.steps = [*self.steps, {g.data_ptr() for g in grads}]
        super().multiply_(grads, factor, found_inf)


class GrowsByABufferAStep(Portable):
    fails = GROWS
    buffers = ()

    def add_(self, totals, grads):
        self.buffers = [*self.buffers, torch.empty(1), torch.empty(1)]
        super().add_(totals, grads)


class GrowsByAnAddressAStep(Portable):
    fails = GROWS

    def __init__(self):
        super().__init__()
        self.known = {}

    def update_scale_(self, state, found_inf, schedule):
        self.known[object()] = [object() for _ in range(4)]
        super().update_scale_(state, found_inf, schedule)


class PlansAreKeptByAddress(Portable):
    fails = GROWS

    def __init__(self):
        super().__init__()
        self.plans = {}

    def multiply_(self, grads, factor, found_inf=None):
        self.plans.setdefault(tuple(g.data_ptr() for g in grads), [object()])
        super().multiply_(grads, factor, found_inf)
