"""Hooks and kernels as guests of the process: nothing is left behind, and many may call at once."""

from __future__ import annotations

import itertools
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

from amp_core.kernels import Kernels, ScaledProducts
from amp_core.plugin import Availability, Refusal
from amp_core.regions.region import autocast
from amp_core.states.loss_scale import LossScaleSchedule, ScaleState
from amp_core.testing.suite import data
from amp_core.testing.suite import tensors as space
from amp_core.testing.suite.judge import Judge
from amp_core.testing.suite.processes import open_files, wrong_in_a_child
from amp_core.testing.suite.settings import PROCESS_WIDE, change, settings
from amp_core.testing.suite.settings_of_python import Setting
from amp_core.testing.suite.threads import Judged, interleave


class EffectsConformance(Judge):
    """Hooks and kernels leave the process as it was, and may be called by many threads at once."""

    AREA = "effects"

    def _hooks_and_kernels(self) -> dict[str, Callable[[], Any]]:
        grads = [torch.ones(5, device=self.device), torch.ones(3, 2, device=self.device)]
        return {**data.queries(self.backend), **self._kernel_calls(grads)}

    def test_hooks_leave_torchs_state_as_it_was(self) -> None:
        """Every setting that belongs to the caller stays as the caller set it, whatever its value."""
        owned = settings(self)
        with warnings.catch_warnings():
            for turn in range(max(4, *(len(setting.values) for setting in owned))):
                # At half the pace, both grad modes meet every value of the other settings.
                steps = [turn // 2 if setting.name == "grad mode" else turn for setting in owned]
                chosen = zip(owned, steps, strict=True)
                self._try([(setting, setting.values[step % len(setting.values)]) for setting, step in chosen])
        self._judge_what_changes_meanwhile()

    def _try(self, chosen: list[tuple[Setting, Any]]) -> None:
        calls = self._hooks_and_kernels()
        originals = [(setting, setting.read()) for setting, _ in chosen]
        try:
            for name, call in calls.items():
                for setting, value in chosen:
                    setting.write(value)
                before = [setting.read() for setting, _ in chosen]
                try:
                    call()
                except Exception as error:
                    where = ", ".join(f"{setting.name} {value}" for setting, value in chosen)
                    raise AssertionError(f"{name} fails where the caller has {where}") from error
                for (setting, _), old in zip(chosen, before, strict=True):
                    new = setting.read()
                    assert new == old, f"{name} changed {change(setting, old, new)}"
        finally:
            for setting, original in reversed(originals):
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
        """The host must read no value, whether or not the list has a bad element, and in every layout."""
        for value in (1.0, torch.inf):
            full = [torch.full((5,), value, dtype=d).to(self.device) for d in self.dtypes()]
            self._assert_no_waits(self._kernel_calls(full), f"for elements of {value}")
        others = [layout for layout in self._layouts() if layout not in space.DENSE]
        for layouts in (space.DENSE, others):
            specs = space.rotated(self.dtypes(), layouts, [*space.SHAPES, (1100,)])
            calls = self._kernel_calls([spec.build(self.device) for spec in specs])
            del calls["quantize"], calls["quantize(seed=, amax=)"], calls["update_scale_"]  # judged above
            self._assert_no_waits(calls, f"for {', '.join(layouts)}")
        if self.supports_complex:
            specs = space.rotated(self._gradient_dtypes()[-2:], self._layouts())
            calls = self._kernel_calls([spec.build(self.device) for spec in specs if spec.dtype.is_complex])
            of_complex = {n: c for n, c in calls.items() if n.startswith(("grad_stats", "multiply_"))}
            self._assert_no_waits(of_complex, "for complex numbers")

    def _assert_no_waits(self, calls: dict[str, Callable[[], Any]], what: str) -> None:
        for name, call in calls.items():
            call()
            with data.waits(self.device) as seen:
                call()
            assert not seen, f"{name} waits for the device {what}: {seen[0]}"

    def test_hooks_say_nothing_once_they_have_run(self, capfd: pytest.CaptureFixture[str]) -> None:
        """They run at every step: a line or a warning each time would bury all other output."""
        for call in self._hooks_and_kernels().values():
            call()
        for name, call in self._hooks_and_kernels().items():
            capfd.readouterr()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                call()
            assert not caught, f"{name} warns each time: {caught[0].message}"
            assert not any(capfd.readouterr()), f"{name} prints each time"

    def test_hooks_leave_no_thread_behind(self) -> None:
        """A thread that outlives its call is a leak: one per call would in the end exhaust the process."""
        for call in self._hooks_and_kernels().values():
            call()
        before = set(threading.enumerate())
        for name, call in self._hooks_and_kernels().items():
            for _ in range(3):
                call()
            started = set(threading.enumerate()) - before
            for thread in started:
                thread.join(0.05)  # a thread that is just ending is no leak
            left = sorted(thread.name for thread in started if thread.is_alive())
            assert not left, f"{name} left threads running: {', '.join(left)}"

    def test_hooks_leave_no_file_open(self) -> None:
        """One more for each call, as of a driver's control file, would in the end exhaust the process."""
        for call in self._hooks_and_kernels().values():
            call()
        for name, call in self._hooks_and_kernels().items():
            before = open_files()
            for _ in range(3):
                call()
            left = open_files() - before
            assert left < 3, (
                f"3 calls of {name} left {left} files open: close them, or keep one for all calls"
            )

    def test_hooks_work_in_a_forked_process(self) -> None:
        """`DataLoader` forks its workers. Threads stay behind, with the locks that they hold."""
        self.requires("supports_forks")
        calls = self._hooks_and_kernels()
        for call in calls.values():
            call()
        wrong = wrong_in_a_child(calls)
        assert not wrong, (
            f"{wrong} in a forked process: start threads anew there, with os.register_at_fork, or do without"
        )

    def test_kernels_serve_many_threads_at_once(self) -> None:
        """Another thread's call at any point of a call changes neither result."""
        for name in ("cast", "add_", "grad_stats", "multiply_", "update_scale_"):
            turns = itertools.count(1)

            def make(number: int, name: str = name, turns: Iterator[int] = turns) -> Judged:
                # New sizes each turn: what is built for a size must be complete for the other thread.
                self._turn = next(turns) if number else self._turn  # the interrupting call is made first
                return self._judged(name, number, self._turn)

            interleave(make, 10_000 if self.thorough else 80)

    def _judged(self, name: str, number: int, turn: int) -> Judged:
        """Return a call; that of number 3 shares its dtype, order or schedule with that of number 0."""
        tensors = [torch.full((n + turn,), float(number + 2), device=self.device) for n in (5, 33)]
        tensors[0][number] = torch.inf if number % 2 else 1.0
        kinds = (*self.backend.supported_dtypes()[:1], torch.float32, *self.backend.supported_dtypes()[-1:])

        def run(context: Any) -> None:
            judge = type(self)()
            judge._context = context
            if name == "cast":
                is_given = turn % 2 and number != 3  # `out` decides the dtype, which those two share
                out = [torch.empty_like(t) for t in tensors] if is_given else None
                judge._judge_cast(tensors, kinds[number % 3], out)
            elif name == "grad_stats":
                judge._judge_stats(tensors, (2.0, 3.0, torch.inf)[number % 3])
            elif name == "multiply_":
                judge._judge_multiply(tensors, 0.5**number)
            elif name == "add_":
                judge._judge_add([t.clone() for t in tensors], tensors)
            else:
                schedule = LossScaleSchedule(growth_interval=2 + number % 3 + 3 * turn)
                # Number 0 is at the end of its interval; number 3, of the same schedule, is not.
                state = ScaleState(8.0 + number, (number != 3) + 3 * turn)
                judge._judge_update(state, number == 1, schedule)

        return run

    def _judge_what_changes_meanwhile(self) -> None:
        """Other threads see a setting that is changed only for a moment, and compute with it."""
        shared = [s for s in settings(self) if s.name in PROCESS_WIDE]

        def read(_: Any = None) -> None:
            values.append([s.read() for s in shared])

        values: list[Any] = []
        thread = threading.Thread(target=read)  # some settings are each thread's own
        thread.start()
        thread.join()
        for name, call in self._hooks_and_kernels().items():
            call()

            def run(context: Any, call: Callable[[], Any] = call) -> None:
                with context():
                    call()

            def look(context: Any, name: str = name) -> None:
                with context():
                    read()
                for setting, before, now in zip(shared, values[0], values.pop(), strict=True):
                    assert now == before, f"{name} sets {setting.name} for a moment: {now!r:.80}"

            interleave(lambda number, run=run, look=look: look if number else run, 6)  # type: ignore[misc]

    def _answers(self) -> dict[str, Any]:
        return {name: _lasting(ask()) for name, ask in data.queries(self.backend).items()}

    def test_hooks_answer_many_threads_at_once(self) -> None:
        """Regions are built in worker threads, too: each thread gets the answer that it would get alone."""
        alone = self._answers()

        def run(context: Any) -> None:
            with context():
                answers = self._answers()
            other = {hook: (alone[hook], answer) for hook, answer in answers.items() if answer != alone[hook]}
            assert not other, f"hooks answer otherwise while another thread asks (alone, there): {other}"

        interleave(lambda _: run, 10_000 if self.thorough else 100)

    def test_hooks_answer_alike_in_every_context(self) -> None:
        """A region that is built inside another one, or without gradients, computes as outside."""
        alone = self._answers()
        contexts: dict[str, AbstractContextManager[Any]] = {
            "no_grad": torch.no_grad(),
            "inference mode": torch.inference_mode(),
            "a region": autocast(self.device_type),
            "a disabled region": autocast(self.device_type, enabled=False),
            "a program with another default dtype": data.default_dtype(torch.float64),
            "a program with another default device": torch.device("meta"),
        }
        for name, context in contexts.items():
            with context:
                answers = self._answers()
            other = {hook: (alone[hook], answer) for hook, answer in answers.items() if answer != alone[hook]}
            assert not other, f"hooks answer otherwise in {name} (alone, there): {other}"

    def test_kernels_are_named(self) -> None:
        """``amp backends`` shows the name, and the reason where there is one."""
        kernels = self.kernels
        assert isinstance(kernels, Kernels)
        for attribute in ("name", "reason"):
            text = getattr(kernels, attribute)
            assert isinstance(text, str), f"{attribute} of the kernels is {text!r}, not a string"
        assert kernels.name, "the name of the kernels is empty"

    def test_kernels_are_made_once(self) -> None:
        """They are asked for at every step; what they keep from step to step would be lost."""
        once = self.backend.kernels() is self.backend.kernels()
        assert once, "kernels() makes a new object each time: make it once, such as at the module's level"


def _lasting(answer: Any) -> Any:
    """Return the part of an answer that may not change; numbers may, such as that of free bytes."""
    if isinstance(answer, tuple):
        return tuple(map(_lasting, answer))
    if isinstance(answer, Availability):
        return answer.usable
    if isinstance(answer, ScaledProducts):  # it may be made anew each time
        return type(answer)
    if isinstance(answer, Refusal):
        return data.wording(answer.message), answer.error
    return data.wording(answer) if isinstance(answer, str) else answer
