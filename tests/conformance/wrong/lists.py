"""Wrong for lists of some length or mixture, for many elements, or where sources are targets."""

from __future__ import annotations

from dataclasses import replace

import torch

from amp_core.kernels import Portable

LONG = ("kernels_of_thousands_of_tensors",)
LARGE = ("kernels_of_a_large_tensor",)
SHORT = ("kernels_of_no_tensors",)
ALIASED = ("kernels_tell_views_of_one_storage_apart",)


def lost(results, is_lost):
    for i, result in enumerate(results):
        if is_lost(i, result):
            result.detach().zero_()
    return results


def mixed(tensors):
    return len({t.dtype for t in tensors}) > 1


class CastsTheSecondParameterOfThree(Portable):
    fails = SHORT

    def cast(self, tensors, dtype, out=None):
        alone = len(tensors) == 3 and all(isinstance(t, torch.nn.Parameter) for t in tensors)
        return lost(super().cast(tensors, dtype, out), lambda i, _: alone and i == 1)


class CastsAllButTheEndOfAWholeBlock(Portable):
    fails = SHORT

    def cast(self, tensors, dtype, out=None):
        results = super().cast(tensors, dtype, out)
        lost([r.detach().view(-1)[-1:] for r in results if r.dim() == 1 and len(r) in (1024, 2048)], bool)
        return results


class CutsLongLists(Portable):
    def cut(self, stats, grads, norm_type):
        """Return the fields of `stats` that are wrong, and how."""
        raise NotImplementedError

    def grad_stats(self, grads, norm_type=2.0):
        stats = super().grad_stats(grads, norm_type)
        return replace(stats, **self.cut(stats, grads, norm_type)) if len(grads) > 1000 else stats


class MeasuresMixedListsInOneChunk(CutsLongLists):
    fails = LONG

    def cut(self, stats, grads, norm_type):
        return {"found_inf": stats.nonfinite[:512].amax()} if mixed(grads) else {}


class MultipliesMixedListsInOneChunk(Portable):
    fails = LONG

    def multiply_(self, grads, factor, found_inf=None):
        super().multiply_(grads[:512] if mixed(grads) else grads, factor, found_inf)


class MultipliesAsManyHalvesAsAGridHas(Portable):
    fails = LARGE

    def multiply_(self, grads, factor, found_inf=None):
        halves = [g for g in grads if g.numel() > 1 << 16 and g.itemsize == 2]
        kept = [g.detach().reshape(-1)[1 << 16 :].clone() for g in halves]
        super().multiply_(grads, factor, found_inf)
        for grad, rest in zip(halves, kept, strict=True):
            grad.detach().view(-1)[1 << 16 :] = rest


class SumsAMillionOfTheFirstOrder(Portable):
    fails = LARGE

    def grad_stats(self, grads, norm_type=2.0):
        cut = norm_type == 1.0 and any(g.numel() > 1 << 20 for g in grads)
        return super().grad_stats(
            [g.detach().view(-1)[: 1 << 20] for g in grads] if cut else grads, norm_type
        )


class ClearsTargetsFirst(Portable):
    fails = ALIASED

    def cast(self, tensors, dtype, out=None):
        for tensor, target in zip(tensors, out or (), strict=False):
            if tensor is target:
                target.detach().zero_()
        return super().cast(tensors, dtype, out)


class AddsNothingToItself(Portable):
    fails = ALIASED

    def add_(self, totals, grads):
        if not any(total is grad for total, grad in zip(totals, grads, strict=False)):
            super().add_(totals, grads)


class AddsAgainAfterARefusal(Portable):
    fails = ("add_refuses_other_shapes_before_it_writes",)
    refused = False

    def add_(self, totals, grads):
        try:
            super().add_(totals, grads)
        except ValueError:
            self.refused = True
            raise
        if self.refused:
            self.refused = False
            super().add_(totals, grads)


class SplitsTheFirstOfAList(Portable):
    fails = ("storage_splits_and_joins_as_the_reference",)

    def split_(self, wides, lows, kept):
        super().split_(wides, lows, kept)
        lost(lows, lambda i, _: i > 0)


class LosesFlagsOfAnotherShape(Portable):
    fails = ("multiply_sets_the_flag_of_a_list",)

    def multiply_(self, grads, factor, found_inf=None):
        unlike = found_inf is not None and found_inf.shape != factor.shape
        super().multiply_(grads, factor, None if unlike else found_inf)


class NeedsMoreThanHalfAFlag(Portable):
    fails = ("update_reads_any_positive_flag",)

    def update_scale_(self, state, found_inf, schedule):
        super().update_scale_(state, (found_inf > 0.5).float(), schedule)


class QuantizesAThousandBlocks(Portable):
    fails = ("quantize_follows_every_recipe",)

    def quantize(self, tensor, quantization, dim=-1, **options):
        quantized = super().quantize(tensor, quantization, dim, **options)
        if tensor.numel() > 1 << 16 and not quantized.is_packed:
            quantized.values.view(-1)[1 << 16 :] = 0
        return quantized


class MeasuresAThousandOfTheThirdOrder(CutsLongLists):
    fails = LONG

    def cut(self, stats, grads, norm_type):
        norms = torch.cat([stats.norms[:1000], torch.zeros_like(stats.norms[1000:])])
        return {"norms": norms} if norm_type == 3.0 else {}


class MeasuresTheLargestOfAThousand(CutsLongLists):
    fails = LONG

    def cut(self, stats, grads, norm_type):
        return {"norm": stats.norms[:1000].amax()} if norm_type == torch.inf else {}


class SumsAThousandOfTheFirstOrder(CutsLongLists):
    fails = LONG

    def cut(self, stats, grads, norm_type):
        return {"norm": stats.norms[:1000].sum()} if norm_type == 1.0 else {}


class FlagsAThousandOfTheThirdOrder(CutsLongLists):
    fails = LONG

    def cut(self, stats, grads, norm_type):
        return {"found_inf": stats.nonfinite[:1000].amax()} if norm_type == 3.0 else {}


class FlagsNoTensorOfALongMixedList(CutsLongLists):
    fails = LONG

    def cut(self, stats, grads, norm_type):
        return {"nonfinite": stats.nonfinite * 0} if mixed(grads) else {}


class CastsAThousandToTheirOwnDtype(Portable):
    fails = LONG

    def cast(self, tensors, dtype, out=None):
        results = super().cast(tensors, dtype, out)
        return lost(results, lambda i, r: i > 1000 and r.dtype is tensors[i].dtype)


class SharesALongListOfTheirOwnDtype(Portable):
    fails = LONG

    def cast(self, tensors, dtype, out=None):
        results = super().cast(tensors, dtype, out)
        if out is None and len(tensors) > 1000:
            pairs = zip(tensors, results, strict=True)
            results = [t.detach() if t.dtype is dtype else r for t, r in pairs]
        return results


class AddsAThousandHalvesToWiderTotals(Portable):
    fails = LONG

    def add_(self, totals, grads):
        super().add_(totals, grads)
        lost(totals, lambda i, t: i > 1000 and grads[i].dtype is torch.float16 is not t.dtype)


class MultipliesAThousandOfMixedDtypes(Portable):
    fails = LONG

    def multiply_(self, grads, factor, found_inf=None):
        super().multiply_(grads, factor, found_inf)
        if mixed(grads):
            lost(grads, lambda i, _: i == 1024)


class LooksAtAThousandOfMixedDtypes(Portable):
    fails = LONG

    def multiply_(self, grads, factor, found_inf=None):
        super().multiply_(grads[:1000] if mixed(grads) else grads, factor, found_inf)
        if mixed(grads):
            super().multiply_(grads[1000:], factor)
