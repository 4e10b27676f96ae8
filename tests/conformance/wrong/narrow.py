"""Wrong in one narrow case each, of layout, argument or moment; `fails` names the checks that must say so."""

from __future__ import annotations

import gc
import logging
import math
import os
import weakref
from dataclasses import replace

import torch

from amp_core.kernels import Portable
from amp_core.testing import Loopback

STATE = ("hooks_leave_torchs_state_as_it_was",)
THREADS, ORDERS = ("kernels_serve_many_threads_at_once",), ("grad_stats_norms_of_every_dtype_and_order",)
HISTORY = ("update_follows_the_schedule_through_long_histories",)


def cast_where(case):
    """Return kernels whose casts are wrong where `case` holds for the source."""

    class Cast(Portable):
        fails = ("cast_of_every_memory_layout",)

        def cast(self, tensors, dtype, out=None):
            results = super().cast(tensors, dtype, out)
            for result, tensor in zip(results, tensors, strict=True):
                if tensor.numel() and case(tensor):
                    result[(0,) * result.dim()] += 1
            return results

    return Cast


def _is_swapped(t):
    return t.dim() > 2 and not t.is_contiguous() and t.mT.is_contiguous()


def _is_windows(t):
    return t.dim() == 2 and min(t.shape) > 1 and t.stride() == (1, 1)


CastOfSwappedDimensions = cast_where(_is_swapped)
CastOfWindows = cast_where(_is_windows)
CastOfColumns = cast_where(lambda t: t.dim() == 2 and t.shape[1] == 1 < t.shape[0])
CastOfOnePixel = cast_where(lambda t: t.dim() == 4 and t.shape[2:] == (1, 1))
CastOfSixDimensions = cast_where(lambda t: t.dim() == 6)
CastOfLongGaps = cast_where(lambda t: t.numel() > 1000 and not t.is_contiguous())


def at_the_start(t):
    return t.detach().as_strided(t.shape, t.stride(), 0)


class FactorIsReadAtTheStart(Portable):
    fails = ("multiply_works_in_float32_or_wider",)

    def multiply_(self, grads, factor, found_inf=None):
        super().multiply_(grads, at_the_start(factor), found_inf)


class ScaleIsWrittenAtTheStart(Portable):
    fails = HISTORY

    def update_scale_(self, state, found_inf, schedule):
        super().update_scale_(type(state)(*map(at_the_start, vars(state).values())), found_inf, schedule)


class TrackerIsKeptOnTheHost(Portable):
    fails = HISTORY

    def __init__(self):
        super().__init__()
        self.known = weakref.WeakKeyDictionary()

    def update_scale_(self, state, found_inf, schedule):
        tracker = state.growth_tracker
        tracker.fill_(self.known.get(tracker, int(tracker)))
        super().update_scale_(state, found_inf, schedule)
        self.known[tracker] = int(tracker)


class WholeOrdersAreTwo(Portable):
    fails = ORDERS

    def grad_stats(self, grads, norm_type=2.0):
        return super().grad_stats(grads, norm_type if isinstance(norm_type, float) else 2.0)


class HighOrdersAreInf(Portable):
    fails = ORDERS

    def grad_stats(self, grads, norm_type=2.0):
        return super().grad_stats(grads, math.inf if norm_type > 3 else norm_type)


class FlagIsClamped(Portable):
    fails = ("multiply_sets_the_flag_of_a_list",)

    def multiply_(self, grads, factor, found_inf=None):
        super().multiply_(grads, factor, found_inf)
        if found_inf is not None:
            found_inf.clamp_(max=1.0)


class NormInABackwardIsAnother(Portable):
    fails = ("kernels_with_and_without_grad_mode",)

    def grad_stats(self, grads, norm_type=2.0):
        stats = super().grad_stats(grads, norm_type)
        busy = torch._C._current_graph_task_id() != -1
        return replace(stats, norm=stats.norm * 2 + 1) if busy else stats


class PlanIsFoundBeforeItIsFull(Portable):
    fails = THREADS

    def __init__(self):
        super().__init__()
        self.plans = {}

    def multiply_(self, grads, factor, found_inf=None):
        shapes = tuple(g.shape for g in grads)
        if shapes not in self.plans:
            self.plans[shapes] = []
            self.plans[shapes].extend(range(len(grads)))
        super().multiply_([grads[i] for i in self.plans[shapes]], factor, found_inf)


class SetsTheDefaultDtypeForAMoment(Portable):
    fails = STATE

    def grad_stats(self, grads, norm_type=2.0):
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            return super().grad_stats(grads, norm_type)
        finally:
            torch.set_default_dtype(before)


class SetsAVariableForAMoment(Loopback):
    fails = STATE

    def availability(self):
        os.environ["SOME_DRIVER_IS_QUIET"] = "1"
        found = super().availability()
        del os.environ["SOME_DRIVER_IS_QUIET"]
        return found


class DisablesTheCollector(Loopback):
    fails = STATE

    def default_dtype(self):
        gc.disable()
        return super().default_dtype()


class SilencesLogging(Loopback):
    fails = STATE

    def op_policy(self):
        logging.disable(logging.CRITICAL)
        return super().op_policy()
