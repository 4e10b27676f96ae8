"""Quantisers, wrong in one plausible way each; `fails` names the checks that must say so."""

from __future__ import annotations

from dataclasses import replace

import torch

from amp_core.kernels import Portable

RECIPES = ("quantize_follows_every_recipe",)
TIES = ("quantize_rounds_ties_to_even_and_saturates",)
SPECIAL = ("quantize_of_zeros_inf_and_nan",)


class Quantizer(Portable):
    def quantize(self, tensor, quantization, dim=-1, **options):
        result = super().quantize(self.before(tensor), self.how(quantization), dim, **options)
        return self.after(replace(result, quantization=quantization))

    def before(self, tensor):
        return tensor

    def how(self, quantization):
        return quantization

    def after(self, result):
        return result


class QuantizeRoundsTiesAway(Quantizer):
    fails = TIES

    def before(self, tensor):
        return tensor * (1 + 2.0**-22)


class QuantizeReadsBfloat16(Quantizer):
    fails = RECIPES

    def before(self, tensor):
        return tensor.to(torch.bfloat16)


class QuantizeLetsInfSaturate(Quantizer):
    fails = SPECIAL

    def before(self, tensor):
        return tensor.clamp(-1e4, 1e4)


class QuantizeClampsInPlace(Quantizer):
    fails = SPECIAL

    def before(self, tensor):
        return tensor.nan_to_num_() if tensor.is_floating_point() else tensor


class QuantizeRoundsScalesUp(Quantizer):
    fails = RECIPES

    def how(self, quantization):
        return replace(quantization, scale="e8m0_up") if quantization.scale == "e8m0" else quantization


class QuantizeLeavesOutTheTransform(Quantizer):
    fails = RECIPES

    def how(self, quantization):
        return replace(quantization, hadamard=None)


class QuantizeRoundsGradientsToNearest(Quantizer):
    fails = ("quantize_repeats_itself",)

    def how(self, quantization):
        return replace(quantization, rounding="nearest")


class QuantizeHasNoScaleForZeros(Quantizer):
    fails = SPECIAL

    def after(self, result):
        if result.is_packed:
            return result
        return replace(result, scale=torch.where(result.amax == 0, torch.nan, result.scale))


class QuantizeCountsNanAsInf(Quantizer):
    fails = SPECIAL

    def after(self, result):
        return replace(result, counts=result.counts[[1, 0, 2, 3]])


class QuantizeCountsZerosAsFlushed(Quantizer):
    fails = RECIPES

    def after(self, result):
        zeros = result.counts.new_tensor([0, 0, 0, 1])
        return replace(result, counts=result.counts + zeros)


class QuantizeCountsInInt32(Quantizer):
    fails = RECIPES

    def after(self, result):
        return replace(result, counts=result.counts.int())


class QuantizeForgetsTheGivenAmax(Portable):
    fails = TIES

    def quantize(self, tensor, quantization, dim=-1, *, seed=None, amax=None, packed=False):
        if amax is not None:
            amax = torch.zeros_like(amax)
        return super().quantize(tensor, quantization, dim, seed=seed, amax=amax, packed=packed)


class QuantizeDrawsAnew(Portable):
    fails = ("quantize_repeats_itself",)

    def quantize(self, tensor, quantization, dim=-1, *, seed=None, **options):
        fresh = None if seed is None else int(torch.randint(2**60, ()))
        return super().quantize(tensor, quantization, dim, seed=fresh, **options)


class QuantizeTakesAnyDimension(Portable):
    fails = ("quantize_refuses_what_it_cannot_take",)

    def quantize(self, tensor, quantization, dim=-1, **options):
        return super().quantize(tensor, quantization, -1 if dim > 1 else dim, **options)


class QuantizeNeverPacks(Portable):
    fails = RECIPES

    def quantize(self, tensor, quantization, dim=-1, *, packed=False, **options):
        return super().quantize(tensor, quantization, dim, **options)


class QuantizeSharesWhatItIsGiven(Portable):
    fails = ("quantize_repeats_itself",)

    def quantize(self, tensor, quantization, dim=-1, **options):
        self.given = tensor
        super().quantize(tensor, quantization, dim, **options)
        return super().quantize(self.given, quantization, dim, **options)


class QuantizeCountsOnTheDefaultDevice(Quantizer):
    fails = ("quantize_repeats_itself",)

    def after(self, result):
        return replace(result, counts=result.counts + torch.zeros(4, dtype=torch.int64))


class QuantizeReadsTheValues(Quantizer):
    fails = ("quantize_repeats_itself",)

    def after(self, result):
        return result if float(result.values.sum()) != 1e30 else replace(result, dim=-1)


class QuantizerOfArguments(Portable):
    """Hands other arguments on."""

    def quantize(self, tensor, quantization, dim=-1, *, seed=None, amax=None, packed=False):
        tensor, seed, amax = self.other(tensor, seed, amax)
        return super().quantize(tensor, quantization, dim, seed=seed, amax=amax, packed=packed)

    def other(self, tensor, seed, amax):
        return tensor, seed, amax


class QuantizeDropsTheSignOfASeed(QuantizerOfArguments):
    fails = ("quantize_repeats_itself",)

    def other(self, tensor, seed, amax):
        return tensor, abs(seed) if isinstance(seed, int) else seed, amax


class QuantizeClampsSeeds(QuantizerOfArguments):
    fails = ("quantize_repeats_itself",)

    def other(self, tensor, seed, amax):
        return tensor, min(seed, 2**63 - 1) if isinstance(seed, int) else seed, amax


class QuantizeReadsHalfOfATensorSeed(QuantizerOfArguments):
    fails = ("quantize_repeats_itself",)

    def other(self, tensor, seed, amax):
        return tensor, seed & 0xFFFFFFFF if isinstance(seed, torch.Tensor) else seed, amax


class QuantizeRoundsDoublesToOdd(QuantizerOfArguments):
    fails = RECIPES

    def other(self, tensor, seed, amax):
        if tensor.dtype is not torch.float64:
            return tensor, seed, amax
        near = tensor.float()
        odd = (near.view(torch.int32) | (near != tensor).int()).view(torch.float32)
        return odd, seed, amax


class QuantizeClampsDoubles(QuantizerOfArguments):
    fails = RECIPES

    def other(self, tensor, seed, amax):
        top = torch.finfo(torch.float32).max
        return tensor.clamp(-top, top) if tensor.dtype is torch.float64 else tensor, seed, amax


class QuantizeDropsTheSignOfAmax(QuantizerOfArguments):
    fails = RECIPES

    def other(self, tensor, seed, amax):
        return tensor, seed, None if amax is None else amax.abs()


class QuantizeReadsOneAmax(QuantizerOfArguments):
    fails = RECIPES

    def other(self, tensor, seed, amax):
        first = None if amax is None else amax.reshape(-1)[:1].expand(amax.numel()).reshape(amax.shape)
        return tensor, seed, first


class QuantizeTrustsAGivenAmax(QuantizerOfArguments):
    fails = RECIPES

    def other(self, tensor, seed, amax):
        given = amax is not None and bool((amax > 0).all())
        return tensor.nan_to_num() if given else tensor, seed, amax


class QuantizeWaitsForAGivenAmax(QuantizerOfArguments):
    fails = ("kernels_do_not_wait_for_the_device",)

    def other(self, tensor, seed, amax):
        return tensor, seed, None if amax is None or bool((amax <= 0).all()) else amax


class QuantizeTakesMatricesForBlocks(Portable):
    fails = RECIPES

    def quantize(self, tensor, quantization, dim=-1, **options):
        of_rows = (
            not isinstance(quantization.granularity, str) and dim % max(tensor.dim(), 1) < tensor.dim() - 2
        )
        quantized = super().quantize(tensor, quantization, dim, **options)
        return replace(quantized, scale=quantized.scale.roll(1)) if of_rows else quantized


def quantize_where(case, read):
    """Return kernels that quantise ``read(tensor)`` where `case` holds."""

    class Quantizes(Portable):
        fails = ("quantize_follows_every_recipe",)

        def quantize(self, tensor, quantization, dim=-1, **options):
            return super().quantize(read(tensor) if case(tensor) else tensor, quantization, dim, **options)

    return Quantizes


def _refuse(tensor):
    raise RuntimeError("no such tensor")


def _flush(t):
    return torch.where(t.abs() < torch.finfo(t.dtype).tiny, t * 0, t)


QuantizeWithoutSmallNumbers = quantize_where(lambda t: t.dtype is torch.float16, _flush)
QuantizeOfNoGraph = quantize_where(lambda t: t.grad_fn is not None, _refuse)
QuantizeOfNoInferenceTensor = quantize_where(lambda t: t.is_inference(), _refuse)
QuantizeWithoutTheSign = quantize_where(lambda t: t.is_neg(), lambda t: -t)
QuantizeOfManyRows = quantize_where(lambda t: t.dim() > 1 and len(t) > 1000, lambda t: t * 2)


class QuantizeKeepsTheSeed(QuantizerOfArguments):
    fails = ("quantize_repeats_itself",)
    known = {}  # noqa: RUF012

    def other(self, tensor, seed, amax):
        kept = self.known.setdefault(id(seed), seed.clone()) if isinstance(seed, torch.Tensor) else seed
        return tensor, kept, amax


class QuantizeWritesTheAmax(QuantizerOfArguments):
    fails = RECIPES

    def other(self, tensor, seed, amax):
        return tensor, seed, None if amax is None else amax.mul_(1.0)


QuantizeOfManyDimensions = quantize_where(lambda t: t.dim() > 4, lambda t: t * 2)
