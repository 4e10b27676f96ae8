"""Multiplications, wrong in one plausible way each; `fails` names the checks that must say so."""

from __future__ import annotations

import torch

from amp_core.kernels import Portable


class ScaleChecksBeforeTheMultiplyOnly(Portable):
    fails = ("multiply_flags_a_bad_element_at_every_position",)

    def multiply_(self, grads, factor, found_inf=None):
        bad = super().grad_stats(grads).found_inf if grads else torch.zeros(())
        super().multiply_(grads, factor)
        if found_inf is not None:
            found_inf.masked_fill_(bad > 0, 1.0)


class ScaleClearsTheFlag(Portable):
    fails = ("multiply_sets_the_flag_of_a_list",)

    def multiply_(self, grads, factor, found_inf=None):
        if found_inf is not None:
            found_inf.zero_()
        super().multiply_(grads, factor, found_inf)


class ScaleCountsUp(Portable):
    fails = (
        "multiply_sets_the_flag_of_a_list",
        "multiply_sets_the_flag_of_a_list",
    )

    def multiply_(self, grads, factor, found_inf=None):
        for g in grads:
            mine = torch.zeros(())
            super().multiply_([g], factor, mine)
            if found_inf is not None:
                found_inf.add_(mine)


class NothingIsFlagged(Portable):
    fails = ("scaler_follows_the_state_machine", "multiply_sets_the_flag_of_a_list")

    def grad_stats(self, grads, norm_type=2.0):
        stats = super().grad_stats(grads, norm_type)
        stats.found_inf.zero_()
        return stats

    def multiply_(self, grads, factor, found_inf=None):
        super().multiply_(grads, factor)


class ScaleStopsAtABadElement(Portable):
    fails = ("multiply_of_special_numbers",)

    def multiply_(self, grads, factor, found_inf=None):
        if any(not torch.isfinite(g).all() for g in grads):
            if found_inf is not None:
                found_inf.fill_(1.0)
            return
        super().multiply_(grads, factor, found_inf)


class ScaleRoundsTheFactorFirst(Portable):
    fails = ("multiply_works_in_float32_or_wider",)

    def multiply_(self, grads, factor, found_inf=None):
        for g in grads:
            super().multiply_([g], factor.to(g.dtype.to_real()).float(), found_inf)


class ScaleForgetsTheLastElement(Portable):
    fails = ("multiply_works_in_float32_or_wider",)

    def multiply_(self, grads, factor, found_inf=None):
        kept = [g[-1:].clone() if g.dim() == 1 and g.numel() == 33 else None for g in grads]
        super().multiply_(grads, factor, found_inf)
        for g, last in zip(grads, kept, strict=True):
            if last is not None:
                g[-1:].copy_(last)


class ScaleWritesBehindAutograd(Portable):
    fails = ("multiply_of_every_memory_layout",)

    def multiply_(self, grads, factor, found_inf=None):
        super().multiply_([g.data for g in grads], factor, found_inf)


class ScaleInvertsTheFactorInPlace(Portable):
    fails = ("multiply_of_every_memory_layout",)

    def multiply_(self, grads, factor, found_inf=None):
        super().multiply_(grads, factor, found_inf)
        factor.reciprocal_()


class ScaleBranchesOnTheHost(Portable):
    fails = ("kernels_do_not_wait_for_the_device",)

    def multiply_(self, grads, factor, found_inf=None):
        if float(factor) != 1.0:
            super().multiply_(grads, factor, found_inf)


class ScaleLosesTheSecondChunk(Portable):
    fails = ("kernels_of_thousands_of_tensors",)

    def multiply_(self, grads, factor, found_inf=None):
        super().multiply_(list(grads)[:512], factor, found_inf)


class ScaleRepairsNan(Portable):
    fails = ("multiply_of_special_numbers",)

    def multiply_(self, grads, factor, found_inf=None):
        super().multiply_(grads, factor, found_inf)
        with torch.no_grad():
            for grad in grads:
                grad.masked_fill_(grad.isnan(), 0.0)


class ScaleFlushesSubnormals(Portable):
    fails = ("multiply_of_special_numbers",)

    def multiply_(self, grads, factor, found_inf=None):
        super().multiply_(grads, factor, found_inf)
        with torch.no_grad():
            for grad in grads:
                grad.masked_fill_(grad.abs() < torch.finfo(grad.dtype).tiny, 0.0)


class ScaleDividesByTheReciprocal(Portable):
    fails = ("multiply_works_in_float32_or_wider",)

    def multiply_(self, grads, factor, found_inf=None):
        super().multiply_(grads, 1 / (1 / factor), found_inf)


class ScaleStopsWhereTheFlagIsSet(Portable):
    fails = ("multiply_sets_the_flag_of_a_list",)

    def multiply_(self, grads, factor, found_inf=None):
        if found_inf is not None:
            factor = torch.where(found_inf.reshape(()) > 0, 1.0, factor.reshape(()))
        super().multiply_(grads, factor, found_inf)


class ScaleLooksAtDoublesAsFloats(Portable):
    fails = ("multiply_of_special_numbers",)

    def multiply_(self, grads, factor, found_inf=None):
        super().multiply_(grads, factor, found_inf)
        for grad in grads:
            if found_inf is not None and grad.dtype is torch.float64:
                found_inf.masked_fill_(~torch.isfinite(grad.float()).all(), 1.0)


class ScaleRaisesTheFlagToZero(Portable):
    fails = ("multiply_sets_the_flag_of_a_list",)

    def multiply_(self, grads, factor, found_inf=None):
        if found_inf is not None:
            found_inf.masked_fill_(found_inf < 0, 0.0)
        super().multiply_(grads, factor, found_inf)


class ScaleMendsAFlagOfNan(Portable):
    fails = ("multiply_sets_the_flag_of_a_list",)

    def multiply_(self, grads, factor, found_inf=None):
        if found_inf is not None:
            found_inf.masked_fill_(found_inf.isnan(), 0.0)
        super().multiply_(grads, factor, found_inf)


class ScaleLeavesAFlagOfNan(Portable):
    fails = ("multiply_sets_the_flag_of_a_list",)

    def multiply_(self, grads, factor, found_inf=None):
        before = None if found_inf is None else found_inf.clone()
        super().multiply_(grads, factor, found_inf)
        if found_inf is not None:
            found_inf.copy_(torch.where(before.isnan(), before, found_inf))


class ScaleKnowsNoFlagsOfTwoDimensions(Portable):
    fails = ("multiply_sets_the_flag_of_a_list",)

    def multiply_(self, grads, factor, found_inf=None):
        known = found_inf is not None and found_inf.dim() < 2
        super().multiply_(grads, factor, found_inf if known else None)


class ScaleKnowsNoFactorsOfTwoDimensions(Portable):
    fails = ("multiply_sets_the_flag_of_a_list",)

    def multiply_(self, grads, factor, found_inf=None):
        super().multiply_(grads, factor if factor.dim() < 2 else torch.ones(()), found_inf)
