"""Arguments, taken for others; `fails` names the checks that must say so."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from amp_core.kernels import Portable

OUT = ("cast_refuses_an_out_of_other_shapes_before_it_writes",)
KINDS, ORDERS = ("grad_stats_of_every_memory_layout",), ("grad_stats_norms_of_every_dtype_and_order",)


class CastBroadcastsIntoOut(Portable):
    fails = OUT

    def cast(self, tensors, dtype, out=None):
        if out is not None:
            pairs = zip(tensors, out, strict=True)
            tensors = [t.detach().expand(o.shape) if t.numel() == 1 else t for t, o in pairs]
        return super().cast(tensors, dtype, out)


class CastReshapesIntoOut(Portable):
    fails = OUT

    def cast(self, tensors, dtype, out=None):
        if out is not None and len(out) == len(tensors):
            pairs = zip(tensors, out, strict=True)
            tensors = [t.detach().reshape(o.shape) if t.numel() == o.numel() else t for t, o in pairs]
        return super().cast(tensors, dtype, out)


class CastWritesBeforeItRefuses(Portable):
    fails = OUT

    def cast(self, tensors, dtype, out=None):
        if out is None:
            return super().cast(tensors, dtype)
        return [
            super(CastWritesBeforeItRefuses, self).cast([t], dtype, [o])[0]
            for t, o in zip(tensors, out, strict=True)
        ]


class AddBroadcasts(Portable):
    fails = ("add_refuses_other_shapes_before_it_writes",)

    def add_(self, totals, grads):
        super().add_(
            totals, [g.expand(t.shape) if g.numel() == 1 else g for t, g in zip(totals, grads, strict=True)]
        )


class AddWritesBeforeItRefuses(Portable):
    fails = ("add_refuses_other_shapes_before_it_writes",)

    def add_(self, totals, grads):
        for t, g in zip(totals, grads, strict=True):
            super().add_([t], [g])


class CastReturnsAParameter(Portable):
    fails = ("cast_of_every_memory_layout",)

    def cast(self, tensors, dtype, out=None):
        results = super().cast(tensors, dtype, out)
        if out is not None:
            return results
        pairs = zip(results, tensors, strict=True)
        is_one = torch.nn.Parameter
        return [is_one(r, requires_grad=False) if isinstance(t, is_one) else r for r, t in pairs]


class MeasureCutsTheOrderToAnInt(Portable):
    fails = ORDERS

    def grad_stats(self, grads, norm_type=2.0):
        return super().grad_stats(grads, norm_type if norm_type in (0.5, math.inf) else int(norm_type))


class UpdateCutsTheIntervalToThirtyTwoBits(Portable):
    fails = ("update_counts_far",)

    def update_scale_(self, state, found_inf, schedule):
        interval = schedule.growth_interval % 2**32 or 1
        super().update_scale_(state, found_inf, replace(schedule, growth_interval=interval))


class ScaleByOneLooksForNothing(Portable):
    fails = (
        "multiply_flags_a_bad_element_at_every_position",
        "multiply_flags_one_bad_element_among_millions",
    )

    def multiply_(self, grads, factor, found_inf=None):
        mine = None if found_inf is None else torch.zeros_like(found_inf)
        super().multiply_(grads, factor, mine)
        if found_inf is not None:
            found_inf.masked_fill_((mine > 0) & (factor != 1), 1.0)


class MeasureFlagsInTheDefaultDtype(Portable):
    fails = ("kernels_under_other_defaults",)

    def grad_stats(self, grads, norm_type=2.0):
        stats = super().grad_stats(grads, norm_type)
        return replace(stats, nonfinite=stats.nonfinite.to(torch.get_default_dtype()))


class MeasureOfNothingInTheDefaultDtype(Portable):
    fails = ("grad_stats_of_nothing",)

    def grad_stats(self, grads, norm_type=2.0):
        stats = super().grad_stats(grads, norm_type)
        return stats if grads else replace(stats, found_inf=torch.zeros(()))


class MeasureOnTheDefaultDevice(Portable):
    fails = ("kernels_under_other_defaults",)

    def grad_stats(self, grads, norm_type=2.0):
        stats = super().grad_stats(grads, norm_type)
        return replace(stats, found_inf=torch.empty(()).copy_(stats.found_inf))


class MeasureTakesComplexNormsOverParts(Portable):
    fails = ORDERS

    def grad_stats(self, grads, norm_type=2.0):
        parts = [torch.view_as_real(g.detach().resolve_conj()) if g.is_complex() else g for g in grads]
        return super().grad_stats(parts, norm_type)


class MeasureOfComplex128IsFloat32(Portable):
    fails = KINDS

    def grad_stats(self, grads, norm_type=2.0):
        stats = super().grad_stats(grads, norm_type)
        if torch.float64 in {g.dtype for g in grads}:
            return stats
        return replace(stats, norm=stats.norm.float(), norms=stats.norms.float())


class MeasureTakesTheDtypeOfTheFirst(Portable):
    fails = ("grad_stats_of_mixed_lists",)

    def grad_stats(self, grads, norm_type=2.0):
        stats = super().grad_stats(grads, norm_type)
        wide = grads and grads[0].dtype in (torch.float64, torch.complex128)
        dtype = torch.float64 if wide else torch.float32
        return replace(stats, norm=stats.norm.to(dtype), norms=stats.norms.to(dtype))


class ScaleTakesTheDtypeOfTheFirst(Portable):
    fails = ("multiply_of_every_memory_layout",)

    def multiply_(self, grads, factor, found_inf=None):
        factor = factor.to(grads[0].dtype.to_real()).float() if grads else factor
        super().multiply_(grads, factor, found_inf)


class MeasureOfInfIsNan(Portable):
    fails = ("grad_stats_flags_each_kind_of_bad_element_alone",)

    def grad_stats(self, grads, norm_type=2.0):
        stats = super().grad_stats(grads, norm_type)
        return replace(stats, norms=stats.norms - stats.nonfinite * stats.norms * 0)


class MeasureSkipsTheFirstOfALaterChunk(Portable):
    fails = ("grad_stats_finds_one_bad_element_among_millions",)

    def grad_stats(self, grads, norm_type=2.0):
        stats = super().grad_stats(grads, norm_type)
        cut = [torch.cat([g[:65536], g[65537:]]) if g.dim() == 1 and g.numel() > 65537 else g for g in grads]
        bad = super().grad_stats(cut, norm_type)
        return replace(stats, nonfinite=bad.nonfinite, found_inf=bad.found_inf)


class ScaleSkipsTheFirstOfALaterChunk(Portable):
    fails = ("multiply_flags_one_bad_element_among_millions",)

    def multiply_(self, grads, factor, found_inf=None):
        if found_inf is not None:
            cut = [g[16384:16385].clone() if g.dim() == 1 and g.numel() > 16385 else None for g in grads]
            mine = torch.zeros_like(found_inf)
            super().multiply_(
                [
                    g if c is None else torch.cat([g[:16384], g[16385:]])
                    for g, c in zip(grads, cut, strict=True)
                ],
                factor.new_ones(()),
                mine,
            )
            found_inf.masked_fill_(mine > 0, 1.0)
        super().multiply_(grads, factor)


class AddLosesNan(Portable):
    fails = ("add_keeps_what_is_not_finite",)

    def add_(self, totals, grads):
        super().add_(totals, [g.detach().nan_to_num(0.0, math.inf, -math.inf) for g in grads])


class AddOverwritesATotalThatStartsAtZero(Portable):
    fails = ("add_keeps_what_is_not_finite",)

    def add_(self, totals, grads):
        with torch.no_grad():
            for t, g in zip(totals, grads, strict=True):
                first = t.reshape(-1)[:1]
                t.copy_(
                    torch.where((first == 0) if t.numel() else first.bool(), g.to(t.dtype), t + g)
                ) if t.numel() else None


class ScaleIgnoresAFlagOfOneDimension(Portable):
    fails = ("multiply_of_every_memory_layout",)

    def multiply_(self, grads, factor, found_inf=None):
        super().multiply_(grads, factor, found_inf if found_inf is None or not found_inf.dim() else None)
