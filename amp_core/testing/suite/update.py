"""What `Kernels.update_scale_` must do."""

from __future__ import annotations

import itertools
import random

import torch

from amp_core.kernels import ScaleTensors
from amp_core.states.loss_scale import Hysteresis, LossScaleSchedule, ScaleState, float32, next_scale
from amp_core.testing.fixtures import BackendFixtures
from amp_core.testing.suite import data

SCHEDULES = (
    LossScaleSchedule(growth_interval=3),
    LossScaleSchedule(growth_factor=1.7, backoff_factor=0.3, growth_interval=2),
    LossScaleSchedule(growth_interval=1, min_scale=8.0, max_scale=100.0),
    *(
        LossScaleSchedule(growth_interval=3, hysteresis=h, hysteresis_kind=k)
        for h in (2, 3)
        for k in Hysteresis
    ),
)


class UpdateConformance(BackendFixtures):
    """The scale moves on the device exactly as `amp_core.states.loss_scale.next_scale` says."""

    AREA = "update"

    def _tensors(self, state: ScaleState) -> ScaleTensors:
        scale = data.scalar(state.scale, self.device)
        counts = (state.growth_tracker, state.hysteresis_left)
        return ScaleTensors(scale, *(torch.tensor(c, dtype=torch.int32).to(self.device) for c in counts))

    def _advance(
        self, state: ScaleState, found: float, schedule: LossScaleSchedule, shape: tuple[int, ...] = ()
    ) -> ScaleState:
        tensors = self._tensors(state)
        self.kernels.update_scale_(tensors, data.scalar(found, self.device, shape), schedule)
        return _read(tensors)

    def test_update_follows_the_schedule_through_long_histories(self) -> None:
        """Growth after the interval, backoff at once, every kind of hysteresis, bit for bit."""
        chance = random.Random(5)
        for schedule in SCHEDULES:
            state = ScaleState(65536.0, 0, schedule.hysteresis)
            tensors = self._tensors(state)
            for step in range(60):
                found = chance.random() < 0.3
                self.kernels.update_scale_(tensors, data.scalar(float(found), self.device), schedule)
                state = next_scale(state, found, schedule)
                assert _read(tensors) == state, f"step {step}, found_inf={found}, {schedule}"

    def test_update_from_every_kind_of_state(self) -> None:
        """Also states that only a loaded checkpoint has."""
        scales = [1.0, float32(1e-45), float32(3e38), float32(1.1e38), 0.0, 7.0, 50.0, 65536.0, 150.0]
        for scale, tracker, left, found in itertools.product(scales, (0, 1, 2, 9), (0, 1, 3), (0.0, 1.0)):
            for schedule in SCHEDULES:
                before = ScaleState(scale, tracker, left)
                expected = next_scale(before, found > 0, schedule)
                assert self._advance(before, found, schedule) == expected, (before, found, schedule)

    def test_update_counts_far(self) -> None:
        """Steps in a row are counted up to any interval, not only as far as a narrow integer goes."""
        for interval in (2000, 40_000, 2**31 - 1):
            schedule = LossScaleSchedule(growth_interval=interval)
            for tracker in (interval - 3, interval - 2, interval - 1):
                before = ScaleState(8.0, tracker, 1)
                expected = next_scale(before, False, schedule)
                assert self._advance(before, 0.0, schedule) == expected, f"{tracker} of {interval} steps"

    def test_update_never_grows_past_float32(self) -> None:
        """Growth to inf is refused; the interval starts anew."""
        schedule = LossScaleSchedule(growth_interval=1)
        top = float32(2.0**127)
        assert self._advance(ScaleState(top), 0.0, schedule) == ScaleState(top, 0, 1)

    def test_update_reads_any_positive_flag(self) -> None:
        """A sum over devices may exceed 1; one element may have one dimension."""
        for found in (1.0, 2.0, 17.0):
            for shape in ((), (1,)):
                assert self._advance(ScaleState(8.0, 1), found, LossScaleSchedule(), shape).scale == 4.0
        assert self._advance(ScaleState(8.0, 1), 0.0, LossScaleSchedule(), (1,)) == ScaleState(8.0, 2, 1)

    def test_update_writes_the_state_alone(self) -> None:
        """The flag is read; shapes, dtypes and identity of the state stay and its versions move."""
        tensors, flag = self._tensors(ScaleState(8.0, 0)), data.scalar(1.0, self.device)
        before, flag_before = data.versions(*vars(tensors).values()), flag._version
        self.kernels.update_scale_(tensors, flag, LossScaleSchedule(growth_interval=1))
        assert [t.dtype for t in vars(tensors).values()] == [torch.float32, torch.int32, torch.int32]
        assert [t.shape for t in vars(tensors).values()] == [torch.Size()] * 3
        assert tensors.scale._version > before[0], "the scale changed without its version counter"
        assert float(flag) == 1.0, "update_scale_ wrote to the flag"
        assert flag._version == flag_before, "update_scale_ moved the version counter of the flag"

    def test_update_does_not_wait_for_the_device(self) -> None:
        """The host must not read the flag or the scale."""
        tensors = self._tensors(ScaleState(8.0))
        for found in (0.0, 1.0):
            flag = data.scalar(found, self.device)
            for schedule in SCHEDULES:
                with data.waits(self.device) as seen:
                    self.kernels.update_scale_(tensors, flag, schedule)
                assert seen == []


def _read(tensors: ScaleTensors) -> ScaleState:
    return ScaleState(float(tensors.scale), int(tensors.growth_tracker), int(tensors.hysteresis_left))
