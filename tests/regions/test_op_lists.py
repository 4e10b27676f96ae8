"""torch's own lists of autocast ops, run under both regions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal import autocast_test_lists as lists

import amp_core

# Some ops warn once in a process, on whichever side runs them first.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

FAKE = ["cuda", "xpu", "mps", "mtia"]


def _cases(device: str) -> list[tuple[str, Any, Any]]:
    kind = lists.AutocastCPUTestLists if device == "cpu" else lists.AutocastTestLists
    made = kind(torch.device(device))
    found = []
    for name in sorted(vars(made)):
        if name.startswith(("torch_", "nn_", "methods_")) and "banned" not in name:
            where = torch if name.startswith(("torch_", "methods_")) else torch._C._nn
            found += [(f"{name}:{case[0]}", where, case) for case in getattr(made, name)]
    return found


def _run(where: Any, case: tuple[Any, ...]) -> Any:
    op, args, kwargs = case[0], case[1], case[2] if len(case) > 2 and isinstance(case[2], dict) else {}
    target = getattr(where, op, None) or getattr(torch, op, None) or getattr(torch.Tensor, op)
    try:
        out = target(*args, **kwargs)
    except Exception as error:  # both must fail alike
        return type(error)
    leaves = torch.utils._pytree.tree_leaves(out)
    return [leaf.dtype if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


def test_cpu_ops_give_the_same_dtypes() -> None:
    """An op of torch's CPU list runs in another dtype under amp_core.regions.region."""
    torch.manual_seed(0)
    cases = _cases("cpu")
    assert len(cases) > 50
    for name, where, case in cases:
        with torch.autocast("cpu"):
            theirs = _run(where, case)
        with amp_core.autocast("cpu"):
            assert _run(where, case) == theirs, name


@pytest.mark.parametrize("device", FAKE)
def test_ops_of_absent_devices_give_the_same_dtypes(device: str) -> None:
    """An op of a device that is not here runs in another dtype under an amp_core region on fake tensors."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        cases = _cases(device)
        assert len(cases) > 80
        for name, where, case in cases:
            results = []
            for enter, leave in ((torch.amp._enter_autocast, torch.amp._exit_autocast), (_enter, _leave)):
                mode = enter(device, torch.float16, True, True)
                _switch_on(device)
                results.append(_run(where, case))
                leave(mode)
            assert results[0] == results[1], name


def _enter(device: str, dtype: torch.dtype, enabled: bool, cache: bool) -> Any:
    return amp_core.autocast(device, dtype, enabled, cache).__enter__()


def _leave(mode: Any) -> None:
    mode.__exit__(None, None, None)


def _switch_on(device: str) -> None:
    # A CUDA region is disabled where there is no GPU, with torch's warning; fake tensors need none.
    torch.set_autocast_enabled(device, True)
