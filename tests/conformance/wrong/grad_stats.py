"""Reads of gradients, wrong in one plausible way each; `fails` names the checks that must say so."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from amp_core.kernels import GradStats, Portable


def changed(found: GradStats, **fields) -> GradStats:
    return replace(found, **fields)


def tail(t):
    return t.reshape(-1)[: t.numel() // 8 * 8 or t.numel()]


class MeasureSkipsTheVectorTail(Portable):
    fails = ("grad_stats_flags_a_bad_element_at_every_position",)

    def grad_stats(self, grads, norm_type=2.0):
        found = super().grad_stats(grads, norm_type)
        bad = super().grad_stats([tail(g) for g in grads], norm_type)
        return changed(found, nonfinite=bad.nonfinite, found_inf=bad.found_inf)


class MeasureSumsTheFlags(Portable):
    fails = ("grad_stats_of_mixed_lists",)

    def grad_stats(self, grads, norm_type=2.0):
        found = super().grad_stats(grads, norm_type)
        return changed(found, found_inf=found.nonfinite.sum())


class MeasureClearsTheFlagByLaterGroup(Portable):
    fails = ("grad_stats_of_mixed_lists",)

    def grad_stats(self, grads, norm_type=2.0):
        found = super().grad_stats(grads, norm_type)
        last = [i for i, g in enumerate(grads) if g.dtype is grads[-1].dtype] if grads else []
        return changed(found, found_inf=found.nonfinite[last].max()) if grads else found


class MeasureTakesTheFlagFromTheSquares(Portable):
    fails = ("grad_stats_of_large_and_small_numbers",)

    def grad_stats(self, grads, norm_type=2.0):
        found = super().grad_stats(grads, norm_type)
        bad = torch.tensor([0.0] * len(grads))
        for i, g in enumerate(grads):
            bad[i] = (~torch.isfinite((g.abs().float() ** 2).sum())).float()
        return changed(found, nonfinite=bad, found_inf=bad.max()) if grads else found


class MeasureTakesTheFlagFromTheNorm(Portable):
    fails = ("grad_stats_of_large_and_small_numbers",)

    def grad_stats(self, grads, norm_type=2.0):
        found = super().grad_stats(grads, norm_type)
        return changed(found, found_inf=(~torch.isfinite(found.norm)).float())


class MeasureOverlooksNan(Portable):
    fails = ("grad_stats_flags_each_kind_of_bad_element_alone",)

    def grad_stats(self, grads, norm_type=2.0):
        clean = [torch.where(g.isnan(), torch.ones_like(g), g) for g in grads]
        found, bad = super().grad_stats(grads, norm_type), super().grad_stats(clean, norm_type)
        return changed(found, nonfinite=bad.nonfinite, found_inf=bad.found_inf)


class MeasureOverlooksMinusInf(Portable):
    fails = ("grad_stats_flags_each_kind_of_bad_element_alone",)

    def grad_stats(self, grads, norm_type=2.0):
        if any(g.is_complex() for g in grads):
            return super().grad_stats(grads, norm_type)
        clean = [torch.where(g == -math.inf, torch.ones_like(g), g) for g in grads]
        found, bad = super().grad_stats(grads, norm_type), super().grad_stats(clean, norm_type)
        return changed(found, nonfinite=bad.nonfinite, found_inf=bad.found_inf)


class MeasureSumsInTheDtypeOfTheGradient(Portable):
    fails = ("grad_stats_of_large_and_small_numbers",)

    def grad_stats(self, grads, norm_type=2.0):
        found = super().grad_stats(grads, norm_type)
        norms = [(g * g).sum(dtype=g.dtype).sqrt().float() for g in grads]
        return changed(found, norms=torch.stack(norms), norm=torch.stack(norms).norm()) if grads else found


class MeasureSquaresInFloat32(Portable):
    fails = ("grad_stats_of_large_and_small_numbers",)

    def grad_stats(self, grads, norm_type=2.0):
        found = super().grad_stats(grads, norm_type)
        if not grads or norm_type != 2.0:
            return found
        total = sum((g.abs().float() ** 2).sum() for g in grads).sqrt()
        return changed(found, norm=torch.where(torch.isinf(total), found.norm, total.to(found.norm.dtype)))


class MeasureIgnoresTheOrder(Portable):
    fails = ("grad_stats_norms_of_every_dtype_and_order",)

    def grad_stats(self, grads, norm_type=2.0):
        return super().grad_stats(grads, 2.0)


class MeasureReordersByDtype(Portable):
    fails = ("grad_stats_of_mixed_lists",)

    def grad_stats(self, grads, norm_type=2.0):
        return super().grad_stats(sorted(grads, key=lambda g: str(g.dtype)), norm_type)


class MeasureReadsTheNeighbours(Portable):
    fails = ("grad_stats_of_every_memory_layout",)

    def grad_stats(self, grads, norm_type=2.0):
        whole = [
            torch.as_strided(g, (g.numel() + 1,), (1,), g.storage_offset())
            if (g.storage_offset() + g.numel() + 1) * g.element_size() <= g.untyped_storage().nbytes()
            and g.storage_offset()
            else g
            for g in grads
        ]
        return super().grad_stats(whole, norm_type)


class MeasureRepairsTheGradients(Portable):
    fails = ("grad_stats_of_every_memory_layout",)

    def grad_stats(self, grads, norm_type=2.0):
        found = super().grad_stats(grads, norm_type)
        for g in grads:
            g.detach().nan_to_num_()
        return found


class MeasureWritesTheSameBack(Portable):
    fails = ("grad_stats_of_every_memory_layout",)

    def grad_stats(self, grads, norm_type=2.0):
        for g in grads:
            g.detach().mul_(1.0)
        return super().grad_stats(grads, norm_type)


class MeasureReusesItsFlag(Portable):
    fails = ("grad_stats_results_are_the_callers_own",)

    flag = torch.zeros(())

    def grad_stats(self, grads, norm_type=2.0):
        found = super().grad_stats(grads, norm_type)
        self.flag.copy_(found.found_inf)
        return changed(found, found_inf=self.flag)


class MeasureFailsOnNothing(Portable):
    fails = ("grad_stats_of_nothing",)

    def grad_stats(self, grads, norm_type=2.0):
        assert grads, "no gradients"
        return super().grad_stats(grads, norm_type)


class MeasureLooksAtTheRealPart(Portable):
    fails = ("grad_stats_of_every_memory_layout",)

    def grad_stats(self, grads, norm_type=2.0):
        return super().grad_stats([g.real for g in grads], norm_type)


class MeasureReadsTheFlag(Portable):
    fails = ("kernels_do_not_wait_for_the_device",)

    def grad_stats(self, grads, norm_type=2.0):
        found = super().grad_stats(grads, norm_type)
        found.found_inf.item()
        return found


class MeasureFlagIsBool(Portable):
    fails = ("grad_stats_of_every_memory_layout",)

    def grad_stats(self, grads, norm_type=2.0):
        found = super().grad_stats(grads, norm_type)
        return changed(found, nonfinite=found.nonfinite.bool())


class MeasureLooksAtTheFirstThousand(Portable):
    fails = ("kernels_of_thousands_of_tensors",)

    def grad_stats(self, grads, norm_type=2.0):
        found = super().grad_stats(grads, norm_type)
        return changed(found, found_inf=found.nonfinite[:1000].max()) if grads else found


class MeasureOverlooksScalars(Portable):
    fails = ("grad_stats_of_every_memory_layout",)

    def grad_stats(self, grads, norm_type=2.0):
        found = super().grad_stats(grads, norm_type)
        return changed(found, found_inf=found.found_inf * float(any(g.dim() for g in grads)))


class MeasureSharesItsParts(Portable):
    fails = ("grad_stats_of_every_memory_layout",)

    def grad_stats(self, grads, norm_type=2.0):
        found = super().grad_stats(grads, norm_type)
        return replace(found, norm=found.norms[0]) if len(grads) == 1 else found
