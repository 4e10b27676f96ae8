"""Deliberately wrong backends, one plausible bug each: the kit must name the right check."""

from __future__ import annotations

import math
import threading
import time
import warnings
from dataclasses import replace

import pytest
import torch

from amp_core.kernels import PORTABLE, Measurement, Portable
from amp_core.plugin import Availability, Refusal
from amp_core.policy import OpPolicy
from amp_core.state import Hysteresis
from amp_core.testing import Loopback, check

WRONG = {}


def wrong(*expected):
    """Register a wrong backend, or the class of its wrong kernels, with the checks that must fail."""

    def register(cls):
        WRONG[cls.__name__] = (cls, expected)
        return cls

    return register


def make(cls):
    return cls() if issubclass(cls, Loopback) else Loopback(kernels=cls())


def changed(found: Measurement, **fields) -> Measurement:
    return replace(found, **fields)


# Cast.


@wrong("cast_treats_every_element_of_every_length")
class CastCutsTheVectorTail(Portable):
    def cast(self, tensors, dtype, out=None):
        results = super().cast(tensors, dtype, out)
        for r in results:
            if r.dim() == 1 and r.numel() % 8:
                r.detach()[-(r.numel() % 8) :] = 0
        return results


@wrong("cast_rounds_every_dtype_pair_to_nearest_even")
class CastTruncatesToBfloat16(Portable):
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


@wrong("cast_rounds_every_dtype_pair_to_nearest_even", "cast_keeps_nan_inf_and_signed_zero")
class CastSaturates(Portable):
    def cast(self, tensors, dtype, out=None):
        top = torch.finfo(dtype).max
        return super().cast([t.clamp(-top, top) if dtype.itemsize == 2 else t for t in tensors], dtype, out)


@wrong("cast_keeps_nan_inf_and_signed_zero")
class CastMakesNanZero(Portable):
    def cast(self, tensors, dtype, out=None):
        return super().cast([t.nan_to_num(0.0, math.inf, -math.inf) for t in tensors], dtype, out)


@wrong("cast_keeps_nan_inf_and_signed_zero")
class CastLosesTheSignOfZero(Portable):
    def cast(self, tensors, dtype, out=None):
        return super().cast([t + 0.0 if t.dtype.itemsize > 1 else t for t in tensors], dtype, out)


@wrong("cast_is_exact_for_numbers_of_every_size")
class CastFlushesSubnormals(Portable):
    def cast(self, tensors, dtype, out=None):
        results = super().cast(tensors, dtype, out)
        for r in results:
            if r.dtype.itemsize > 1:
                r.detach()[r.detach().abs() < torch.finfo(r.dtype).tiny] = 0
        return results


@wrong("cast_of_every_memory_layout")
class CastIgnoresStrides(Portable):
    def cast(self, tensors, dtype, out=None):
        flat = [torch.as_strided(t, t.shape, torch.empty(t.shape).stride()) for t in tensors]
        return super().cast(flat, dtype, out)


@wrong("cast_of_mixed_lists_keeps_their_order")
class CastReordersByDtype(Portable):
    def cast(self, tensors, dtype, out=None):
        if out is not None:
            return super().cast(tensors, dtype, out)
        return super().cast(sorted(tensors, key=lambda t: str(t.dtype)), dtype)


@wrong("cast_writes_into_out_and_nowhere_else")
class CastReturnsCopiesOfOut(Portable):
    def cast(self, tensors, dtype, out=None):
        return [r.clone() for r in super().cast(tensors, dtype, out)]


@wrong("cast_writes_into_out_and_nowhere_else")
class CastWritesPastOut(Portable):
    def cast(self, tensors, dtype, out=None):
        results = super().cast(tensors, dtype, out)
        for o in out or []:
            size = o.untyped_storage().nbytes() // o.element_size()
            if o.storage_offset() + o.numel() < size and o.numel():
                torch.as_strided(o.detach(), (1,), (1,), o.storage_offset() + o.numel()).fill_(0)
        return results


@wrong("cast_into_out_moves_its_version_counter")
class CastWritesBehindAutograd(Portable):
    def cast(self, tensors, dtype, out=None):
        if out is None:
            return super().cast(tensors, dtype)
        for o, t in zip(out, tensors, strict=True):
            o.data.copy_(t)
        return list(out)


@wrong("cast_returns_new_memory")
class CastReturnsTheInput(Portable):
    def cast(self, tensors, dtype, out=None):
        if out is None:
            return [t.detach().to(dtype) for t in tensors]
        return super().cast(tensors, dtype, out)


@wrong("cast_is_outside_of_autograd")
class CastRecordsAGraph(Portable):
    def cast(self, tensors, dtype, out=None):
        return (
            super().cast(tensors, dtype, out)
            if out is not None
            else [t.to(dtype, copy=True) for t in tensors]
        )


@wrong("cast_refuses_lists_of_different_lengths")
class CastZipsShort(Portable):
    def cast(self, tensors, dtype, out=None):
        return super().cast(tensors if out is None else tensors[: len(out)], dtype, out)


@wrong("cast_into_out_ignores_the_dtype_argument")
class CastRoundsOnTheWayToOut(Portable):
    def cast(self, tensors, dtype, out=None):
        return super().cast(tensors if out is None else super().cast(tensors, dtype), dtype, out)


@wrong("cast_of_thousands_of_tensors")
class CastLosesTheSecondChunk(Portable):
    def cast(self, tensors, dtype, out=None):
        results = super().cast(tensors, dtype, out)
        for r in results[512:]:
            r.detach().zero_()
        return results


# Measure.


def tail(t):
    return t.reshape(-1)[: t.numel() // 8 * 8 or t.numel()]


@wrong("measure_flags_a_bad_element_at_every_position")
class MeasureSkipsTheVectorTail(Portable):
    def measure(self, grads, norm_type=2.0):
        found = super().measure(grads, norm_type)
        bad = super().measure([tail(g) for g in grads], norm_type)
        return changed(found, nonfinite=bad.nonfinite, found_inf=bad.found_inf)


@wrong("measure_found_inf_is_zero_or_one")
class MeasureSumsTheFlags(Portable):
    def measure(self, grads, norm_type=2.0):
        found = super().measure(grads, norm_type)
        return changed(found, found_inf=found.nonfinite.sum())


@wrong("measure_keeps_the_flag_over_dtype_groups")
class MeasureClearsTheFlagByLaterGroup(Portable):
    def measure(self, grads, norm_type=2.0):
        found = super().measure(grads, norm_type)
        last = [i for i, g in enumerate(grads) if g.dtype is grads[-1].dtype] if grads else []
        return changed(found, found_inf=found.nonfinite[last].max()) if grads else found


@wrong("measure_does_not_flag_finite_elements_whose_square_overflows")
class MeasureTakesTheFlagFromTheSquares(Portable):
    def measure(self, grads, norm_type=2.0):
        found = super().measure(grads, norm_type)
        bad = torch.tensor([0.0] * len(grads))
        for i, g in enumerate(grads):
            bad[i] = (~torch.isfinite((g.abs().float() ** 2).sum())).float()
        return changed(found, nonfinite=bad, found_inf=bad.max()) if grads else found


@wrong("measure_does_not_flag_a_norm_that_overflows")
class MeasureTakesTheFlagFromTheNorm(Portable):
    def measure(self, grads, norm_type=2.0):
        found = super().measure(grads, norm_type)
        return changed(found, found_inf=(~torch.isfinite(found.norm)).float())


@wrong("measure_flags_each_kind_of_bad_element_alone")
class MeasureOverlooksNan(Portable):
    def measure(self, grads, norm_type=2.0):
        clean = [torch.where(g.isnan(), torch.ones_like(g), g) for g in grads]
        found, bad = super().measure(grads, norm_type), super().measure(clean, norm_type)
        return changed(found, nonfinite=bad.nonfinite, found_inf=bad.found_inf)


@wrong("measure_flags_each_kind_of_bad_element_alone")
class MeasureOverlooksMinusInf(Portable):
    def measure(self, grads, norm_type=2.0):
        if any(g.is_complex() for g in grads):
            return super().measure(grads, norm_type)
        clean = [torch.where(g == -math.inf, torch.ones_like(g), g) for g in grads]
        found, bad = super().measure(grads, norm_type), super().measure(clean, norm_type)
        return changed(found, nonfinite=bad.nonfinite, found_inf=bad.found_inf)


@wrong("measure_accumulates_low_precision_in_float32")
class MeasureSumsInTheDtypeOfTheGradient(Portable):
    def measure(self, grads, norm_type=2.0):
        found = super().measure(grads, norm_type)
        norms = [(g * g).sum(dtype=g.dtype).sqrt().float() for g in grads]
        return changed(found, norms=torch.stack(norms), norm=torch.stack(norms).norm()) if grads else found


@wrong("measure_of_small_elements_whose_square_underflows")
class MeasureSquaresInFloat32(Portable):
    def measure(self, grads, norm_type=2.0):
        found = super().measure(grads, norm_type)
        if not grads or norm_type != 2.0:
            return found
        total = sum((g.abs().float() ** 2).sum() for g in grads).sqrt()
        return changed(found, norm=torch.where(torch.isinf(total), found.norm, total.to(found.norm.dtype)))


@wrong("measure_norms_of_every_dtype_and_order")
class MeasureIgnoresTheOrder(Portable):
    def measure(self, grads, norm_type=2.0):
        return super().measure(grads, 2.0)


@wrong("measure_of_mixed_lists_keeps_their_order")
class MeasureReordersByDtype(Portable):
    def measure(self, grads, norm_type=2.0):
        return super().measure(sorted(grads, key=lambda g: str(g.dtype)), norm_type)


@wrong("measure_does_not_read_around_a_view")
class MeasureReadsTheNeighbours(Portable):
    def measure(self, grads, norm_type=2.0):
        whole = [
            torch.as_strided(g, (g.numel() + 1,), (1,), g.storage_offset())
            if (g.storage_offset() + g.numel() + 1) * g.element_size() <= g.untyped_storage().nbytes()
            and g.storage_offset()
            else g
            for g in grads
        ]
        return super().measure(whole, norm_type)


@wrong("measure_only_reads")
class MeasureRepairsTheGradients(Portable):
    def measure(self, grads, norm_type=2.0):
        found = super().measure(grads, norm_type)
        for g in grads:
            g.detach().nan_to_num_()
        return found


@wrong("measure_only_reads")
class MeasureWritesTheSameBack(Portable):
    def measure(self, grads, norm_type=2.0):
        for g in grads:
            g.detach().mul_(1.0)
        return super().measure(grads, norm_type)


@wrong("measure_results_are_the_callers_own")
class MeasureReusesItsFlag(Portable):
    flag = torch.zeros(())

    def measure(self, grads, norm_type=2.0):
        found = super().measure(grads, norm_type)
        self.flag.copy_(found.found_inf)
        return changed(found, found_inf=self.flag)


@wrong("measure_of_no_tensors")
class MeasureFailsOnNothing(Portable):
    def measure(self, grads, norm_type=2.0):
        assert grads, "no gradients"
        return super().measure(grads, norm_type)


@wrong("measure_of_complex_gradients")
class MeasureLooksAtTheRealPart(Portable):
    def measure(self, grads, norm_type=2.0):
        return super().measure([g.real for g in grads], norm_type)


@wrong("measure_does_not_wait_for_the_device")
class MeasureReadsTheFlag(Portable):
    def measure(self, grads, norm_type=2.0):
        found = super().measure(grads, norm_type)
        found.found_inf.item()
        return found


@wrong("measure_gives_the_promised_shapes_dtypes_and_device")
class MeasureFlagIsBool(Portable):
    def measure(self, grads, norm_type=2.0):
        found = super().measure(grads, norm_type)
        return changed(found, nonfinite=found.nonfinite.bool())


@wrong("measure_finds_a_bad_tensor_among_thousands")
class MeasureLooksAtTheFirstThousand(Portable):
    def measure(self, grads, norm_type=2.0):
        found = super().measure(grads, norm_type)
        return changed(found, found_inf=found.nonfinite[:1000].max()) if grads else found


@wrong("measure_flags_a_bad_element_in_every_memory_layout")
class MeasureOverlooksScalars(Portable):
    def measure(self, grads, norm_type=2.0):
        found = super().measure(grads, norm_type)
        return changed(found, found_inf=found.found_inf * float(any(g.dim() for g in grads)))


# Scale.


@wrong("scale_flags_a_product_that_overflows")
class ScaleChecksBeforeTheMultiplyOnly(Portable):
    def scale_(self, grads, factor, found_inf=None):
        bad = super().measure(grads).found_inf if grads else torch.zeros(())
        super().scale_(grads, factor)
        if found_inf is not None:
            found_inf.masked_fill_(bad > 0, 1.0)


@wrong("scale_leaves_a_set_flag_set")
class ScaleClearsTheFlag(Portable):
    def scale_(self, grads, factor, found_inf=None):
        if found_inf is not None:
            found_inf.zero_()
        super().scale_(grads, factor, found_inf)


@wrong("scale_leaves_a_set_flag_set", "scale_found_inf_is_zero_or_one")
class ScaleCountsUp(Portable):
    def scale_(self, grads, factor, found_inf=None):
        for g in grads:
            mine = torch.zeros(())
            super().scale_([g], factor, mine)
            if found_inf is not None:
                found_inf.add_(mine)


@wrong("scale_multiplies_although_something_is_bad")
class ScaleStopsAtABadElement(Portable):
    def scale_(self, grads, factor, found_inf=None):
        if any(not torch.isfinite(g).all() for g in grads):
            if found_inf is not None:
                found_inf.fill_(1.0)
            return
        super().scale_(grads, factor, found_inf)


@wrong("scale_multiplies_in_float32_or_wider")
class ScaleRoundsTheFactorFirst(Portable):
    def scale_(self, grads, factor, found_inf=None):
        for g in grads:
            super().scale_([g], factor.to(g.dtype.to_real()).float(), found_inf)


@wrong("scale_multiplies_in_float32_or_wider")
class ScaleForgetsTheLastElement(Portable):
    def scale_(self, grads, factor, found_inf=None):
        kept = [g[-1:].clone() if g.dim() == 1 and g.numel() == 33 else None for g in grads]
        super().scale_(grads, factor, found_inf)
        for g, last in zip(grads, kept, strict=True):
            if last is not None:
                g[-1:].copy_(last)


@wrong("scale_writes_the_gradients_and_the_flag_alone")
class ScaleWritesBehindAutograd(Portable):
    def scale_(self, grads, factor, found_inf=None):
        super().scale_([g.data for g in grads], factor, found_inf)


@wrong("scale_writes_the_gradients_and_the_flag_alone")
class ScaleInvertsTheFactorInPlace(Portable):
    def scale_(self, grads, factor, found_inf=None):
        super().scale_(grads, factor, found_inf)
        factor.reciprocal_()


@wrong("scale_does_not_wait_for_the_device")
class ScaleBranchesOnTheHost(Portable):
    def scale_(self, grads, factor, found_inf=None):
        if float(factor) != 1.0:
            super().scale_(grads, factor, found_inf)


@wrong("scale_of_thousands_of_tensors")
class ScaleLosesTheSecondChunk(Portable):
    def scale_(self, grads, factor, found_inf=None):
        super().scale_(list(grads)[:512], factor, found_inf)


# Update.


@wrong("update_follows_the_schedule_through_long_histories")
class UpdateGrowsOneStepLate(Portable):
    def update_scale_(self, state, found_inf, schedule):
        super().update_scale_(
            state, found_inf, replace(schedule, growth_interval=schedule.growth_interval + 1)
        )


@wrong("update_reads_any_positive_flag")
class UpdateComparesTheFlagWithOne(Portable):
    def update_scale_(self, state, found_inf, schedule):
        super().update_scale_(state, (found_inf == 1).float(), schedule)


@wrong("update_follows_the_schedule_through_long_histories")
class UpdateKnowsNoHysteresis(Portable):
    def update_scale_(self, state, found_inf, schedule):
        plain = replace(schedule, hysteresis=1, hysteresis_kind=Hysteresis.BUDGET)
        super().update_scale_(state, found_inf, plain)


@wrong("update_never_grows_past_float32")
class UpdateGrowsToInf(Portable):
    def update_scale_(self, state, found_inf, schedule):
        super().update_scale_(state, found_inf, schedule)
        state.scale.masked_fill_(state.scale == 2.0**127, math.inf)


@wrong("update_from_every_kind_of_state")
class UpdateForgetsTheFloor(Portable):
    def update_scale_(self, state, found_inf, schedule):
        super().update_scale_(state, found_inf, replace(schedule, min_scale=0.0))


@wrong("update_writes_the_state_alone")
class UpdateResetsTheFlag(Portable):
    def update_scale_(self, state, found_inf, schedule):
        super().update_scale_(state, found_inf, schedule)
        found_inf.zero_()


@wrong("scaler_follows_the_state_machine")
class UpdateDoesNothing(Portable):
    def update_scale_(self, state, found_inf, schedule):
        pass


# What a backend says, and what its hooks leave behind.


@wrong("default_dtype_is_supported")
class DefaultIsNotSupported(Loopback):
    def supported_dtypes(self):
        return (torch.float16,)


@wrong("default_dtype_is_a_lower_precision")
class DefaultIsFloat32(Loopback):
    def default_dtype(self):
        return torch.float32


@wrong("default_dtype_is_torchs_where_torch_has_one")
class DefaultIsAnotherThanTorchs(Loopback):
    def default_dtype(self):
        return torch.float16


@wrong("default_dtype_follows_torchs_setting")
class DefaultIsFixed(Loopback):
    def default_dtype(self):
        return torch.bfloat16


@wrong("supported_dtypes_are_admitted_and_others_refused_in_words")
class AdmitsEverything(Loopback):
    def autocast_refusal(self, dtype):
        return None


@wrong("supported_dtypes_are_floating_and_distinct")
class SupportsIntegers(Loopback):
    def supported_dtypes(self):
        return (torch.bfloat16, torch.float16, torch.int8)


@wrong("availability_gives_a_reason_in_words")
class HasNoReason(Loopback):
    def availability(self):
        return Availability(True, "")


@wrong("availability_gives_a_reason_in_words")
class AnswersWithABool(Loopback):
    def availability(self):
        return True


@wrong("availability_is_true_of_the_device")
class SaysThatItIsAbsent(Loopback):
    def availability(self):
        return Availability(False, "no driver is loaded")


@wrong("questions_do_no_work_on_the_device")
class AllocatesToAnswer(Loopback):
    def availability(self):
        return Availability(torch.ones(1, device=self.device_type).sum() == 1 or True, "tried an addition")


@wrong("policy_has_torchs_rules_but_for_stated_departures")
class PolicyLacksARule(Loopback):
    def op_policy(self):
        rules = dict(OpPolicy.default("cpu").rules)
        del rules["aten::mse_loss.default"]
        return OpPolicy("cpu", rules)


@wrong("policy_runs_products_in_low_precision")
class PolicyRunsProductsInFloat32(Loopback):
    def op_policy(self):
        return OpPolicy.float32("cpu")


@wrong("policy_is_for_the_device")
class PolicyIsForAnotherDevice(Loopback):
    def op_policy(self):
        return OpPolicy.default("cuda")


@wrong("region_follows_every_rule")
class HasAnAutocastKernelThatDoesNotCast(Loopback):
    def op_policy(self):
        if not LIBRARIES:
            LIBRARIES.append(torch.library.Library("aten", "IMPL"))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that it takes the place of another
                LIBRARIES[0].impl("smooth_l1_loss", torch.library.fallthrough_kernel, "AutocastCPU")
        return super().op_policy()


LIBRARIES = []


@wrong("hooks_leave_torchs_state_as_it_was")
class TurnsGradientsOff(Portable):
    def measure(self, grads, norm_type=2.0):
        torch.set_grad_enabled(False)
        return super().measure(grads, norm_type)


@wrong("hooks_leave_torchs_state_as_it_was")
class LeavesAutocastOn(Portable):
    def cast(self, tensors, dtype, out=None):
        torch.set_autocast_enabled("cpu", True)
        return super().cast(tensors, dtype, out)


@wrong("hooks_leave_no_thread_behind")
class StartsAThreadPerCall(Portable):
    def measure(self, grads, norm_type=2.0):
        threading.Thread(target=time.sleep, args=(0.5,), daemon=True).start()
        return super().measure(grads, norm_type)


@wrong("kernels_serve_many_threads_at_once")
class SharesABuffer(Portable):
    shared = None

    def measure(self, grads, norm_type=2.0):
        SharesABuffer.shared = grads
        time.sleep(0.001)
        return super().measure(list(SharesABuffer.shared), norm_type)


@wrong("scaler_is_admitted")
class RefusesTheScaler(Loopback):
    def scaler_refusal(self):
        return Refusal("no loss scaling here")


@wrong("kernels_are_named")
class HasNoName(Portable):
    name = ""


@pytest.fixture(autouse=True)
def _torch_as_it_was():
    yield
    torch.set_grad_enabled(True)
    torch.set_autocast_enabled("cpu", False)
    while LIBRARIES:
        LIBRARIES.pop()._destroy()


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_backend_fails_the_right_check(name):
    """A maker of a device would be told that a wrong backend is right."""
    cls, expected = WRONG[name]
    report = check(make(cls), keyword=" or ".join(expected))
    assert not report.ok
    assert set(expected) <= set(report.failed), [(r.check, r.outcome, r.message) for r in report.results]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(WRONG)[::8])  # each takes as long as `amp check cpu`
def test_the_whole_kit_fails_a_wrong_backend(name):
    """The right check could be hidden by another one's effects."""
    cls, expected = WRONG[name]
    assert set(expected) <= set(check(make(cls)).failed)


def test_there_are_enough_wrong_backends_over_all_areas():
    """The kit is only as good as what it has caught."""
    assert len(WRONG) >= 40
    assert {"cast", "measure", "scale", "update", "hooks"} <= {
        e[0].partition("_")[0] for _, e in WRONG.values()
    }


def test_a_right_backend_passes():
    """A kit that fails everything would pass the tests above."""
    report = check(Loopback(kernels=PORTABLE))
    assert report.ok, report.to_markdown()
    assert report.count("passed") > 90
