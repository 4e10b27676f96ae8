"""Weight casts under DistributedDataParallel, FSDP2 and tensor parallelism, on real processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

DATA = Path(__file__).with_name("data")


def torchrun(processes: int, script: str, *options: str) -> str:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*launcher, f"--nproc-per-node={processes}", str(DATA / script), *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_gradients_are_reduced() -> None:
    """Gradients bypass the reducer: the ranks drift apart, or DDP waits for what never comes."""
    assert torchrun(2, "ddp.py").count("same") == 2 * 4


@pytest.mark.slow
@pytest.mark.parametrize("scope", ["cached_casts", "master_weights"])
@pytest.mark.parametrize("how", ["reshard", "keep", "tensors"])
def test_sharded_weights(scope: str, how: str) -> None:
    """A stale cast of a gathered weight is used, freed memory is read, or DTensors are cast each time."""
    ranks = 2 if how == "tensors" else 1
    assert torchrun(ranks, "sharded.py", how, scope).count("same") == ranks


@pytest.mark.slow
def test_stored_weights_do_not_depend_on_the_number_of_ranks() -> None:
    """A shard draws other random bits than the whole, or an optimizer meets tensors beside DTensors."""
    whole, shards = (torchrun(ranks, "stored.py") for ranks in (1, 2))
    assert whole == shards
    assert len({*whole.splitlines()}) == 6
