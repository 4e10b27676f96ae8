"""What each judged call must leave alone: references to its arguments, the caller's settings."""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Iterator, Sequence

import pytest
from torch import Tensor

from amp_core.testing.fixtures import BackendFixtures
from amp_core.testing.suite.settings import change, settings

_UNSTABLE = (
    "the environment", "the search path of modules", "the hooks for errors", "the device's generator"
)  # fmt: skip


class Manners(BackendFixtures):
    """Watches what `EffectsConformance` tries on purpose, in all checks and with all of their arguments."""

    _caught: Sequence[warnings.WarningMessage] = ()

    @pytest.fixture(autouse=True)
    def _leaves_the_process_as_it_was(self) -> Iterator[None]:
        """Compare what belongs to the caller before and after the check, and record warnings in it."""
        # Not what the first use of a library may change, nor what `EffectsConformance` cannot put back.
        everything = [setting for setting in settings(self) if setting.name not in _UNSTABLE]
        before = [setting.read() for setting in everything]
        with warnings.catch_warnings(record=True) as self._caught:
            warnings.simplefilter("always")
            yield
        for setting, then in zip(everything, before, strict=True):
            now = setting.read()
            assert now == then, f"a kernel changed {change(setting, then, now)}"


def assert_not_kept(tensors: Sequence[Tensor], before: Sequence[int], returned: int) -> None:
    """Check that no tensor has more references than before; the last `returned` are in a list besides."""

    def kept() -> list[int]:
        extra = [0] * (len(tensors) - returned) + [1] * returned
        now = map(sys.getrefcount, tensors)
        return [
            i for i, (n, then, more) in enumerate(zip(now, before, extra, strict=True)) if n > then + more
        ]

    if kept():
        gc.collect()  # it may be a cycle
        assert not kept(), f"the call keeps arguments alive: {kept()[:5]} of {len(tensors)}"
