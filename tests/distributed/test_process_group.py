"""Ranks that share parameters take the same step: real processes over gloo."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import amp_core

SCRIPT = Path(__file__).parent / "data" / "ranks.py"


@pytest.mark.parametrize(
    ("scenes", "count"),
    [
        ("plain beyond everywhere bucket_views delayed resumed uneven joined summands windows", 2),
        ("copies outside wide", 2),
        pytest.param("fsdp fsdp1 overlap reduced", 2, marks=pytest.mark.slow),
        pytest.param("groups", 3, marks=pytest.mark.slow),
        pytest.param("mesh slices decision experts hybrid", 4, marks=pytest.mark.slow),
    ],
)
def test_all_ranks_take_the_same_step(on_ranks: Callable[..., str], scenes: str, count: int) -> None:
    """Ranks step on their own flag or norm and part for good; replicas are counted twice."""
    assert on_ranks(SCRIPT, *scenes.split(), ranks=count).count("all is well") == count


@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_decide_as_one_process_with_all_gradients(on_ranks: Callable[..., str], count: int) -> None:
    """A rank without gradients, or with others than the rest, takes another step or keeps its scale."""
    assert on_ranks(SCRIPT.with_name("decisions.py"), ranks=count).count("all is well") == count


@pytest.mark.slow
def test_ranks_with_random_placements_decide_as_one_process(on_ranks: Callable[..., str]) -> None:
    """Elements count twice or not at all in a norm, as of DTensors on slices of a mesh beside plain ones."""
    assert on_ranks(SCRIPT.with_name("placements.py"), ranks=4).count("all is well") == 4


@pytest.mark.parametrize("count", [8, pytest.param(150, marks=pytest.mark.slow)])
def test_programs_train_as_scaling_by_hand(on_ranks: Callable[..., str], count: int) -> None:
    """A pair of features that no other test has takes another step on two ranks than on one."""
    printed = on_ranks(SCRIPT.with_name("training.py"), str(count))
    assert printed.count("all is well") == 2


@pytest.mark.slow
def test_products_of_shards_are_those_of_the_whole(on_ranks: Callable[..., str]) -> None:
    """Under tensor parallelism a recipe gives NaN, scales of a part, or torch's error of a cut block."""
    assert on_ranks(SCRIPT.with_name("products.py"), ranks=2).count("all is well") == 2


@pytest.mark.parametrize("wrong", ["world", 2, object()])
def test_what_is_no_process_group_is_refused_at_once(wrong: object) -> None:
    """The first step fails with an AttributeError, hours into a job."""
    with pytest.raises(TypeError, match=r"process_group must be a torch\.distributed\.ProcessGroup"):
        amp_core.GradScaler("cpu", process_group=wrong)


ELSEWHERE = """
import torch, amp_core
from torch import distributed as dist
dist.init_process_group("cuda:gloo", init_method="file://{path}", rank=0, world_size=1)
model = torch.nn.Linear(2, 2)
scaler = amp_core.GradScaler("cpu", process_group=dist.group.WORLD)
scaler.scale(model(torch.ones(1, 2)).sum()).backward()
try:
    scaler.step(torch.optim.SGD(model.parameters(), lr=0.1))
except RuntimeError as error:
    print(type(error).__name__, error)
dist.destroy_process_group()
"""


def test_a_group_for_another_device(tmp_path: Path) -> None:
    """With parameters on the CPU and a group for GPUs, the error says that other ranks were lost."""
    command = [sys.executable, "-W", "ignore", "-c", ELSEWHERE.format(path=tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("RuntimeError The gradients are on 'cpu', but the process group")
    assert "init_process_group('cpu:gloo,cuda:nccl')" in done.stdout
