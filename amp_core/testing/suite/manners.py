"""What each judged call must leave alone: references to its arguments, the caller's settings."""

from __future__ import annotations

import functools
import gc
import io
import os
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any, TextIO

import pytest
from torch import Tensor

from amp_core._torch.tensors import users_of_memory
from amp_core.kernels import GradStats
from amp_core.testing.fixtures import BackendFixtures
from amp_core.testing.suite import data
from amp_core.testing.suite.settings import change, settings

_UNSTABLE = (
    "the environment", "the search path of modules", "the hooks for errors", "the device's generator"
)  # fmt: skip


class Manners(BackendFixtures):
    """Watches what `EffectsConformance` tries on purpose, in all checks and with all of their arguments."""

    _caught: Sequence[warnings.WarningMessage] = ()
    _printed: Sequence[str] = ()
    _said: frozenset[str] = frozenset()

    @pytest.fixture(autouse=True)
    def _leaves_the_process_as_it_was(self, request: pytest.FixtureRequest) -> Iterator[None]:
        """Fail, whatever the outcome of the check, if what belongs to the caller is different after it."""
        check, changed = request.node.obj, list[str]()

        @functools.wraps(check)
        def watched(*args: Any, **kwargs: Any) -> None:
            with self._watching(changed):
                check(*args, **kwargs)

        # Just around the check: pytest-randomly seeds generators between its end and that of this fixture.
        request.node.obj = watched
        yield
        assert not changed, f"a kernel changed {changed[0]}"

    @contextmanager
    def _watching(self, changed: list[str]) -> Iterator[None]:
        """Add what belongs to the caller and changes in the block; record warnings and lines in it."""
        # Leave out what the first use of a library may change, and what `EffectsConformance` cannot restore.
        everything = [setting for setting in settings(self) if setting.name not in _UNSTABLE]
        before, variables = [setting.read() for setting in everything], dict(os.environ)
        output = _Recorder(sys.stdout)
        self._printed = output.texts
        try:
            with warnings.catch_warnings(record=True) as self._caught, redirect_stdout(output):
                warnings.simplefilter("always")
                yield
        finally:
            for setting, then in zip(everything, before, strict=True):
                now = setting.read()
                if now != then:
                    changed.append(change(setting, then, now))
            # New ones may be those of a library that has just been loaded.
            other = [name for name, value in variables.items() if os.environ.get(name) != value]
            if other:
                changed.append(f"the environment: {other}")

    @contextmanager
    def _quietly(self) -> Iterator[None]:
        """Check that the block neither warns nor prints as an earlier one of this check has."""
        warned, printed = len(self._caught), len(self._printed)
        yield
        said = [*(str(warning.message) for warning in self._caught[warned:]), *self._printed[printed:]]
        texts = frozenset(data.wording(text) for text in said if text.strip())
        assert not texts & self._said, f"a kernel warns or prints each time: {', '.join(texts & self._said)}"
        self._said |= texts


class _Recorder(io.TextIOBase):
    """Hands on what is printed, and remembers it."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self.texts: list[str] = []
        self._stream = stream

    def write(self, text: str) -> int:
        self.texts.append(text)
        return self._stream.write(text)

    def flush(self) -> None:
        self._stream.flush()

    def fileno(self) -> int:
        return self._stream.fileno()

    def isatty(self) -> bool:
        return self._stream.isatty()


class References:
    """The references to tensors and to their memory, taken before a call."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._objects, self._memory = list(map(sys.getrefcount, tensors)), users_of_memory(tensors)

    def assert_as_before(self, boxed: list[Any], returned: int) -> None:
        """Check that the call keeps no argument and no result.

        Args:
            boxed: the result, if it is new, as the one element of a list that alone refers to it.
            returned: how many of the last arguments the result contains.
        """
        for attempt in range(20):
            kept, results = self._kept(returned), not returned and _are_kept(boxed)
            if not kept and not results:
                return
            if attempt == 10:
                gc.collect()  # it may be a cycle
            time.sleep(0.002)  # or another thread may be about to finish the call
        assert not kept, f"the call keeps arguments alive: {kept[:5]} of {len(self._tensors)}"
        assert not results, "the call keeps results alive"

    def _kept(self, returned: int) -> list[int]:
        extra = [0] * (len(self._tensors) - returned) + [1] * returned
        objects = zip(map(sys.getrefcount, self._tensors), self._objects, extra, strict=True)
        memory = zip(users_of_memory(self._tensors), self._memory, strict=True)
        return [
            i
            for i, ((n, then, more), (users, before)) in enumerate(zip(objects, memory, strict=True))
            if n > then + more or users > before
        ]


def _are_kept(boxed: list[Any]) -> bool:
    """Whether the result, or a tensor in it, has other references than these."""
    counts = list(map(sys.getrefcount, boxed))
    for parts in map(_parts, boxed):
        counts += map(sys.getrefcount, parts)
    return any(count > _IN_A_LIST for count in counts)


def _parts(result: object) -> Iterable[object]:
    if isinstance(result, GradStats):
        return data.statistics(result)
    return result if isinstance(result, list) else ()


_IN_A_LIST = max(map(sys.getrefcount, [object()]))
