"""Triton's kernels without a GPU: interpreted on CPU tensors, and compiled for GPUs that are not here."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

DATA = Path(__file__).parent / "data"
PATH = os.pathsep.join([str(DATA), str(Path(__file__).parents[1])])

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed; Linux alone has it"
)


def run(*words: str, **environment: str) -> str:
    """Run Python with `words` in a process of its own, which must succeed; return what it printed."""
    done = subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PATH, **environment},
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return done.stdout


QUICK = "dtype_pair or mixed_lists or not_finite or sets_the_flag or views_of_one_storage"


@needs_triton
def test_the_kit_on_interpreted_kernels() -> None:
    """A kernel rounds, skips an element or misses a bad one, on any GPU."""
    passed = run(str(DATA / "interpreted.py"), QUICK, TRITON_INTERPRET="1")
    assert passed.count("passed") == 5, passed


@needs_triton
@pytest.mark.slow
def test_the_whole_kit_on_interpreted_kernels() -> None:
    """What only the longer checks see: orders of the norm, special numbers, long histories.

    Without the quick ones, and those that take minutes of an interpreter and see no other code.
    """
    longest = "memory_layout or among or every_position or many_threads or kernels_"
    passed = run(str(DATA / "interpreted.py"), f"not ({longest} or {QUICK})", TRITON_INTERPRET="1")
    assert "failed" not in passed
    assert passed.count("passed") >= 20, passed


@needs_triton
@pytest.mark.slow
def test_interpreted_kernels_against_the_portable_ones() -> None:
    """On some list of gradients a norm, a flag, a product, a cast or a scale differs from the reference."""
    tests = str(DATA / "differential.py")
    out = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore", tests, TRITON_INTERPRET="1")
    assert "8 passed" in out, out


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("maker", ["nvidia", "amd"])
def test_the_compiled_code(maker: str, tmp_path: Path) -> None:
    """A program does not compile for a GPU, loads narrowly, or needs float64 for float32 gradients."""
    out = run(str(DATA / "compile_for.py"), maker, TRITON_CACHE_DIR=str(tmp_path))
    found = json.loads(out.splitlines()[-1])
    assert len(found) == 35
    for name, code in found.items():
        kernel, _, dtype = name.partition(" ")
        if kernel in {"measure", "scale", "cast", "add"} and "fp64" not in dtype:
            assert code["wide loads"] >= 2, f"{name}: {code}"
            assert code["float64"] == 0, f"{name}: {code}"
        if kernel in {"scale", "cast", "add"} and "fp64" not in dtype:
            assert code["wide stores"] >= 2, f"{name}: {code}"
    if maker == "nvidia":
        assert found["scale bf16"]["to bfloat16"] > 0
        assert found["cast fp32 bf16"]["to bfloat16"] > 0


@needs_triton
@pytest.mark.slow
def test_a_launch_up_to_the_launch(tmp_path: Path) -> None:
    """An argument does not bind on a real GPU; or other sizes, addresses, schedules are compiled anew.

    Seconds of compiling in the midst of a training, and an error where a graph is being captured.
    """
    found = json.loads(run(str(DATA / "bind.py"), TRITON_CACHE_DIR=str(tmp_path)).splitlines()[-1])
    orders, dtypes, kinds_of_hysteresis = 4, 2, 3
    assert found == {
        "measure_rows": orders + 1,
        "measure_tensors": orders,
        "measure_total": orders,
        "scale_rows": dtypes,
        "move_rows": 2 * dtypes,
        "update_scale": kinds_of_hysteresis,
        "write_words": 1,
    }


@needs_triton
def test_tensors_without_memory() -> None:
    """A fake tensor, or one that ``torch.func`` transforms, is asked for its address."""
    from torch._subclasses import FakeTensorMode

    from amp_core.kernels.triton_kernels import Triton

    kernels = Triton("cpu")
    with FakeTensorMode():
        fake = [torch.empty(5), torch.empty(3, dtype=torch.bfloat16)]
        assert kernels.grad_stats(fake).norms.shape == (2,)
        assert kernels.cast(fake, torch.float16)[1].dtype is torch.float16
    cast = torch.func.vmap(lambda x: kernels.cast([x], torch.bfloat16)[0])
    assert torch.equal(cast(torch.ones(2, 3)), torch.ones(2, 3).bfloat16())


@needs_triton
@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(6)[::2],
        torch.ones(1).expand(4),
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([1 + 2j]).conj().imag,
        torch.ones(3, dtype=torch.float8_e4m3fn),
        torch.ones(3).to_sparse(),
    ],
    ids=["strided", "expanded", "conjugated", "negated", "8-bit", "sparse"],
)
def test_what_the_programs_do_not_take(tensor: torch.Tensor) -> None:
    """Such a tensor is read as if it were plain memory."""
    from amp_core.kernels.triton_kernels import Triton, _Layout

    assert not _Layout([torch.ones(2), tensor], "cpu").fits
    assert not _Layout([torch.ones(2)], "cuda").fits
    assert _Layout([torch.ones(2), torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)], "cpu").fits
    assert Triton("cpu").prepare([tensor])[0] is tensor


@needs_triton
def test_a_launch_that_fails() -> None:
    """A Triton that does not work on the machine ends a training with a riddle from deep inside it."""
    code = (
        "import torch\nfrom amp_core.kernels.triton_kernels import Triton\n"
        "try:\n    Triton('cpu').grad_stats([torch.ones(3)])\n"  # there is no compiler for CPUs
        "except RuntimeError as error:\n"
        "    assert error.__cause__ is not None\n    print(type(error).__name__, error)\n"
    )
    said = run("-c", code)
    assert said.startswith("KernelLaunchError Triton could not compile or launch amp-core's write_words: "), (
        said
    )
    assert "set AMP_TRITON=0" in said
