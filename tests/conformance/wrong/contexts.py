"""Wrong in some contexts alone, or changing them; `fails` names the checks that must say so."""

from __future__ import annotations

import os
import random
import warnings
from contextlib import contextmanager

import torch
from torch._subclasses.fake_tensor import FakeTensor

from amp_core.kernels import Portable
from amp_core.plugin import Availability
from amp_core.policy import OpPolicy
from amp_core.testing import BackendFixtures, Loopback

STATE, THREADS = ("hooks_leave_torchs_state_as_it_was",), ("kernels_serve_many_threads_at_once",)
GRAD, ABSENT = ("kernels_with_and_without_grad_mode",), ("hooks_answer_without_the_device",)


class ReturnsInferenceTensors(Portable):
    fails = ("cast_of_every_memory_layout",)

    @torch.inference_mode()
    def cast(self, tensors, dtype, out=None):
        return super().cast(tensors, dtype, out)


class MeasuresInInferenceMode(Portable):
    fails = ("grad_stats_of_every_memory_layout",)

    @torch.inference_mode()
    def grad_stats(self, grads, norm_type=2.0):
        return super().grad_stats(grads, norm_type)


class RunsProductsUnderAutocast(Portable):
    fails = ("kernels_in_a_region",)

    def grad_stats(self, grads, norm_type=2.0):
        stats = super().grad_stats(grads, norm_type)
        if not grads or norm_type != 2.0:
            return stats
        flat = [g.detach().reshape(1, -1) for g in grads]
        norms = torch.stack([(f @ f.t()).reshape(()).sqrt().to(stats.norms.dtype) for f in flat])
        return type(stats)(
            stats.norm,
            norms if torch.is_autocast_enabled("cpu") else stats.norms,
            stats.nonfinite,
            stats.found_inf,
        )


class CastsTwiceUnderAutocast(Portable):
    fails = ("kernels_in_a_region",)

    def cast(self, tensors, dtype, out=None):
        if torch.is_autocast_enabled("cpu") and out is None:
            tensors = super().cast(tensors, torch.get_autocast_dtype("cpu"))
            return super().cast(tensors, torch.float16)
        return super().cast(tensors, dtype, out)


class RecordsUnderGradMode(Portable):
    fails = GRAD

    def grad_stats(self, grads, norm_type=2.0):
        stats = super().grad_stats(grads, norm_type)
        if torch.is_grad_enabled() and any(g.requires_grad for g in grads):
            norms = torch.stack(
                [torch.linalg.vector_norm(g, norm_type, dtype=stats.norms.dtype) for g in grads]
            )
            return type(stats)(stats.norm, norms, stats.nonfinite, stats.found_inf)
        return stats


class SkipsTheFlagWithoutGradMode(Portable):
    fails = ("kernels_with_and_without_grad_mode",)

    def add_(self, totals, grads):
        super().add_(totals, grads if torch.is_grad_enabled() else [g.bfloat16() for g in grads])


class RoundsUnderFunctionTransforms(Portable):
    fails = ("kernels_under_function_transforms",)

    def cast(self, tensors, dtype, out=None):
        if torch._C._functorch.maybe_current_level() is not None:
            return [torch.zeros_like(t, dtype=dtype) for t in tensors]
        return super().cast(tensors, dtype, out)


class RaisesUnderFunctionTransforms(Portable):
    fails = ("kernels_under_function_transforms",)

    def cast(self, tensors, dtype, out=None):
        [t.detach().data_ptr() for t in tensors]
        return super().cast(tensors, dtype, out)


class AnswersFakeTensorsWithRealOnes(Portable):
    fails = ("kernels_on_fake_tensors",)

    def cast(self, tensors, dtype, out=None):
        if tensors and isinstance(tensors[0], FakeTensor):
            from torch._subclasses.fake_tensor import unset_fake_temporarily

            with unset_fake_temporarily():
                return [torch.zeros(tuple(t.shape), dtype=dtype) for t in tensors]
        return super().cast(tensors, dtype, out)


class CannotTakeFakeTensors(Portable):
    fails = ("kernels_on_fake_tensors",)

    def grad_stats(self, grads, norm_type=2.0):
        [g.data_ptr() for g in grads]
        return super().grad_stats(grads, norm_type)


class ResetsRequiresGrad(Portable):
    fails = ("multiply_of_every_memory_layout",)

    def multiply_(self, grads, factor, found_inf=None):
        super().multiply_(grads, factor, found_inf)
        for grad in grads:
            grad.requires_grad_(False) if grad.is_leaf else None


class DetachesGradients(Portable):
    fails = ("multiply_of_every_memory_layout",)

    def multiply_(self, grads, factor, found_inf=None):
        super().multiply_([g if g.is_leaf else g.detach_() for g in grads], factor, found_inf)


class PolicyDependsOnGradMode(Loopback):
    fails = ("hooks_answer_alike_in_every_context",)

    def op_policy(self):
        return OpPolicy.default("cpu") if torch.is_grad_enabled() else OpPolicy.uniform("cpu")


class DefaultDtypeDependsOnTheRegion(Loopback):
    fails = ("hooks_answer_alike_in_every_context",)

    def supported_dtypes(self):
        both = torch.bfloat16, torch.float16
        return both[:1] if torch.is_autocast_enabled("cpu") else both


class SharesAStaticFactor(Portable):
    fails = THREADS
    factor = torch.ones(())

    def multiply_(self, grads, factor, found_inf=None):
        self.factor.copy_(factor.reshape(()))
        super().multiply_(grads, self.factor, found_inf)


class SharesAStaticAccumulator(Portable):
    fails = THREADS
    total = torch.zeros((), dtype=torch.float64)

    def grad_stats(self, grads, norm_type=2.0):
        stats = super().grad_stats(grads, norm_type)
        if not grads or norm_type != 2.0:
            return stats
        self.total.zero_()
        for norm in stats.norms.double():
            self.total.add_(norm * norm)
        return type(stats)(
            self.total.sqrt().to(stats.norm.dtype), stats.norms, stats.nonfinite, stats.found_inf
        )


class SharesItsSchedule(Portable):
    fails = THREADS

    def update_scale_(self, state, found_inf, schedule):
        self.schedule = schedule
        super().update_scale_(state, found_inf, self.schedule)


class SharesItsTargets(Portable):
    fails = THREADS

    def cast(self, tensors, dtype, out=None):
        self.out = [torch.empty_like(t, dtype=dtype) for t in tensors] if out is None else out
        return super().cast(tensors, dtype, self.out)


class LocksNothing(Loopback):
    fails = ("hooks_answer_many_threads_at_once",)
    busy = False

    def supported_dtypes(self):
        if LocksNothing.busy:
            return (torch.bfloat16,)
        LocksNothing.busy = True
        answer = super().supported_dtypes()
        LocksNothing.busy = False
        return answer


class SilencesWarnings(Loopback):
    fails = STATE

    def availability(self):
        warnings.simplefilter("ignore")
        return super().availability()


class SeedsTheGenerator(Portable):
    fails = STATE

    def grad_stats(self, grads, norm_type=2.0):
        torch.manual_seed(0)
        return super().grad_stats(grads, norm_type)


class SeedsPythonsGenerator(Loopback):
    fails = STATE

    def kernels(self):
        random.seed(0)
        return super().kernels()


class SetsTheDefaultDevice(Loopback):
    fails = STATE

    def default_dtype(self):
        torch.set_default_device("cpu")
        return super().default_dtype()


class ClearsTheCastCache(Portable):
    fails = ("hooks_keep_the_casts_of_a_region",)

    def grad_stats(self, grads, norm_type=2.0):
        torch.clear_autocast_cache()
        return super().grad_stats(grads, norm_type)


class QueryClearsTheCastCache(Loopback):
    fails = ("hooks_keep_the_casts_of_a_region",)

    def availability(self):
        with torch.autocast("cpu", enabled=False):
            torch.clear_autocast_cache()
        return super().availability()


class SetsAVariableOfTheEnvironment(Loopback):
    fails = STATE

    def availability(self):
        os.environ["SOME_DRIVER_OPTION"] = str(random.Random().random())
        return super().availability()


class Removable(BackendFixtures):
    """A device that can be taken away."""

    @contextmanager
    def device_taken_away(self):
        Present.there = False
        try:
            yield
        finally:
            Present.there = True


class Present(Loopback):
    """A right backend, but for what a subclass makes of an absent device."""

    fixtures = Removable
    there = True

    def availability(self):
        if not Present.there:
            return Availability(False, "no driver is loaded")
        return super().availability()

    def ask(self):
        if not Present.there:
            raise RuntimeError("driver not found")


class SupportedDtypesNeedTheDevice(Present):
    fails = ABSENT

    def supported_dtypes(self):
        self.ask()
        return super().supported_dtypes()


class DefaultDtypeNeedsTheDevice(Present):
    fails = ABSENT

    def default_dtype(self):
        self.ask()
        return super().default_dtype()


class KernelsNeedTheDevice(Present):
    fails = ABSENT

    def kernels(self):
        self.ask()
        return super().kernels()


class PolicyNeedsTheDevice(Present):
    fails = ABSENT

    def op_policy(self):
        self.ask()
        return super().op_policy()


class HasAnotherPolicyWhereAbsent(Present):
    fails = ABSENT

    def op_policy(self):
        return super().op_policy() if Present.there else OpPolicy.float32("cpu")


class DefaultsToFloat32WhereAbsent(Present):
    fails = ABSENT

    def default_dtype(self):
        return super().default_dtype() if Present.there else torch.float32


class StaysAvailable(Present):
    fails = ("availability_follows_the_device",)

    def availability(self):
        return Availability(True, "it was there at import")


class SupportsADtypeInWhichNothingRuns(Loopback):
    fails = ("supported_dtypes_compute_on_the_device",)

    def supported_dtypes(self):
        return (torch.bfloat16, torch.float16, torch.float8_e5m2)


def _watched():
    return torch.utils._python_dispatch._get_current_dispatch_mode() is not None


class CastsWronglyUnderADispatchMode(Portable):
    fails = ("kernels_under_other_defaults",)

    def cast(self, tensors, dtype, out=None):
        return super().cast([t.detach().half() if _watched() else t for t in tensors], dtype, out)


class MultipliesWronglyUnderADispatchMode(Portable):
    fails = ("kernels_under_other_defaults",)

    def multiply_(self, grads, factor, found_inf=None):
        super().multiply_(grads, factor.bfloat16().float() * 2 if _watched() else factor, found_inf)


class TakesTheThreadsForAMoment(Loopback):
    fails = STATE

    def availability(self):
        threads = torch.get_num_threads()
        torch.set_num_threads(threads + 1)
        found = super().availability()
        torch.set_num_threads(threads)
        return found


class SwitchesCudnnsPrecision(Portable):
    fails = STATE

    def grad_stats(self, grads, norm_type=2.0):
        torch.backends.cudnn.set_flags(_allow_tf32=True, _fp32_precision=None)
        return super().grad_stats(grads, norm_type)
