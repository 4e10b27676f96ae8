"""Weight casts under DistributedDataParallel, FSDP2 and tensor parallelism, on real processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

DATA = Path(__file__).with_name("data")


@pytest.mark.slow
def test_gradients_are_reduced(on_ranks: Callable[..., str]) -> None:
    """Gradients bypass the reducer: the ranks drift apart, or DDP waits for what never comes."""
    assert on_ranks(DATA / "ddp.py").count("same") == 2 * 4


@pytest.mark.slow
@pytest.mark.parametrize("scope", ["cached_casts", "master_weights"])
@pytest.mark.parametrize("how", ["reshard", "keep", "tensors"])
def test_sharded_weights(on_ranks: Callable[..., str], scope: str, how: str) -> None:
    """A stale cast of a gathered weight is used, freed memory is read, or DTensors are cast each time."""
    ranks = 2 if how == "tensors" else 1
    assert on_ranks(DATA / "sharded.py", how, scope, ranks=ranks).count("same") == ranks


@pytest.mark.slow
def test_stored_weights_do_not_depend_on_the_number_of_ranks(on_ranks: Callable[..., str]) -> None:
    """A shard draws other random bits than the whole, an optimizer meets tensors beside DTensors.

    Or a rank cannot step a weight that is on a mesh of other ranks.
    """
    whole, shards = (on_ranks(DATA / "stored.py", ranks=ranks) for ranks in (1, 2))
    assert whole == shards
    assert len({*whole.splitlines()}) == 7


@pytest.mark.slow
def test_checkpoints_of_fsdp1_hold_stored_weights(on_ranks: Callable[..., str]) -> None:
    """States of several dtypes or shapes are refused by torch, or what is kept comes back rounded."""
    assert on_ranks(DATA / "flattened.py").count("same") == 2
