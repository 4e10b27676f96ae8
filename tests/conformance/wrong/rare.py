"""Wrong in what a call keeps, says or sets, with rare arguments alone, or where kernels rarely run."""

from __future__ import annotations

import os
import sys
import warnings
from dataclasses import replace
from itertools import count

import torch
from torch._subclasses.fake_tensor import FakeTensor

from amp_core.kernels import GradStats, Portable

MOMENT = ("kernels_read_the_values_of_the_moment",)


class KeepsStatisticsOfWindows(Portable):
    fails = ("grad_stats_of_every_memory_layout",)

    def grad_stats(self, grads, norm_type=2.0):
        stats = super().grad_stats(grads, norm_type)
        if any(g.dim() > 1 and set(g.stride()) == {1} for g in grads):
            self.kept = stats
        return stats


class KeepsMemoryOfHalves(Portable):
    fails = ("add_of_every_memory_layout",)

    def add_(self, totals, grads):
        super().add_(totals, grads)
        self.kept = [g.detach() for g in grads if g.dtype is torch.float16]


class WarnsOfExpanded(Portable):
    fails = ("cast_into_every_memory_layout",)

    def cast(self, tensors, dtype, out=None):
        if out is not None and any(0 in t.stride() and t.numel() > 1 for t in tensors):
            warnings.warn("slow", stacklevel=2)
        return super().cast(tensors, dtype, out)


class SetsTheEnvironment(Portable):
    fails = ("grad_stats_of_every_memory_layout",)
    calls = count()

    def grad_stats(self, grads, norm_type=2.0):
        os.environ["PYTEST_ADDOPTS"] = str(next(self.calls))  # which the kit puts back after its run
        return super().grad_stats(grads, norm_type)


class LosesFlagsOfInferenceTensors(Portable):
    fails = ("kernels_in_inference_mode",)

    def grad_stats(self, grads, norm_type=2.0):
        stats = super().grad_stats(grads, norm_type)
        lost = any(g.is_inference() for g in grads)
        return replace(stats, found_inf=stats.found_inf * 0) if lost else stats


class GivesParametersForFakeTensors(Portable):
    fails = ("kernels_on_fake_tensors",)

    def cast(self, tensors, dtype, out=None):
        results = super().cast(tensors, dtype, out)
        fake = out is None and any(isinstance(t, FakeTensor) for t in tensors)
        return [torch.nn.Parameter(r, requires_grad=False) for r in results] if fake else results


class MeasuresInFloat16UnderTransforms(Portable):
    fails = ("kernels_under_function_transforms",)

    def grad_stats(self, grads, norm_type=2.0):
        if torch._C._functorch.maybe_current_level() is None:
            return super().grad_stats(grads, norm_type)
        bad = torch.stack([1.0 - g.isfinite().all().float() for g in grads])
        norms = torch.stack([g.half().float().norm() for g in grads])
        return GradStats(norms.norm(), norms, bad, bad.amax())


class ClearsTheFlagOfTheListOfBefore(Portable):
    fails = MOMENT
    last = None

    def multiply_(self, grads, factor, found_inf=None):
        if found_inf is not None and grads and self.last == id(grads[0]):
            found_inf.zero_()
        self.last = id(grads[0]) if grads else None
        super().multiply_(grads, factor, found_inf)


class WritesWhatItCastBefore(Portable):
    fails = MOMENT

    def __init__(self):
        super().__init__()
        self.known = {}

    def cast(self, tensors, dtype, out=None):
        if out is None:
            return super().cast(tensors, dtype)
        key = (*map(id, tensors), len(out))
        values = self.known.setdefault(key, [t.detach().clone() for t in tensors])
        return super().cast(values, dtype, out)


class PrintsForOneTensor(Portable):
    fails = ("cast_of_every_memory_layout",)

    def cast(self, tensors, dtype, out=None):
        if out is None and len(tensors) == 1:
            sys.stdout.write(f"casting {tensors[0].numel()} elements\n")
        return super().cast(tensors, dtype, out)


class WaitsForTransposed(Portable):
    fails = ("kernels_do_not_wait_for_the_device",)

    def add_(self, totals, grads):
        super().add_(totals, grads)
        for grad in grads:
            if not grad.is_contiguous():
                grad.sum().item()


class WaitsForComplex(Portable):
    fails = ("kernels_do_not_wait_for_the_device",)

    def multiply_(self, grads, factor, found_inf=None):
        super().multiply_(grads, factor, found_inf)
        for grad in grads:
            if grad.is_complex():
                grad.sum().item()


class RecordsLongLists(Portable):
    fails = ("kernels_of_thousands_of_tensors",)

    def grad_stats(self, grads, norm_type=2.0):
        stats = super().grad_stats(grads, norm_type)
        return replace(stats, norm=stats.norm.requires_grad_()) if len(grads) > 4096 else stats


class MovesVersionsOfLongLists(Portable):
    fails = ("kernels_of_thousands_of_tensors",)

    def cast(self, tensors, dtype, out=None):
        if len(tensors) > 4096:
            torch.autograd.graph.increment_version(tensors[4096])
        return super().cast(tensors, dtype, out)


class LosesInfOfPaddedRows(Portable):
    fails = ("cast_into_every_memory_layout",)

    def cast(self, tensors, dtype, out=None):
        results = super().cast(tensors, dtype, out)
        for source, result in zip(tensors, results, strict=True):
            padded = source.dim() > 1 and source.stride(-1) == 1 and source.stride(-2) > source.size(-1)
            if out is not None and padded and result.itemsize > 1:
                top = torch.finfo(result.dtype).max
                result.detach().copy_(result.detach().clamp(-top, top))
        return results


class CastsBackUnderAnotherDefault(Portable):
    fails = ("kernels_under_other_defaults",)

    def cast(self, tensors, dtype, out=None):
        before = [t.detach().clone() for t in out or ()]
        results = super().cast(tensors, dtype, out)
        if torch.get_default_dtype() is torch.float16:
            for result, values in zip(results, before, strict=False):
                result.detach().copy_(values)
        return results


class ClearsTheFlagWhereAllIsDeterministic(Portable):
    fails = ("kernels_under_other_defaults",)

    def multiply_(self, grads, factor, found_inf=None):
        if found_inf is not None and torch.are_deterministic_algorithms_enabled():
            found_inf.zero_()
        super().multiply_(grads, factor, found_inf)
