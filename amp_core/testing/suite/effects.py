"""Hooks and kernels as guests of the process: nothing is left behind, and many may call at once."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
import torch

from amp_core.kernels import Kernels, ScaleTensors
from amp_core.states.loss_scale import LossScaleSchedule
from amp_core.testing.fixtures import BackendFixtures
from amp_core.testing.suite import data


class Setting(NamedTuple):
    """Something of torch's that belongs to the caller, and values to try it with."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], Any]
    values: Sequence[Any]


def _flushes() -> bool:
    return float(torch.full((1,), 1e-40).mul_(1.0)) == 0.0


class EffectsConformance(BackendFixtures):
    """Hooks and kernels leave the process as it was, and may be called by many threads at once."""

    AREA = "effects"

    def _calls(self) -> dict[str, Callable[[], Any]]:
        grads = [torch.ones(5, device=self.device), torch.ones(3, 2, device=self.device)]
        totals = [g.clone() for g in grads]
        one, flag = data.scalar(1.0, self.device), data.scalar(0.0, self.device)
        counts = [torch.tensor(1, dtype=torch.int32).to(self.device) for _ in range(2)]
        state = ScaleTensors(one.clone(), *counts)
        return {
            "availability": self.backend.availability,
            "default_dtype": self.backend.default_dtype,
            "supported_dtypes": self.backend.supported_dtypes,
            "autocast_refusal": lambda: self.backend.autocast_refusal(torch.int32),
            "scaler_refusal": self.backend.scaler_refusal,
            "op_policy": self.backend.op_policy,
            "kernels": self.backend.kernels,
            "layout": lambda: self.kernels.layout(grads),
            "prepare": lambda: self.kernels.prepare(grads),
            "cast": lambda: self.kernels.cast(grads, torch.bfloat16),
            "add_": lambda: self.kernels.add_(totals, grads),
            "grad_stats": lambda: self.kernels.grad_stats(grads),
            "multiply_": lambda: self.kernels.multiply_(grads, one, flag),
            "update_scale_": lambda: self.kernels.update_scale_(state, flag, LossScaleSchedule()),
        }

    def test_hooks_leave_torchs_state_as_it_was(self) -> None:
        """What belongs to the caller is as the caller set it, whatever it was set to."""
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                for setting in self._settings():
                    self._try(setting)

    def _try(self, setting: Setting) -> None:
        before = setting.read()
        try:
            for value in setting.values:
                for name, call in self._calls().items():
                    setting.write(value)
                    call()
                    found = setting.read()
                    assert found == value, f"{name} changed {setting.name} from {value} to {found}"
        finally:
            setting.write(before)

    def test_hooks_draw_no_random_numbers(self) -> None:
        """A training run would not be repeatable, or differ with the kernels."""
        for grad in (True, False):
            for name, call in self._calls().items():
                before = torch.get_rng_state()
                with torch.set_grad_enabled(grad):
                    call()
                assert torch.equal(torch.get_rng_state(), before), f"{name} drew from torch's generator"

    def test_hooks_say_nothing_once_they_have_run(self, capfd: pytest.CaptureFixture[str]) -> None:
        """They run at every step: a line or a warning each time would bury all others."""
        for call in self._calls().values():
            call()
        for name, call in self._calls().items():
            capfd.readouterr()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                call()
            assert not caught, f"{name} warns each time: {caught[0].message}"
            assert not any(capfd.readouterr()), f"{name} prints each time"

    def _settings(self) -> list[Setting]:
        kind, both = self.device_type, (True, False)
        # Where torch has no autocast of its own, only a region makes its key passable.
        regions = both if self.default_dtype_is_torchs else (False,)
        found = [
            Setting("grad mode", torch.is_grad_enabled, torch.set_grad_enabled, both),
            Setting("inference mode", torch.is_inference_mode_enabled, lambda _: None, (False,)),
            Setting(
                "autocast",
                lambda: torch.is_autocast_enabled(kind),
                lambda value: torch.set_autocast_enabled(kind, value),
                regions,
            ),
            Setting(
                "autocast's dtype",
                lambda: torch.get_autocast_dtype(kind),
                lambda value: torch.set_autocast_dtype(kind, value),
                self.backend.supported_dtypes(),
            ),
            Setting(
                "autocast's cache", torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled, both
            ),
            Setting(
                "the default dtype",
                torch.get_default_dtype,
                torch.set_default_dtype,
                (torch.float16, torch.float32),
            ),
            Setting("the number of threads", torch.get_num_threads, torch.set_num_threads, (1, 2, 3)),
            Setting(
                "the precision of float32 products",
                torch.get_float32_matmul_precision,
                torch.set_float32_matmul_precision,
                ("high", "highest"),
            ),
            Setting(
                "deterministic algorithms",
                torch.are_deterministic_algorithms_enabled,
                torch.use_deterministic_algorithms,
                (False,),
            ),
        ]
        if torch.set_flush_denormal(_flushes()):  # which says whether the host can
            found.append(Setting("the flushing of subnormals", _flushes, torch.set_flush_denormal, (False,)))
        return found

    def test_hooks_leave_no_thread_behind(self) -> None:
        """A thread per call ends in a full process; one that lives on is a leak."""
        for call in self._calls().values():
            call()
        before = set(threading.enumerate())
        for name, call in self._calls().items():
            for _ in range(3):
                call()
            started = set(threading.enumerate()) - before
            for thread in started:
                thread.join(0.05)  # one that is just ending is none that is left
            left = sorted(thread.name for thread in started if thread.is_alive())
            assert not left, f"{name} left threads running: {', '.join(left)}"

    def test_kernels_serve_many_threads_at_once(self) -> None:
        """Each caller's result is its own, whoever else calls."""

        def work(value: int) -> tuple[float, ...]:
            grads = [torch.full((n,), float(value)).to(self.device) for n in (4, 64, 1000)]
            for _ in range(5):
                norm = float(self.kernels.grad_stats(grads[:1]).norm)
                low = float(self.kernels.cast(grads, torch.bfloat16)[1].float().sum())
            flag = data.scalar(0.0, self.device)
            self.kernels.multiply_(grads, data.scalar(0.5, self.device), flag)
            self.kernels.add_(grads[:2], grads[:2])
            half, full = float(grads[2].sum()) / 500, float(grads[1].sum()) / 64
            return norm, low / 64, half, full, self._scale_after(value)

        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(work, range(1, 33)))
        for value, results in enumerate(found, 1):
            assert results == pytest.approx((2 * value, value, value, value, value / 2)), f"caller {value}"

    def _scale_after(self, value: int) -> float:
        """Return the scale after an overflow at a scale of `value`."""
        counts = [torch.tensor(c, dtype=torch.int32).to(self.device) for c in (0, 1)]
        state = ScaleTensors(data.scalar(float(value), self.device), *counts)
        self.kernels.update_scale_(state, data.scalar(1.0, self.device), LossScaleSchedule())
        return float(state.scale)

    def test_hooks_answer_many_threads_at_once(self) -> None:
        """Regions are built in worker threads: each gets the answer that it would get alone."""

        def ask() -> tuple[Any, ...]:
            backend = self.backend
            return (
                backend.availability(),
                backend.default_dtype(),
                backend.supported_dtypes(),
                backend.autocast_refusal(torch.int32),
                backend.scaler_refusal(),
                backend.op_policy(),
            )

        alone = ask()
        with ThreadPoolExecutor(4) as pool:
            for answers in pool.map(lambda _: ask(), range(32)):
                assert answers == alone

    def test_kernels_are_named(self) -> None:
        """``amp backends`` shows the name, and the reason where there is one."""
        kernels = self.kernels
        assert isinstance(kernels, Kernels)
        assert isinstance(kernels.name, str)
        assert kernels.name
        assert isinstance(kernels.reason, str)

    def test_kernels_are_made_once(self) -> None:
        """They are asked for at every step; what they keep from step to step would be lost."""
        assert self.backend.kernels() is self.backend.kernels()
