"""The two forms that change the autocast state: compiled, and in Python."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

import amp_core
from amp_core.regions import torch_state as region_state
from amp_core.states.region_stack import RegionStack

HERE = Path(__file__).parent
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
compiled_only = pytest.mark.skipif(region_state.compiled is None, reason=f"entered by {region_state.how}")


def state() -> tuple[object, ...]:
    depth = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    device = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    return (*device, torch.is_autocast_cache_enabled(), depth)


regions = st.tuples(st.booleans(), st.sampled_from(DTYPES), st.booleans())
steps = st.lists(st.one_of(regions, st.integers(0, 3)), max_size=10)


@compiled_only
@given(steps)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_both_forms_do_the_same(program: list[tuple[bool, torch.dtype, bool] | int]) -> None:
    """The compiled form leaves another state behind than the one in Python, which is the readable one."""

    def run(numbered: bool) -> list[tuple[object, ...]]:
        enter, leave = (
            (region_state.enter, region_state.leave)
            if numbered
            else (region_state._enter, region_state._leave)
        )
        frames, entered, seen = RegionStack(), [], [state()]
        for step in [*program, *[0] * len(program)]:
            if isinstance(step, tuple):
                region = amp_core.autocast("cpu", enabled=False)
                values = ("cpu", *step)
                entered.append((region, region_state.settings_of(*values) if numbered else values))
                enter(frames, *entered[-1])
            elif entered:
                leave(frames, *entered.pop(step % len(entered)))
            seen.append(state())
        return seen

    assert run(numbered=True) == run(numbered=False)


@compiled_only
@pytest.mark.parametrize(
    "device", ["cpu", "cuda", "hpu", "maia", "mps", "mtia", "xla", "xpu", "privateuseone"]
)
def test_numbers_of_every_device(device: str) -> None:
    """A new torch has given a device another number: its regions would be entered by the slower form."""
    dtype = torch.float16
    assert isinstance(region_state.settings_of(device, True, dtype, True), int)


def test_a_switch_that_is_no_bool_is_refused_by_torch() -> None:
    """`enabled=2` would be packed into a number that means another dtype."""
    before = state()
    for wrong in (2, "no", None):
        with pytest.raises(TypeError, match="must be bool"), amp_core.autocast("cpu", enabled=wrong):
            pass
    assert state() == before


def test_the_form_in_python_passes_the_tests_of_regions() -> None:
    """Where nothing could be compiled, regions behave otherwise."""
    files = [HERE / name for name in ("test_autocast_beyond_torch.py", "test_region_stack.py")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, files)]
    done = subprocess.run(
        command, env={**os.environ, "AMP_COMPILED": "0"}, capture_output=True, text=True, cwd=HERE.parents[1]
    )
    assert done.returncode == 0, done.stdout[-2000:]


def test_what_is_in_use_is_said() -> None:
    """A user cannot tell that regions are slow because a compiler was missing."""
    code = "from amp_core.regions import torch_state; print(torch_state.how)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "AMP_COMPILED": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "Python (AMP_COMPILED says so)"
    if any((Path(amp_core.__file__).parent / "native").glob("_region_state*.so")):
        assert region_state.how == "compiled code"
