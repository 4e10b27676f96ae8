"""Products of quantised matrices, wrong in one plausible way each; `fails` names the checks."""

from __future__ import annotations

import time
import warnings
from dataclasses import replace

import torch
from torch import Tensor

from amp_core.kernels import ScaledProducts
from amp_core.testing import Loopback

EVERY = ("quantize_follows_every_recipe",)
CONTEXTS = ("quantize_repeats_itself",)
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


class ScaledKnowsNoBatches(Loopback):
    fails = ("quantize_refuses_what_it_cannot_take",)

    def scaled_products(self):
        class Products(ScaledProducts):
            def why_emulated(self, a, b, accumulate):
                return "it has none"

        return Products()


class ScaledTakesNoPlainTensors(Multiplier):
    fails = CONTEXTS

    def product(self, multiply, a, b, accumulate):
        return multiply(a, b, accumulate) if a.is_packed in (True, False) and b.scale.numel() else None


class ScaledSumsInTheDefaultDtype(Multiplier):
    fails = CONTEXTS

    def product(self, multiply, a, b, accumulate):
        return multiply(a, b, accumulate).to(torch.get_default_dtype())


class ScaledRecordsUnderGradMode(Multiplier):
    fails = CONTEXTS

    def product(self, multiply, a, b, accumulate):
        return multiply(a, b, accumulate).requires_grad_(torch.is_grad_enabled())


class ScaledIsKeptByAddress(Multiplier):
    fails = CONTEXTS

    def product(self, multiply, a, b, accumulate):
        self.known = vars(self).get("known", {})
        key = [id(t) for each in (a, b) for t in ([each] if isinstance(each, Tensor) else [each.values])]
        if self.known.get("key") != key:
            self.known = {"key": key, "result": multiply(a, b, accumulate)}
        return self.known["result"].clone()


class ScaledSharesItsOperands(Multiplier):
    fails = CONTEXTS

    def product(self, multiply, a, b, accumulate):
        self.given = a, b
        time.sleep(0)
        result = multiply(*self.given, accumulate)
        del a, b
        self.given = None, None
        return result


class ScaledKeepsItsResult(Multiplier):
    fails = EVERY

    def product(self, multiply, a, b, accumulate):
        self.last = multiply(a, b, accumulate)
        return self.last


class ScaledWritesItsOperand(Multiplier):
    fails = EVERY

    def product(self, multiply, a, b, accumulate):
        result = multiply(a, b, accumulate)
        a.scale.mul_(1.0)
        return result


class ScaledGrows(Multiplier):
    fails = ("kernels_need_no_more_memory_with_every_call",)

    def __init__(self):
        super().__init__()
        self.seen = []

    def product(self, multiply, a, b, accumulate):
        self.seen += [{number} for number in range(4)]
        return multiply(a, b, accumulate)


class ScaledWarnsEachTime(Multiplier):
    fails = ("hooks_say_nothing_once_they_have_run",)

    def product(self, multiply, a, b, accumulate):
        warnings.warn("it is emulated", stacklevel=2)
        return multiply(a, b, accumulate)
