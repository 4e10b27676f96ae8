"""What the kernels of a policy do to programs that use numbers, other threads or no policy at all."""

from __future__ import annotations

import functools
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from amp_core import OpPolicy, autocast, record
from amp_core._torch import op_kernels

pytestmark = pytest.mark.usefixtures("nothing_left")

X = torch.ones(4)


def run_script(name: str) -> None:
    script = Path(__file__).parent / "data" / name
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_numbers_where_the_schema_has_a_tensor() -> None:
    """``x % 2`` raises under a policy with a rule for it, or in a plain region after that policy."""
    run_script("number_arguments.py")


def test_an_exception_while_installing_leaves_nothing() -> None:
    """Half of a policy stays on the dispatcher."""
    run_script("failing_install.py")


def test_a_policy_is_installed_once(region, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each region with a policy installs and removes its kernels, which takes up to a millisecond."""
    policy = OpPolicy.default("cpu").override({"softmax": "fp32"})
    with region(policy):
        pass
    monkeypatch.delattr("amp_core.dispatch.engine.install")
    with region(policy):
        assert torch.softmax(X.bfloat16(), -1).dtype is torch.float32
    assert torch.softmax(X.bfloat16(), -1).dtype is torch.bfloat16


def test_a_recording_where_torch_always_warns() -> None:
    """After ``torch.set_warn_always(True)`` a recording shows a hundred warnings of torch."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with record(), autocast("cpu", policy=OpPolicy.default("cpu").override({"lerp.Scalar": "fp32"})):
                torch.mm(X.diag(), X.diag())
    finally:
        torch.set_warn_always(before)


def test_threads_that_know_only_torch() -> None:
    """A kernel is removed while a thread that uses only torch.autocast dispatches to it: the process dies."""
    run_script("foreign_threads.py")


def test_threads_that_install_leave_the_filters_of_warnings(
    in_threads: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads put a first kernel on different keys, and no warning is shown from then on."""
    filters, ops = [*warnings.filters], ["one", "two", "three", "four"]
    # Not ops of torch: under a mode the dispatcher goes on with kernels put over others and removed.
    with torch.library._scoped_library("amp_core_filters", "DEF") as scratch:
        for op in ops:
            scratch.define(f"{op}(Tensor x) -> Tensor")
            scratch.impl(op, lambda x: x, "AutocastCPU")
        _install_in_threads([f"amp_core_filters::{op}" for op in ops], in_threads, monkeypatch)
    assert warnings.filters == filters


def _install_in_threads(
    ops: list[str], in_threads: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(100):
        monkeypatch.setattr(op_kernels, "_warned_of_override", False)
        removers: list[Callable[[], None]] = []

        def put(op: str, removers: list[Callable[[], None]] = removers) -> None:
            removers.append(op_kernels.install(op, "AutocastCPU", lambda _keys, *_: None))

        in_threads(*[functools.partial(put, op) for op in ops])
        for remove in removers:
            remove()


def test_a_rule_for_add_and_for_another_op() -> None:
    """A policy with a rule for add raises, because add was the sample of an op without a kernel."""
    with autocast("cpu", policy=OpPolicy.default("cpu").override({"add": "fp32", "hypot": "fp32"})):
        assert (X.bfloat16() + 1).dtype is torch.float32


def test_a_rule_by_torch_library_under_modes() -> None:
    """Ours calls the op's own rule, which under a mode is ours again, without end; also once ours is gone."""
    run_script("rules_of_torch_library.py")


class Resizing(torch.nn.Module):
    """Doubles images in a region of torch's."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu"):
            return torch.nn.functional.interpolate(images, scale_factor=2.0)


@pytest.mark.parametrize("strict", [False, True])
def test_a_resize_keeps_a_dynamic_batch(strict: bool) -> None:
    """The export of a region that resizes images raises, as the batch would be that of the example."""
    with autocast("cpu", policy=OpPolicy.default("cpu").override({"upsample_nearest2d": "fp32"})):
        torch.nn.functional.interpolate(torch.ones(1, 1, 2, 2), scale_factor=2.0)
    batch = ({0: torch.export.Dim("batch")},)
    program = torch.export.export(Resizing(), (torch.ones(3, 4, 6, 6),), dynamic_shapes=batch, strict=strict)
    assert program.module()(torch.ones(5, 4, 6, 6)).shape == (5, 4, 12, 12)
