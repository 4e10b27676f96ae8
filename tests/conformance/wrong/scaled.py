"""Products of quantised matrices, wrong in one plausible way each; `fails` names the checks."""

from __future__ import annotations

from dataclasses import replace

import torch

from amp_core.kernels import ScaledProducts
from amp_core.testing import Loopback

EVERY = ("quantize_follows_every_recipe",)
SPECIAL = ("quantize_of_zeros_inf_and_nan",)


class Multiplier(Loopback):
    def scaled_products(self):
        backend = self

        class Products(ScaledProducts):
            def why_emulated(self, *args, **kwargs):
                return ""

            def multiply(self, a, b, accumulate):
                return backend.product(super().multiply, a, b, accumulate)

        return Products()


class ScaledSumsInBfloat16(Multiplier):
    fails = EVERY

    def product(self, multiply, a, b, accumulate):
        return multiply(a, b, torch.bfloat16).to(accumulate)


class ScaledForgetsTheSecondScale(Multiplier):
    fails = EVERY

    def product(self, multiply, a, b, accumulate):
        return multiply(replace(a, tensor_scale=None), b, accumulate)


class ScaledPadsTheColumns(Multiplier):
    fails = EVERY

    def product(self, multiply, a, b, accumulate):
        return torch.nn.functional.pad(multiply(a, b, accumulate), (0, -b.shape[-1] % 16))


class ScaledHidesNan(Multiplier):
    fails = SPECIAL

    def product(self, multiply, a, b, accumulate):
        return multiply(a, b, accumulate).nan_to_num()


class ScaledTakesNoBatches(Multiplier):
    fails = SPECIAL

    def product(self, multiply, a, b, accumulate):
        return multiply(a, b, accumulate) if len(a.shape) == 2 else multiply(a, b, accumulate)[:1]


class ScaledRotatesOneBack(Multiplier):
    fails = EVERY

    def product(self, multiply, a, b, accumulate):
        if a.quantization.hadamard is not None:
            return a.dequantize(accumulate, rotated=True) @ b.dequantize(accumulate)
        return multiply(a, b, accumulate)


class ScaledHasNoReason(Loopback):
    fails = ("quantize_refuses_what_it_cannot_take",)

    def scaled_products(self):
        class Products(ScaledProducts):
            def why_emulated(self, *args, **kwargs):
                return None

        return Products()


class ScaledReadsAScale(Multiplier):
    fails = ("kernels_do_not_wait_for_the_device",)

    def product(self, multiply, a, b, accumulate):
        a.scale.sum().item()
        return multiply(a, b, accumulate)
