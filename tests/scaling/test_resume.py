"""A run that is saved and resumed at any step goes on bit for bit; skipped steps change no bit."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from amp_core import GradScaler, LossScaleSchedule

from ..drawn import examples

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "adamw fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "sgd fused": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
}
schedules = st.builds(
    LossScaleSchedule,
    growth_factor=st.sampled_from([2.0, 1.7]),
    backoff_factor=st.sampled_from([0.5, 0.3]),
    growth_interval=st.integers(1, 3),
    min_scale=st.sampled_from([2.0**-126, 64.0]),
    max_scale=st.sampled_from([math.inf, 4096.0]),
    hysteresis=st.integers(1, 3),
    hysteresis_kind=st.sampled_from(["budget", "consecutive", "every"]),
)


class Run:
    """A small model with everything that a checkpoint of it holds."""

    def __init__(self, kind: str, schedule: LossScaleSchedule) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(3, 2)
        self.optimizer = OPTIMIZERS[kind](self.model.parameters())
        self.scaler = GradScaler("cpu", 300.0, schedule=schedule, warn_after=0)

    def step(self, number: int, bad: bool, key: str | None, max_norm: float | None) -> None:
        self.optimizer.zero_grad()
        inputs = torch.full((4, 3), 0.1 + number)
        self.scaler.scale(self.model(inputs).square().mean(), key=key).backward()
        if bad:
            self.model.bias.grad[number % 2] = math.inf
        before = self.everything()
        self.scaler.step(self.optimizer, max_norm=max_norm, key=key)
        if bad:
            self.check_untouched(before)
        self.scaler.update()

    def check_untouched(self, before: dict[str, Any]) -> None:
        after = self.everything()
        torch.testing.assert_close(after["model"], before["model"], rtol=0, atol=0)
        known = before["optimizer"]["state"]
        for index, state in after["optimizer"]["state"].items():
            if index in known:
                torch.testing.assert_close(state, known[index], rtol=0, atol=0)
            else:  # a fused optimizer makes its state before it skips
                assert not any(value.any() for value in state.values())

    def everything(self) -> dict[str, Any]:
        saved = io.BytesIO()
        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, saved)
        saved.seek(0)
        return torch.load(saved, weights_only=True)

    def resumed(self, kind: str) -> Run:
        """Return a run from a checkpoint alone: whose schedule is the default until it is loaded."""
        file = io.BytesIO()
        torch.save({**self.everything(), "scaler": self.scaler.state_dict()}, file)
        file.seek(0)
        state = torch.load(file, weights_only=True)
        other = Run(kind, LossScaleSchedule())
        other.model.load_state_dict(state["model"])
        other.optimizer.load_state_dict(state["optimizer"])
        other.scaler.load_state_dict(state["scaler"])
        return other


steps = st.lists(
    st.tuples(st.booleans(), st.sampled_from([None, "g"]), st.sampled_from([None, 0.5])), max_size=10
)


@pytest.mark.filterwarnings("ignore::amp_core.ScaleFloorWarning")
@pytest.mark.parametrize("kind", OPTIMIZERS)
@examples(25)
@given(schedule=schedules, steps=steps, data=st.data())
def test_a_resumed_run_goes_on_bit_for_bit(
    kind: str, schedule: LossScaleSchedule, steps: Any, data: Any
) -> None:
    """A checkpoint forgets a part of the state: a count, a budget, the schedule, a key."""
    through, broken = Run(kind, schedule), Run(kind, schedule)
    at = data.draw(st.integers(0, len(steps)))
    for number, (bad, key, max_norm) in enumerate(steps):
        if number == at:
            broken = broken.resumed(kind)
        through.step(number, bad, key, max_norm)
        broken.step(number, bad, key, max_norm)
        assert all(map(torch.equal, through.model.parameters(), broken.model.parameters()))
        assert through.scaler.state_dict() == broken.scaler.state_dict()
