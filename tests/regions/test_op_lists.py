"""torch's own lists of autocast ops, run under both regions."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal import autocast_test_lists as lists

import amp_core

# Some ops warn once in a process, on whichever side runs them first.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

FAKE = ["cuda", "xpu", "mps", "mtia"]

# Ops that raise on fake tensors of a device that is not here, whichever region is on, and why.
CANNOT_RUN = {
    "torch_expect_builtin_promote:equal": "its result depends on data, which fake tensors do not have",
    "torch_fp16:_convolution": "torch 2.11's CUDA build asks for a driver, even for fake tensors",
    "torch_fp16:cudnn_convolution": "exists on CUDA alone",
    "torch_fp16:cudnn_convolution_transpose": "exists on CUDA alone",
    "torch_fp16:einsum": "torch's list passes it a string in place of operands",
    "torch_fp16:gru_cell": "asks the device's runtime for a fused kernel",
    "torch_need_autocast_promote:grid_sampler": "asks the device's runtime for its version",
    "torch_need_autocast_promote:vdot": "has no rule on MPS, so that its dtypes differ",
}
MOST_THAT_CANNOT_RUN = 7 if torch.__version__ >= (2, 12) else 9

Case = tuple[str, Any, Any]


class Raised(NamedTuple):
    """An op that gave no value."""

    error: type[Exception]


def _cases(device: str) -> list[Case]:
    kind = lists.AutocastCPUTestLists if device == "cpu" else lists.AutocastTestLists
    by_name = vars(kind(torch.device(device)))
    cases = []
    for name in sorted(by_name):
        if name.startswith(("torch_", "nn_", "methods_")) and "banned" not in name:
            owner = {"torch": torch, "nn": torch._C._nn, "methods": torch.Tensor}[name.partition("_")[0]]
            cases += [(f"{name}:{case[0]}", owner, case) for case in by_name[name]]
    return cases


def _run(owner: Any, case: tuple[Any, ...]) -> list[Any] | Raised:
    """Return the dtypes of the op's results, and the results that are no tensors."""
    op, args, kwargs = case[0], case[1], case[2] if len(case) > 2 and isinstance(case[2], dict) else {}
    target = getattr(owner, op, None) or getattr(torch, op, None) or getattr(torch.Tensor, op)
    try:
        out = target(*args, **kwargs)
    except Exception as error:
        return Raised(type(error))
    leaves = torch.utils._pytree.tree_leaves(out)
    return [leaf.dtype if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


def test_cpu_ops_give_the_same_dtypes() -> None:
    """An op of torch's CPU list runs in another dtype under amp_core.autocast, or does not run."""
    torch.manual_seed(0)
    cases = _cases("cpu")
    assert len(cases) > 50
    for name, owner, case in cases:
        with torch.autocast("cpu"):
            theirs = _run(owner, case)
        with amp_core.autocast("cpu"):
            assert _run(owner, case) == theirs, name
        assert not isinstance(theirs, Raised), f"{name} compares errors only: {theirs}"


@pytest.mark.parametrize("device", FAKE)
def test_ops_of_absent_devices_give_the_same_dtypes(device: str) -> None:
    """An op of a device that is not here runs in another dtype under an amp_core region on fake tensors."""
    raised = []
    with FakeTensorMode(allow_non_fake_inputs=True):
        cases = _cases(device)
        assert len(cases) > 80
        for name, owner, case in cases:
            results = []
            for enter, leave in ((torch.amp._enter_autocast, torch.amp._exit_autocast), (_enter, _leave)):
                mode = enter(device, torch.float16, True, True)
                _switch_on(device)
                results.append(_run(owner, case))
                leave(mode)
            assert results[0] == results[1], name
            if isinstance(results[0], Raised):
                raised.append(name)
    assert set(raised) <= set(CANNOT_RUN), "these compare errors only; say why they cannot run"
    assert len(raised) <= MOST_THAT_CANNOT_RUN, raised


def _enter(device: str, dtype: torch.dtype, enabled: bool, cache: bool) -> Any:
    return amp_core.autocast(device, dtype, enabled, cache).__enter__()


def _leave(mode: Any) -> None:
    mode.__exit__(None, None, None)


def _switch_on(device: str) -> None:
    # A CUDA region is disabled where there is no GPU, with torch's warning; fake tensors need none.
    torch.set_autocast_enabled(device, True)
