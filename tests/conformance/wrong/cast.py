"""Casts, wrong in one plausible way each; `fails` names the checks that must say so."""

from __future__ import annotations

import math

import torch

from amp_core.kernels import Portable


class CastCutsTheVectorTail(Portable):
    fails = ("cast_of_every_memory_layout",)

    def cast(self, tensors, dtype, out=None):
        results = super().cast(tensors, dtype, out)
        for r in results:
            if r.dim() == 1 and r.numel() % 8:
                r.detach()[-(r.numel() % 8) :] = 0
        return results


class CastTruncatesToBfloat16(Portable):
    fails = ("cast_rounds_every_dtype_pair_to_nearest_even",)

    def cast(self, tensors, dtype, out=None):
        if out is None and dtype is torch.bfloat16:
            cut = [
                (t.contiguous().view(torch.int32) & -65536).view(torch.float32)
                if t.dtype is torch.float32 and t.numel()
                else t
                for t in tensors
            ]
            return super().cast(cut, dtype)
        return super().cast(tensors, dtype, out)


class CastSaturates(Portable):
    fails = (
        "cast_rounds_every_dtype_pair_to_nearest_even",
        "cast_keeps_nan_inf_and_signed_zero",
    )

    def cast(self, tensors, dtype, out=None):
        top = torch.finfo(dtype).max
        return super().cast([t.clamp(-top, top) if dtype.itemsize == 2 else t for t in tensors], dtype, out)


class CastMakesNanZero(Portable):
    fails = ("cast_keeps_nan_inf_and_signed_zero",)

    def cast(self, tensors, dtype, out=None):
        return super().cast([t.nan_to_num(0.0, math.inf, -math.inf) for t in tensors], dtype, out)


class CastLosesTheSignOfZero(Portable):
    fails = ("cast_keeps_nan_inf_and_signed_zero",)

    def cast(self, tensors, dtype, out=None):
        return super().cast([t + 0.0 if t.dtype.itemsize > 1 else t for t in tensors], dtype, out)


class CastFlushesSubnormals(Portable):
    fails = ("cast_is_exact_for_numbers_of_every_size",)

    def cast(self, tensors, dtype, out=None):
        results = super().cast(tensors, dtype, out)
        for r in results:
            if r.dtype.itemsize > 1:
                r.detach()[r.detach().abs() < torch.finfo(r.dtype).tiny] = 0
        return results


class CastIgnoresStrides(Portable):
    fails = ("cast_of_every_memory_layout",)

    def cast(self, tensors, dtype, out=None):
        flat = [torch.as_strided(t, t.shape, torch.empty(t.shape).stride()) for t in tensors]
        return super().cast(flat, dtype, out)


class CastReordersByDtype(Portable):
    fails = ("cast_of_every_memory_layout",)

    def cast(self, tensors, dtype, out=None):
        if out is not None:
            return super().cast(tensors, dtype, out)
        return super().cast(sorted(tensors, key=lambda t: str(t.dtype)), dtype)


class CastReturnsCopiesOfOut(Portable):
    fails = ("cast_into_every_memory_layout",)

    def cast(self, tensors, dtype, out=None):
        return [r.clone() for r in super().cast(tensors, dtype, out)]


class CastWritesPastOut(Portable):
    fails = ("cast_into_every_memory_layout",)

    def cast(self, tensors, dtype, out=None):
        results = super().cast(tensors, dtype, out)
        for o in out or []:
            size = o.untyped_storage().nbytes() // o.element_size()
            if o.storage_offset() + o.numel() < size and o.numel():
                torch.as_strided(o.detach(), (1,), (1,), o.storage_offset() + o.numel()).fill_(0)
        return results


class CastWritesBehindAutograd(Portable):
    fails = ("cast_into_every_memory_layout",)

    def cast(self, tensors, dtype, out=None):
        if out is None:
            return super().cast(tensors, dtype)
        for o, t in zip(out, tensors, strict=True):
            o.data.copy_(t)
        return list(out)


class CastReturnsTheInput(Portable):
    fails = ("cast_of_every_memory_layout",)

    def cast(self, tensors, dtype, out=None):
        if out is None:
            return [t.detach().to(dtype) for t in tensors]
        return super().cast(tensors, dtype, out)


class CastRecordsAGraph(Portable):
    fails = ("cast_of_every_memory_layout",)

    def cast(self, tensors, dtype, out=None):
        return (
            super().cast(tensors, dtype, out)
            if out is not None
            else [t.to(dtype, copy=True) for t in tensors]
        )


class CastZipsShort(Portable):
    fails = ("cast_refuses_an_out_of_other_shapes_before_it_writes",)

    def cast(self, tensors, dtype, out=None):
        return super().cast(tensors if out is None else tensors[: len(out)], dtype, out)


class CastRoundsOnTheWayToOut(Portable):
    fails = ("cast_into_every_memory_layout",)

    def cast(self, tensors, dtype, out=None):
        return super().cast(tensors if out is None else super().cast(tensors, dtype), dtype, out)


class CastLosesTheSecondChunk(Portable):
    fails = ("kernels_of_thousands_of_tensors",)

    def cast(self, tensors, dtype, out=None):
        results = super().cast(tensors, dtype, out)
        for r in results[512:]:
            r.detach().zero_()
        return results


class CastForgetsTheMemoryFormat(Portable):
    fails = ("cast_of_every_memory_layout",)

    def cast(self, tensors, dtype, out=None):
        if out is not None:
            return super().cast(tensors, dtype, out)
        return [t.contiguous() for t in super().cast(tensors, dtype)]


class CastHasRoomForFourThousand(Portable):
    fails = ("kernels_of_thousands_of_tensors",)

    def cast(self, tensors, dtype, out=None):
        return super().cast(tensors[:4096], dtype, out)


class CastMakesParameters(Portable):
    fails = ("cast_of_every_memory_layout",)

    def cast(self, tensors, dtype, out=None):
        results = super().cast(tensors, dtype, out)
        if out is None:
            for result, tensor in zip(results, tensors, strict=True):
                result.requires_grad_(tensor.requires_grad)
        return results


class CastAsksForVersions(Portable):
    fails = ("kernels_in_inference_mode",)

    def cast(self, tensors, dtype, out=None):
        self.seen = [t._version for t in tensors]
        return super().cast(tensors, dtype, out)


class CastOverlapsItsResults(Portable):
    fails = ("cast_of_every_memory_layout",)

    def cast(self, tensors, dtype, out=None):
        if out is not None or not all(t.dim() == 1 for t in tensors):
            return super().cast(tensors, dtype, out)
        results, start = [], 0
        room = torch.empty(sum(t.numel() for t in tensors), dtype=dtype)
        for tensor in tensors:
            results.append(room[start : start + tensor.numel()].copy_(tensor.detach()))
            start += tensor.numel() // 128 * 128 or tensor.numel()
        return results
