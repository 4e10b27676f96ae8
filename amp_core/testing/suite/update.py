"""What `Kernels.update_scale_` must do."""

from __future__ import annotations

import itertools
import math
import random

import torch

from amp_core.states.loss_scale import Hysteresis, LossScaleSchedule, ScaleState, float32
from amp_core.testing.suite import data
from amp_core.testing.suite.judge import Judge

SCHEDULES = (
    LossScaleSchedule(growth_interval=3),
    LossScaleSchedule(growth_factor=1.7, backoff_factor=0.3, growth_interval=2),
    LossScaleSchedule(growth_interval=1, min_scale=8.0, max_scale=100.0),
    LossScaleSchedule(1000.0, 1e-3, growth_interval=2, hysteresis=300),
    *(
        LossScaleSchedule(growth_interval=3, hysteresis=h, hysteresis_kind=k)
        for h in (2, 3)
        for k in Hysteresis
    ),
)

_INT32 = 2**31 - 1


class UpdateConformance(Judge):
    """The scale moves on the device exactly as `amp_core.states.loss_scale.next_scale` says."""

    AREA = "update"

    def test_update_follows_the_schedule_through_long_histories(self) -> None:
        """Growth after the interval, backoff at once, every kind of hysteresis, bit for bit."""
        chance = random.Random(5)
        for schedule in SCHEDULES:
            state = ScaleState(65536.0, 0, schedule.hysteresis)
            tensors, flag = self._scale_tensors(state), data.scalar(0.0, self.device)
            for step in range(60):
                if step % 20 == 19:  # a checkpoint is loaded into the same tensors
                    state = ScaleState(1024.0, 1, 1)
                    for tensor, value in zip(vars(tensors).values(), state, strict=True):
                        tensor.data.fill_(value)
                state = self._judge_update(
                    state, float(chance.random() < 0.3), schedule, tensors=tensors, flag=flag
                )

    def test_update_from_every_kind_of_state(self) -> None:
        """Also states that only a loaded checkpoint has."""
        smallest = float32(1e-45 if self.keeps_subnormals else 1.2e-38)
        scales = [1.0, smallest, float32(3e38), float32(1.1e38), 0.0, 7.0, 50.0, 65536.0, 150.0]
        states = itertools.product(scales, (0, 1, 2, 9), (0, 1, 3), (0.0, 1.0))
        for number, (scale, tracker, left, found) in enumerate(states):
            for schedule in SCHEDULES if self.thorough else SCHEDULES[number % 4 :: 4]:
                self._judge_update(ScaleState(scale, tracker, left), found, schedule)

    def test_update_counts_far(self) -> None:
        """Steps and overflows are counted up to the largest int32; a larger count is taken for that."""
        for interval in (2000, 40_000, 3_000_000, _INT32, 2**31, 2**32, 2**32 + 1, 2**64, 10**30):
            schedule = LossScaleSchedule(growth_interval=interval)
            last = min(interval, _INT32) - 1
            for tracker in (0, 70_000, last - 2, last - 1, last, _INT32):
                self._judge_update(ScaleState(8.0, tracker), 0.0, schedule)
            self._judge_update(ScaleState(8.0, _INT32), 1.0, schedule)
        for number, (hysteresis, kind) in enumerate(itertools.product((40_000, 2**31, 2**64), Hysteresis)):
            schedule = LossScaleSchedule(growth_interval=3, hysteresis=hysteresis, hysteresis_kind=kind)
            for left, found in itertools.product((1, 70_000, _INT32), (0.0, 1.0)):
                self._judge_update(ScaleState(8.0, number % 3, left), found, schedule)

    def test_update_reads_each_schedule_anew(self) -> None:
        """Schedules are small objects: the next one may lie where the last one was."""
        for growth in (2.0, 3.0, 1.5):
            # Made together, these take the places of the last ones.
            schedules = [
                LossScaleSchedule(growth, growth_interval=interval, min_scale=floor)
                for interval, floor in itertools.product((1, 2, 5), (1.0, 7.0))
            ]
            for schedule, found in itertools.product(schedules, (0.0, 1.0)):
                self._judge_update(ScaleState(8.0, 1), found, schedule)
            del schedule, schedules

    def test_update_never_grows_past_float32(self) -> None:
        """Growth to inf is refused, whatever the ceiling; the interval starts anew. An inf stays one."""
        top = torch.finfo(torch.float32).max
        # The product is below the middle between `top` and the next power of two, in it, or above it.
        factors = (1 + 2.0**-26, 1 + 2.0**-25, 2.0, 1e300)
        scales = (2.0**127, float32(top / 3), top, math.inf)
        for scale, factor, ceiling in itertools.product(scales, factors, (math.inf, 3.3e38, 1e300)):
            schedule = LossScaleSchedule(factor, 1e-30, growth_interval=1, max_scale=ceiling)
            self._judge_update(ScaleState(scale), float(ceiling == 1e300), schedule)

    def test_update_reads_any_positive_flag(self) -> None:
        """A sum over devices may exceed 1; one element may have dimensions; NaN is not above zero."""
        values = (0.0, 1e-30, 1.0, 2.0, 17.0, math.inf, -1.0, -math.inf, math.nan)
        for found, shape in itertools.product(values, ((), (1,), (1, 1))):
            self._judge_update(ScaleState(8.0, 1), found, LossScaleSchedule(), shape)
        self._judge_update(ScaleState(8.0, 1999), math.nan, LossScaleSchedule())
