"""Memory layouts, read or written wrongly; `fails` names the checks that must say so."""

from __future__ import annotations

import torch

from amp_core.kernels import Portable

CAST, INTO = ("cast_of_every_memory_layout",), ("cast_into_every_memory_layout",)
ADD, SCALE = ("add_of_every_memory_layout",), ("multiply_of_every_memory_layout",)
MEASURE, VIEWS = ("grad_stats_of_every_memory_layout",), ("kernels_tell_views_of_one_storage_apart",)


def memory(t):
    return torch.as_strided(t.detach(), (t.untyped_storage().nbytes() // t.element_size(),), (1,), 0)


def as_if_dense(t):
    """Return what a kernel reads that starts at the first element and goes on, whatever the strides."""
    if not t.numel():
        return t
    whole = memory(t)
    return whole[(t.storage_offset() + torch.arange(t.numel())) % len(whole)].view(t.shape)


class CastOfFiveDimensionsIsContiguous(Portable):
    fails = CAST

    def cast(self, tensors, dtype, out=None):
        results = super().cast(tensors, dtype, out)
        return results if out is not None else [r.contiguous() if r.dim() == 5 else r for r in results]


class CastScramblesATransposedSource(Portable):
    fails = INTO

    def cast(self, tensors, dtype, out=None):
        if out is not None:
            pairs = zip(tensors, out, strict=True)
            tensors = [as_if_dense(t) if t.dim() == 2 and o.is_contiguous() else t for t, o in pairs]
        return super().cast(tensors, dtype, out)


class CastReadsExpandedAsDense(Portable):
    fails = CAST

    def cast(self, tensors, dtype, out=None):
        return super().cast([as_if_dense(t) if 0 in t.stride() else t for t in tensors], dtype, out)


class MeasureReadsExpandedAsDense(Portable):
    fails = MEASURE

    def grad_stats(self, grads, norm_type=2.0):
        return super().grad_stats([as_if_dense(g) if 0 in g.stride() else g for g in grads], norm_type)


class AddReadsExpandedAsDense(Portable):
    fails = ADD

    def add_(self, totals, grads):
        super().add_(totals, [as_if_dense(g) if 0 in g.stride() else g for g in grads])


class CastTakesTheSignOfMemory(Portable):
    fails = CAST

    def cast(self, tensors, dtype, out=None):
        return super().cast([torch._neg_view(t) if t.is_neg() else t for t in tensors], dtype, out)


class AddTakesTheSignOfMemory(Portable):
    fails = ADD

    def add_(self, totals, grads):
        super().add_(totals, [torch._neg_view(g) if g.is_neg() else g for g in grads])


class ScaleWritesTheSignOfMemory(Portable):
    fails = SCALE

    def multiply_(self, grads, factor, found_inf=None):
        super().multiply_(grads, factor, found_inf)
        for grad in grads:
            if grad.is_neg() or grad.is_conj():
                other = torch._neg_view(grad.detach()) if grad.is_neg() else grad.detach().conj()
                grad.detach().copy_(other.clone())


class MeasureTakesTheMaximumForTheInfNorm(Portable):
    fails = MEASURE

    def grad_stats(self, grads, norm_type=2.0):
        if norm_type == torch.inf:
            grads = [g.clamp(min=0.0) if g.is_neg() and not g.is_complex() else g for g in grads]
        return super().grad_stats(grads, norm_type)


class CastDropsStridesBeyondFour(Portable):
    fails = CAST

    def cast(self, tensors, dtype, out=None):
        if out is not None:
            return super().cast(tensors, dtype, out)
        results = super().cast([as_if_dense(t) if t.dim() > 4 else t for t in tensors], dtype)
        return [
            torch.empty_like(t, dtype=dtype).detach().copy_(r) for t, r in zip(tensors, results, strict=True)
        ]


class CastDropsStridesBeyondEight(Portable):
    fails = CAST

    def cast(self, tensors, dtype, out=None):
        if out is not None:
            return super().cast(tensors, dtype, out)
        results = super().cast([as_if_dense(t) if t.dim() > 8 else t for t in tensors], dtype)
        return [
            torch.empty_like(t, dtype=dtype).detach().copy_(r) for t, r in zip(tensors, results, strict=True)
        ]


class ScaleWorksOnACopyOfChannelsLast(Portable):
    fails = SCALE

    def multiply_(self, grads, factor, found_inf=None):
        copies = [g if g.dim() != 4 or g.is_contiguous() else g.detach().contiguous() for g in grads]
        super().multiply_(copies, factor, found_inf)


class ScaleWritesTheWholeLastVector(Portable):
    fails = VIEWS

    def multiply_(self, grads, factor, found_inf=None):
        whole = []
        for g in grads:
            end, size = g.storage_offset() + (g.numel() + 7) // 8 * 8, len(memory(g)) if g.numel() else 0
            fits = g.dim() == 1 and g.is_contiguous() and g.numel() and end <= size
            whole.append(torch.as_strided(g.detach(), (end - g.storage_offset(),), (1,)) if fits else g)
        super().multiply_(whole, factor, found_inf)


class AddWritesTheWholeLastVector(Portable):
    fails = VIEWS

    def add_(self, totals, grads):
        super().add_(totals, grads)
        for t in totals:
            if t.dim() == 1 and t.is_contiguous() and t.numel() % 8 and t.numel():
                memory(t)[t.storage_offset() + t.numel() :][:1].mul_(2.0)


class MeasureReadsGaps(Portable):
    fails = MEASURE

    def grad_stats(self, grads, norm_type=2.0):
        dense = [as_if_dense(g) if g.dim() and not g.is_complex() and g.stride(-1) == 2 else g for g in grads]
        return super().grad_stats(dense, norm_type)


class ScaleReadsPaddedRowsAsDense(Portable):
    fails = SCALE

    def multiply_(self, grads, factor, found_inf=None):
        flat = [
            g.detach().as_strided(g.shape, torch.empty(g.shape).stride())
            if g.dim() == 2 and g.numel() and g.stride(0) > g.shape[1] and g.stride(1) == 1
            else g
            for g in grads
        ]
        super().multiply_(flat, factor, found_inf)


class CastLosesConjugatesOfOut(Portable):
    fails = INTO

    def cast(self, tensors, dtype, out=None):
        if out is None:
            return super().cast(tensors, dtype)
        super().cast(tensors, dtype, [torch._neg_view(o) if o.is_neg() else o for o in out])
        return list(out)


class PrepareKeepsAddressesOfCopies(Portable):
    fails = SCALE

    def prepare(self, tensors, layout=None):
        return [t if t.is_contiguous() else t.detach().contiguous() for t in tensors]


class ScaleTakesViewsOfOneStorageForOne(Portable):
    fails = VIEWS

    def multiply_(self, grads, factor, found_inf=None):
        storages = {g.untyped_storage().data_ptr(): g for g in reversed(grads)}
        super().multiply_(list(storages.values()), factor, found_inf)


class AddTakesViewsOfOneStorageForOne(Portable):
    fails = VIEWS

    def add_(self, totals, grads):
        storages = {t.untyped_storage().data_ptr(): (t, g) for t, g in zip(totals, grads, strict=True)}
        super().add_(*zip(*storages.values(), strict=True)) if storages else None


class CastTakesOneAddressForOneTensor(Portable):
    fails = VIEWS

    def cast(self, tensors, dtype, out=None):
        results = super().cast(tensors, dtype, out)
        first = {}
        for t, r in zip(tensors, results, strict=True):
            first.setdefault((t.data_ptr(), t.numel()), r)
        if out is not None:
            return results
        return [first[t.data_ptr(), t.numel()].view(t.shape) for t in tensors]


class MeasureTakesOneAddressForOneTensor(Portable):
    fails = VIEWS

    def grad_stats(self, grads, norm_type=2.0):
        first = {}
        for g in grads:
            first.setdefault(g.data_ptr(), g)
        return super().grad_stats([first[g.data_ptr()] for g in grads], norm_type)


class CastGivesATensorThatIsTwiceInAListOneResult(Portable):
    fails = VIEWS

    def cast(self, tensors, dtype, out=None):
        results = super().cast(tensors, dtype, out)
        if out is not None:
            return results
        first = {}
        return [first.setdefault(id(t), r) for t, r in zip(tensors, results, strict=True)]
