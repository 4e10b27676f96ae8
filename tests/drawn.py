"""What tests draw at random: from which seed, and how much of it, set from outside and here alone.

`AMP_TEST_SEED` draws others than every run does, and `AMP_TEST_TIMES` so many times as many.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

from hypothesis import seed, settings

SEED = int(os.environ.get("AMP_TEST_SEED", "0"))
TIMES = float(os.environ.get("AMP_TEST_TIMES", "1"))


def chance(number: object = 0) -> random.Random:
    """Return what to draw from; another `number` draws others under the same seed."""
    return random.Random(f"{SEED} {number}")


def programs(
    seconds: float = float("inf"), most: int | None = None, number: object = 0
) -> Iterator[random.Random]:
    """Yield what to draw each program from, until the time is over or there were so many; print how many."""
    draw, end, count = chance(number), time.monotonic() + seconds * TIMES, 0
    while time.monotonic() < end and (most is None or count < most * TIMES):
        yield draw
        count += 1
    print(f"{count} programs of {number} under seed {SEED}")  # noqa: T201 - pytest -rP shows it


def how(examples: int = 100, **others: Any) -> settings:
    """Return the settings of a test of hypothesis; its examples are the same in every run without a seed."""
    return settings(
        max_examples=int(examples * TIMES), deadline=None, derandomize=not SEED, database=None, **others
    )


def examples(count: int = 100, **others: Any) -> Callable[[Any], Any]:
    """Return the decorator of a test of hypothesis: so many examples from the seed."""
    return lambda test: seeded(how(count, **others)(test))


def seeded(test: Any) -> Any:
    """Return a test of hypothesis, or its state machine, with the seed if one is set."""
    return seed(SEED)(test) if SEED else test
