"""Scale updates, wrong in one plausible way each; `fails` names the checks that must say so."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from amp_core.kernels import Portable
from amp_core.states.loss_scale import Hysteresis


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
