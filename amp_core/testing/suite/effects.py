"""Hooks and kernels as guests of the process: nothing is left behind, and many may call at once."""

from __future__ import annotations

import os
import random
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, cast

import pytest
import torch

from amp_core.kernels import Kernels
from amp_core.regions.region import autocast
from amp_core.states.loss_scale import LossScaleSchedule, ScaleState
from amp_core.testing.suite import data
from amp_core.testing.suite.judge import Judge
from amp_core.testing.suite.threads import Judged, interleave


class Setting(NamedTuple):
    """Something that belongs to the caller, and values to try it with."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], Any]
    values: Sequence[Any]


def _flushes() -> bool:
    return float(torch.full((1,), 1e-40).mul_(1.0)) == 0.0


class EffectsConformance(Judge):
    """Hooks and kernels leave the process as it was, and may be called by many threads at once."""

    AREA = "effects"

    def _hooks_and_kernels(self) -> dict[str, Callable[[], Any]]:
        grads = [torch.ones(5, device=self.device), torch.ones(3, 2, device=self.device)]
        return {**data.queries(self.backend), **self._kernel_calls(grads)}

    def test_hooks_leave_torchs_state_as_it_was(self) -> None:
        """What belongs to the caller is as the caller set it, whatever it was set to."""
        for grad in (True, False):
            with torch.set_grad_enabled(grad), warnings.catch_warnings():
                calls = self._hooks_and_kernels()
                for setting in self._settings():
                    self._try(setting, calls)

    def _try(self, setting: Setting, calls: dict[str, Callable[[], Any]]) -> None:
        original = setting.read()
        try:
            for value in setting.values:
                for name, call in calls.items():
                    setting.write(value)
                    before = setting.read()
                    call()
                    after = setting.read()
                    assert after == before, f"{name} changed {setting.name}: {before!r:.80} to {after!r:.80}"
        finally:
            setting.write(original)

    def test_hooks_keep_the_casts_of_a_region(self) -> None:
        """A region casts each weight once; a call that clears its cache makes it cast them again."""
        weight = torch.ones(4, 4, device=self.device, requires_grad=True)
        with autocast(self.device_type):
            x = torch.ones(4, 4, device=self.device).to(self.backend.default_dtype())
            for name, call in {"nothing": list, **self._hooks_and_kernels()}.items():
                (x @ weight).sum()
                call()
                with data.device_work(self.device) as ops:
                    x @ weight
                casts = [op for op in ops if "_to_copy" in op]
                if casts and name == "nothing":
                    pytest.skip(
                        f"torch keeps no casts in regions on {self.device_type}, so none can be cleared"
                    )
                assert not casts, f"{name} cleared the casts of the region"

    def test_kernels_do_not_wait_for_the_device(self) -> None:
        """The host must read no value, whether something is bad or not."""
        for value in (1.0, torch.inf):
            calls = self._kernel_calls(
                [torch.full((5,), value, dtype=d).to(self.device) for d in self.dtypes()]
            )
            for name, call in calls.items():
                call()
                with data.waits(self.device) as seen:
                    call()
                assert not seen, f"{name} waits for the device: {seen[0]}"

    def test_hooks_say_nothing_once_they_have_run(self, capfd: pytest.CaptureFixture[str]) -> None:
        """They run at every step: a line or a warning each time would bury all others."""
        for call in self._hooks_and_kernels().values():
            call()
        for name, call in self._hooks_and_kernels().items():
            capfd.readouterr()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                call()
            assert not caught, f"{name} warns each time: {caught[0].message}"
            assert not any(capfd.readouterr()), f"{name} prints each time"

    def _settings(self) -> list[Setting]:
        kind, both = self.device_type, (True, False)
        module = torch.get_device_module(self.device)
        # Where torch has no autocast of its own, only a region makes its key passable.
        regions = both if self.default_dtype_is_torchs else (False,)
        settings = [
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
            Setting(
                "the default device",
                torch.get_default_device,
                lambda device: torch.set_default_device(None if str(device) == "cpu" else device),
                ("meta", "cpu"),
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
            # Not the state alone: a call that seeds would find the state that the one before it left.
            Setting(
                "torch's generator", lambda: torch.get_rng_state().tolist(), _seed(torch.manual_seed), (1, 2)
            ),
            Setting("Python's generator", random.getstate, _seed(random.seed, random.setstate), (1, 2)),
            Setting(
                "the warnings filters", lambda: list(warnings.filters), _set_filters, ("always", "default")
            ),
            Setting("the environment", lambda: dict(os.environ), lambda _: None, (0,)),
        ]
        if hasattr(module, "get_rng_state") and hasattr(module, "manual_seed_all") and kind != "cpu":
            settings.append(
                Setting("the device's generator", self._generator, _seed(module.manual_seed_all), (1, 2))
            )
        if hasattr(module, "set_device") and kind != "cpu":
            devices = range(module.device_count())
            settings.append(Setting("the current device", module.current_device, module.set_device, devices))
        if torch.set_flush_denormal(_flushes()):  # which says whether the host can
            settings.append(
                Setting("the flushing of subnormals", _flushes, torch.set_flush_denormal, (False,))
            )
        return settings

    def _generator(self) -> list[int]:
        read = torch.get_device_module(self.device).get_rng_state
        try:
            state = read()
        except TypeError:  # some devices have no default for the device
            state = read(torch.empty(0, device=self.device).device)
        return cast("list[int]", state.tolist())

    def test_hooks_leave_no_thread_behind(self) -> None:
        """A thread per call ends in a full process; one that lives on is a leak."""
        for call in self._hooks_and_kernels().values():
            call()
        before = set(threading.enumerate())
        for name, call in self._hooks_and_kernels().items():
            for _ in range(3):
                call()
            started = set(threading.enumerate()) - before
            for thread in started:
                thread.join(0.05)  # one that is just ending is none that is left
            left = sorted(thread.name for thread in started if thread.is_alive())
            assert not left, f"{name} left threads running: {', '.join(left)}"

    def test_kernels_serve_many_threads_at_once(self) -> None:
        """Another thread's call at any point of a call changes neither result."""
        for name in ("cast", "add_", "grad_stats", "multiply_", "update_scale_"):
            interleave(lambda number, name=name: self._judged(name, number), 10_000 if self.thorough else 80)  # type: ignore[misc]

    def _judged(self, name: str, number: int) -> Judged:
        tensors = [torch.full((n,), float(number + 2), device=self.device) for n in (5, 33)]
        tensors[0][number] = torch.inf if number % 2 else 1.0

        def run(context: Any) -> None:
            judge = type(self)()
            judge._context = context  # type: ignore[attr-defined]
            if name == "cast":
                judge._judge_cast(tensors, self.backend.default_dtype())
            elif name == "grad_stats":
                judge._judge_stats(tensors, (2.0, 2.0, 3.0, torch.inf)[number])
            elif name == "multiply_":
                judge._judge_multiply(tensors, 0.5**number)
            elif name == "add_":
                judge._judge_add([t.clone() for t in tensors], tensors)
            else:
                schedule = LossScaleSchedule(growth_interval=2 + number)
                judge._judge_update(ScaleState(8.0 + number, 1), number % 2, schedule)

        return run

    def _answers(self) -> dict[str, Any]:
        answers = {name: ask() for name, ask in data.queries(self.backend).items()}
        # A reason may contain live data, such as the bytes that are free.
        return {**answers, "availability": answers["availability"].usable}

    def test_hooks_answer_many_threads_at_once(self) -> None:
        """Regions are built in worker threads: each gets the answer that it would get alone."""
        alone = self._answers()

        def run(context: Any) -> None:
            with context():
                answers = self._answers()
            assert answers == alone

        interleave(lambda _: run, 10_000 if self.thorough else 200)

    def test_hooks_answer_alike_in_every_context(self) -> None:
        """A region that is built inside another one, or without gradients, computes as outside."""
        alone = self._answers()
        contexts: dict[str, AbstractContextManager[Any]] = {
            "no_grad": torch.no_grad(),
            "inference mode": torch.inference_mode(),
            "a region": autocast(self.device_type),
        }
        for name, context in contexts.items():
            with context:
                assert self._answers() == alone, f"the hooks answer otherwise in {name}"

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


def _seed(seed: Callable[[int], Any], restore: Callable[[Any], Any] | None = None) -> Callable[[Any], Any]:
    """Return a writer of a generator: from a number, or from the state that was read."""

    def write(value: Any) -> None:
        if isinstance(value, int):
            seed(value)
        elif restore is not None:
            restore(value)

    return write


def _set_filters(value: Any) -> None:
    warnings.resetwarnings()
    if isinstance(value, str):
        warnings.simplefilter(value)  # type: ignore[arg-type]
