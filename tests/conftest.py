"""What tests share: real processes over gloo, threads, and a check that no test leaves anything on."""

from __future__ import annotations

import gc
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from amp_core.common.optimizers import _watching_gradients
from amp_core.plugin.default_manager import plugins_listen


def pytest_sessionstart() -> None:
    """Enter fake mode in a thread that outlives the tests, as torch 2.11 for CUDA needs without a GPU.

    The first thread that enters it, as each does that compiles, makes torch's stand-in for the device. The
    stand-in ends with its thread, torch goes on using it, and a later backward pass crashes the process.
    """
    if torch.__version__ < (2, 12):
        with FakeTensorMode():
            pass


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give slow tests, which share two cores, three times the limit of the others."""
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(900))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """Skip what torch itself cannot run on this CPU: without AVX-512 it has no LSTM in low precision."""
    try:
        return (yield)
    except RuntimeError as error:
        refused = "primitive descriptor for the LSTM" in str(error)
        if not refused or torch.ops.mkldnn._is_mkldnn_bf16_supported():
            raise
        pytest.skip("torch's LSTM has no low-precision kernel for this CPU")


@pytest.fixture(autouse=True)
def clean_state() -> Iterator[None]:
    """Fail the test that leaves autocast on, a dtype or the nesting count changed, a plugin, or a tool."""
    before = _state()
    yield
    assert _state() == before
    depth = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    assert depth == 1


@pytest.fixture(scope="session")
def forked() -> Callable[..., list[tuple[list[int], str]]]:
    """Return a function that runs jobs as `forked.py` does; for each, the exit codes and what was printed.

    Several jobs share one import of torch, which takes most of the time of a small one.
    """

    def run(*jobs: str, imports: str = "") -> list[tuple[list[int], str]]:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", str(Path(__file__).parent / "forked.py"), imports, *jobs],
            capture_output=True,
            text=True,
            check=False,
            timeout=800,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)},
        )
        assert done.returncode == 0, done.stderr[-3000:]
        parts = re.split(r"exit codes of the ranks:(.*)\n", done.stdout)
        found = [
            ([*map(int, codes.split())], out) for out, codes in zip(parts[::2], parts[1::2], strict=False)
        ]
        for codes, _ in found:
            assert 1 not in codes, done.stderr[-3000:]
        return found

    return run


@pytest.fixture(scope="session")
def on_ranks(forked: Callable[..., list[tuple[list[int], str]]]) -> Callable[..., str]:
    """Return a function that runs a script on `ranks` processes and returns what they print."""

    def run(script: Path, *options: str, ranks: int = 2) -> str:
        ((codes, printed),) = forked(shlex.join([str(ranks), str(script), *options]))
        assert codes == [0] * ranks, printed
        return printed

    return run


@pytest.fixture
def one_rank() -> Iterator[None]:
    """Make a group of one rank over gloo; what the test wraps in DDP is freed before the group.

    DDP freed after it would wait for gloo's threads, and they for the GIL, to free a context of Python's.
    """
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    gc.collect()
    torch.distributed.destroy_process_group()


@pytest.fixture
def in_threads() -> Iterator[Callable[..., None]]:
    """Return a function that runs each job in a thread of its own, all at once, and raises their first error.

    With `seconds`, the jobs are repeated for so long. Python switches threads as often as it can meanwhile.
    """

    def run(*jobs: Callable[[], object], seconds: float = 0.0) -> None:
        together, failures = threading.Barrier(len(jobs)), []

        def repeat(job: Callable[[], object]) -> None:
            together.wait()
            until = time.monotonic() + seconds
            try:
                job()
                while time.monotonic() < until and not failures:
                    job()
            except BaseException as error:  # raised again in the main thread
                failures.append(error)

        threads = [threading.Thread(target=repeat, args=(job,)) for job in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield run
    sys.setswitchinterval(interval)


def _state() -> tuple[object, ...]:
    devices = ("cpu", "cuda", "xpu")
    on = tuple(torch.is_autocast_enabled(d) for d in devices)
    dtypes = tuple(torch.get_autocast_dtype(d) for d in devices)
    return on, dtypes, torch.is_autocast_cache_enabled(), plugins_listen(), _attached_tools()


def _attached_tools() -> int:
    """Return how many guards and watches are on; models of later tests would meet their hooks."""
    return len(_watching_gradients()) if "amp_core.debugging.attached" in sys.modules else 0
