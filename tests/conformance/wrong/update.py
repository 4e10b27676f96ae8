"""Scale updates, wrong in one plausible way each; `fails` names the checks that must say so."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from amp_core.kernels import Portable
from amp_core.states.loss_scale import Hysteresis

FAR = ("update_counts_far",)
PAST_FLOAT32 = ("update_never_grows_past_float32",)


class UpdateGrowsOneStepLate(Portable):
    fails = ("update_follows_the_schedule_through_long_histories",)

    def update_scale_(self, state, found_inf, schedule):
        super().update_scale_(
            state, found_inf, replace(schedule, growth_interval=schedule.growth_interval + 1)
        )


class UpdateComparesTheFlagWithOne(Portable):
    fails = ("update_reads_any_positive_flag",)

    def update_scale_(self, state, found_inf, schedule):
        super().update_scale_(state, (found_inf == 1).float(), schedule)


class UpdateKnowsNoHysteresis(Portable):
    fails = ("update_follows_the_schedule_through_long_histories",)

    def update_scale_(self, state, found_inf, schedule):
        plain = replace(schedule, hysteresis=1, hysteresis_kind=Hysteresis.BUDGET)
        super().update_scale_(state, found_inf, plain)


class UpdateGrowsToInf(Portable):
    fails = ("update_never_grows_past_float32",)

    def update_scale_(self, state, found_inf, schedule):
        super().update_scale_(state, found_inf, schedule)
        state.scale.masked_fill_(state.scale == 2.0**127, math.inf)


class UpdateForgetsTheFloor(Portable):
    fails = ("update_from_every_kind_of_state",)

    def update_scale_(self, state, found_inf, schedule):
        super().update_scale_(state, found_inf, replace(schedule, min_scale=0.0))


class UpdateResetsTheFlag(Portable):
    fails = ("update_follows_the_schedule_through_long_histories",)

    def update_scale_(self, state, found_inf, schedule):
        super().update_scale_(state, found_inf, schedule)
        found_inf.zero_()


class UpdateDoesNothing(Portable):
    fails = ("update_follows_the_schedule_through_long_histories",)

    def update_scale_(self, state, found_inf, schedule):
        pass


class UpdateCountsInSixteenBits(Portable):
    fails = ("update_counts_far",)

    def update_scale_(self, state, found_inf, schedule):
        super().update_scale_(state, found_inf, schedule)
        state.growth_tracker.copy_(state.growth_tracker.to(torch.int16))


class UpdateTakesNanForAnOverflow(Portable):
    fails = ("update_reads_any_positive_flag",)

    def update_scale_(self, state, found_inf, schedule):
        super().update_scale_(state, torch.where(found_inf.isnan(), 1.0, found_inf), schedule)


class UpdateReadsNoMatrixAsFlag(Portable):
    fails = ("update_reads_any_positive_flag",)

    def update_scale_(self, state, found_inf, schedule):
        super().update_scale_(state, found_inf if found_inf.dim() < 2 else torch.zeros(()), schedule)


class UpdateMendsAnInfiniteScale(Portable):
    fails = PAST_FLOAT32

    def update_scale_(self, state, found_inf, schedule):
        state.scale.clamp_(max=torch.finfo(torch.float32).max)
        super().update_scale_(state, found_inf, schedule)


class UpdateGrowsToTheCeilingFromAnyProduct(Portable):
    fails = PAST_FLOAT32

    def update_scale_(self, state, found_inf, schedule):
        grown = (state.scale.double() * schedule.growth_factor).float()
        infinite = grown.isinf() & (state.growth_tracker + 1 >= schedule.growth_interval) & (found_inf <= 0)
        super().update_scale_(state, found_inf, schedule)
        if schedule.max_scale < 3.4e38:
            state.scale.copy_(torch.where(infinite, state.scale.clamp(min=schedule.max_scale), state.scale))


class UpdateComparesProductsInFloat64(Portable):
    fails = PAST_FLOAT32

    def update_scale_(self, state, found_inf, schedule):
        due = (state.growth_tracker + 1 >= schedule.growth_interval) & (found_inf <= 0)
        grown = state.scale.double() * schedule.growth_factor
        super().update_scale_(state, found_inf, schedule)
        between = due & (grown > torch.finfo(torch.float32).max) & grown.float().isfinite()
        state.scale.masked_fill_(between & state.scale.isfinite(), 1.0)


class UpdateWrapsTheTracker(Portable):
    fails = FAR

    def update_scale_(self, state, found_inf, schedule):
        full = (state.growth_tracker == 2**31 - 1) & (found_inf <= 0)
        super().update_scale_(state, found_inf, schedule)
        state.growth_tracker.masked_fill_(full, -(2**31))


class UpdateCountsOverflowsInSixteenBits(Portable):
    fails = FAR

    def update_scale_(self, state, found_inf, schedule):
        super().update_scale_(state, found_inf, schedule)
        state.hysteresis_left.copy_(state.hysteresis_left.to(torch.int16))


class UpdateCutsALongHysteresis(Portable):
    fails = FAR

    def update_scale_(self, state, found_inf, schedule):
        cut = replace(schedule, hysteresis=schedule.hysteresis % 2**31 or 1)
        super().update_scale_(state, found_inf, cut)
