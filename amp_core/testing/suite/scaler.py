"""What `GradScaler` does with the backend's kernels."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from amp_core.scaling.grad_scaler import GradScaler
from amp_core.states.loss_scale import LossScaleSchedule, ScaleState, next_scale
from amp_core.testing.fixtures import BackendFixtures


class ScalerConformance(BackendFixtures):
    """The scaler's stages, its scale and its skipped steps, over several optimizers."""

    AREA = "scaler"

    def _scaler(self, **options: float) -> GradScaler:
        settings = {"init_scale": 8.0, "growth_interval": 3, **options}
        return GradScaler(self.device_type, **settings)  # type: ignore[arg-type]

    def _parameter(self, n: int = 3) -> tuple[torch.Tensor, torch.optim.Optimizer]:
        weight = torch.nn.Parameter(torch.ones(n, device=self.device))
        return weight, torch.optim.SGD([weight], lr=1.0)

    def _backward(self, scaler: GradScaler, weight: torch.Tensor, value: float) -> None:
        weight.grad = None
        scaler.scale((weight * value).sum()).backward()  # type: ignore[no-untyped-call]

    def _near(self, values: list[float]) -> Any:
        """Return what equals `values` but for the steps by which products may be off."""
        return pytest.approx(values, rel=self.product_ulps * 2.0**-22, abs=0.0)

    def _assert_weight(self, weight: torch.Tensor, values: list[float], what: str) -> None:
        found = weight.detach().cpu().tolist()
        assert found == self._near(values), f"the weight is {found}, not {values} ({what})"

    def test_scaler_is_admitted(self) -> None:
        """On a device that is there, an enabled scaler stays enabled."""
        refusal = self.backend.scaler_refusal()
        assert refusal is None, f"scaler_refusal() is {refusal}, but the device is there: return None"
        assert self._scaler().is_enabled(), "an enabled scaler was disabled"

    def test_scaler_steps_with_unscaled_gradients(self) -> None:
        """The weight moves by the true gradient, whatever the scale."""
        scaler = self._scaler()
        weight, optimizer = self._parameter()
        self._backward(scaler, weight, 0.25)
        _step(scaler, optimizer)
        self._assert_weight(weight, [0.75] * 3, "1 - 0.25")

    def test_scaler_skips_a_step_with_inf_or_nan(self) -> None:
        """The weight stays, the scale backs off."""
        for bad in (math.inf, -math.inf, math.nan):
            scaler = self._scaler()
            weight, optimizer = self._parameter()
            self._backward(scaler, weight, bad)
            _step(scaler, optimizer)
            assert weight.detach().cpu().tolist() == [1.0] * 3, f"stepped with {bad}"
            _assert_scale(scaler, 4.0, f"a gradient of {bad} at 8")

    def test_scaler_finds_one_bad_element_in_any_place(self) -> None:
        """One of 35 elements decides."""
        for position in range(35):
            scaler = self._scaler()
            weight, optimizer = self._parameter(35)
            self._backward(scaler, weight, 1.0)
            assert weight.grad is not None
            weight.grad[position] = math.inf
            _step(scaler, optimizer)
            _assert_scale(scaler, 4.0, f"an inf at element {position} of 35, at 8")

    def test_scaler_follows_the_state_machine(self) -> None:
        """A long history of finite and skipped steps gives the scale of `next_scale`."""
        scaler = self._scaler()
        weight, optimizer = self._parameter()
        state, schedule = ScaleState(8.0), LossScaleSchedule(growth_interval=3)
        for bad in (0, 0, 0, 1, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0):
            self._backward(scaler, weight, math.inf if bad else 0.0)
            _step(scaler, optimizer)
            state = next_scale(state, bool(bad), schedule)
            _assert_scale(scaler, state.scale, "a skipped step" if bad else "a finite step")

    def test_scaler_decides_per_optimizer(self) -> None:
        """One skips, the other steps; the shared scale backs off once."""
        for bad_one in (0, 1):
            scaler = self._scaler()
            pairs = [self._parameter(), self._parameter()]
            for index, (weight, _) in enumerate(pairs):
                self._backward(scaler, weight, math.inf if index == bad_one else 0.5)
            for _, optimizer in pairs:
                scaler.step(optimizer)
            scaler.update()
            expected = [1.0 if index == bad_one else 0.5 for index in (0, 1)]
            for number, ((weight, _), right) in enumerate(zip(pairs, expected, strict=True)):
                self._assert_weight(weight, [right] * 3, f"optimizer {number}, where {bad_one} skips")
            _assert_scale(scaler, 4.0, "one of two optimizers skipped at 8")

    def test_scaler_unscales_once(self) -> None:
        """`unscale_` shows the true gradient; `step` does not divide again; the stages are enforced."""
        scaler = self._scaler()
        weight, optimizer = self._parameter()
        self._backward(scaler, weight, 0.5)
        scaler.unscale_(optimizer)
        assert weight.grad is not None
        found = weight.grad.cpu().tolist()
        assert found == self._near([0.5] * 3), f"unscale_ left gradients of {found}, not 0.5"
        with pytest.raises(RuntimeError, match="already been called"):
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        with pytest.raises(RuntimeError, match="already been called"):
            scaler.step(optimizer)
        scaler.update()
        self._assert_weight(weight, [0.5] * 3, "1 - 0.5, unscaled once")

    def test_scaler_clips_by_the_true_norm(self) -> None:
        """The norm is that of the unscaled gradients, and the step is clipped to it."""
        scaler = self._scaler()
        weight, optimizer = self._parameter(4)
        self._backward(scaler, weight, 2.0)
        norm = scaler.clip_grad_norm_(optimizer, 1.0)
        _step(scaler, optimizer)
        right = pytest.approx(4.0, rel=max(1e-6, self.norm_rtol))
        assert float(norm) == right, f"the norm of four gradients of 2 is {float(norm)}, not 4"
        found = weight.detach().cpu().tolist()
        clipped = pytest.approx([0.5] * 4, abs=max(1e-4, self.norm_rtol))
        assert found == clipped, f"the weights after a step clipped to the norm 1 are {found}, not 0.5"

    def test_scaler_state_survives_a_checkpoint(self) -> None:
        """Scale and tracker are plain numbers that another scaler continues from."""
        scaler = self._scaler()
        weight, optimizer = self._parameter()
        for _ in range(2):
            self._backward(scaler, weight, 0.0)
            _step(scaler, optimizer)
        state = scaler.state_dict()
        saved = state["scale"], state["_growth_tracker"]
        assert saved == (8.0, 2), f"scale and growth tracker after two finite steps are {saved}"
        other = self._scaler(init_scale=1.0)
        other.load_state_dict(state)
        self._backward(other, weight, 0.0)
        _step(other, optimizer)
        _assert_scale(other, 16.0, "the third finite step, at 8 and two from a checkpoint")


def _step(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> None:
    scaler.step(optimizer)
    scaler.update()


def _assert_scale(scaler: GradScaler, right: float, after: str) -> None:
    found = scaler.get_scale()
    assert found == right, f"the scale is {found}, not {right}, after {after}"
