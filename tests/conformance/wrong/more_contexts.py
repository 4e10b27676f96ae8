"""Wrong on streams, subclasses and fake tensors; `fails` names the checks that must say so."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor

from amp_core.kernels import Portable, ScaledProducts
from amp_core.plugin import Availability
from amp_core.testing import Loopback

STREAM = ("kernels_on_a_stream_that_is_not_the_default_one",)
SUBCLASS, FAKE = ("kernels_of_subclasses_of_tensor",), ("kernels_on_fake_tensors",)


def _is_default():
    return torch.cpu.current_stream() is torch.cpu._default_cpu_stream


class UpdatesOnTheDefaultStream(Portable):
    fails = STREAM

    def update_scale_(self, state, found_inf, schedule):
        early = found_inf if _is_default() else torch.zeros_like(found_inf)
        super().update_scale_(state, early, schedule)


class MeasuresOnTheDefaultStream(Portable):
    fails = STREAM

    def grad_stats(self, grads, norm_type=2.0):
        return super().grad_stats(grads if _is_default() else [torch.zeros_like(g) for g in grads], norm_type)


class StaysOnItsStream(Loopback):
    fails = ("hooks_leave_torchs_state_as_it_was",)

    def availability(self):
        torch.cpu.stream(torch.cpu.Stream()).__enter__()
        return Availability(True, "on a stream of its own")


class Synchronizes(Portable):
    fails = ("kernels_do_not_wait_for_the_device",)

    def multiply_(self, grads, factor, found_inf=None):
        super().multiply_(grads, factor, found_inf)
        torch.cpu.synchronize()


class LeavesSubclassesOut(Portable):
    fails = SUBCLASS

    def multiply_(self, grads, factor, found_inf=None):
        known = (torch.Tensor, torch.nn.Parameter, FakeTensor)
        super().multiply_([g for g in grads if type(g) in known], factor, found_inf)


class ReadsTheAddressOfASubclass(Portable):
    fails = SUBCLASS

    def add_(self, totals, grads):
        zeros = [type(g) not in (torch.Tensor, FakeTensor) and g.data_ptr() == 0 for g in grads]
        read = [torch.zeros_like(g) if z and g.numel() else g for g, z in zip(grads, zeros, strict=True)]
        super().add_(totals, read)


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
