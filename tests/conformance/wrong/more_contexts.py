"""Wrong on streams, subclasses and fake tensors; `fails` names the checks that must say so."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor

from amp_core.kernels import Portable, ScaledProducts
from amp_core.testing import Loopback

STREAM = ("kernels_on_a_stream_that_is_not_the_default_one",)
SUBCLASS, FAKE = ("kernels_of_subclasses_of_tensor",), ("kernels_on_fake_tensors",)


def _is_default():
    return torch.cpu.current_stream() is torch.cpu._default_cpu_stream


def _refuse(*tensors):
    if any(isinstance(t, FakeTensor) for t in tensors):
        raise RuntimeError("no address")


class UpdatesNoFakeScale(Portable):
    fails = FAKE

    def update_scale_(self, state, found_inf, schedule):
        _refuse(found_inf)
        super().update_scale_(state, found_inf, schedule)


class SplitsNoFakeWeights(Portable):
    fails = FAKE

    def split_(self, wides, lows, kept):
        _refuse(*wides)
        super().split_(wides, lows, kept)


class JoinsNoFakeWeights(Portable):
    fails = FAKE

    def join_(self, wides, lows, kept):
        _refuse(*wides)
        super().join_(wides, lows, kept)


class RoundsNoFakeWeights(Portable):
    fails = FAKE

    def round_(self, wides, lows, keys, numbers):
        _refuse(*wides)
        super().round_(wides, lows, keys, numbers)


class MultipliesNothingFake(Loopback):
    fails = FAKE

    class Products(ScaledProducts):
        def multiply(self, a, b, accumulate):
            _refuse(a.values)
            return super().multiply(a, b, accumulate)

    products = Products()

    def scaled_products(self):
        return self.products
