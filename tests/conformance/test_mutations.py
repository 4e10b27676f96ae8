"""Wrong backends made of small pieces, such as a cast whose last element is wrong under a default dtype.

A mutation is a kernel, a condition and a fault (`mutated/`). Of some 19,000, a sample runs here.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from amp_core.testing import Loopback, check, runner

SEED, SAMPLE = 20, 12

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(Path(__file__).with_name("mutated")))
    import mutated_kernels as mutated


def choose():
    """Return mutations of each method in turn: conditions that arise often, faults that always show."""
    chance = random.Random(SEED)
    sure = [m for m in mutated.everything() if m.what in mutated.VISIBLE and m.when not in mutated.RARE]
    methods = [mutated.METHODS[i % len(mutated.METHODS)] for i in range(SAMPLE)]
    return [chance.choice([m for m in sure if m.method == method]) for method in methods]


@pytest.mark.parametrize("mutation", choose(), ids=", ".join)
def test_a_mutation_is_found(mutation, monkeypatch):
    """A wrong backend would pass whose fault shows only under its condition."""
    monkeypatch.setattr(runner, "_ARGUMENTS", [*runner._ARGUMENTS, "-x"])
    kernels = mutated.build(mutation)
    found = any(
        not check(Loopback(kernels=kernels), areas=areas, keyword=keyword).ok
        for areas, keyword in mutated.checks_of(mutation)
    )
    assert found, f"{mutation} fired {kernels.fired} times, unseen"
