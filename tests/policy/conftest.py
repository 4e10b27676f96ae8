"""Regions and rules, as the tests of policies see them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from amp_core import OpPolicy, get_backend
from amp_core._torch.op_kernels import registered
from amp_core.dispatch.activate import activation, pop, pushed
from amp_core.dispatch.engine import engine, policies_in_force
from amp_core.testing.observe import consistent

LOW = torch.bfloat16


def departure(op_name: str, rule: str, device: str) -> str:
    """What torch's kernel of the op does that `rule` does not say; real tensors for cpu, else fake ones."""

    def make(dtype: torch.dtype) -> torch.Tensor:
        if device == "cpu":
            return torch.ones(2, dtype=dtype)
        with FakeTensorMode():
            return torch.empty(2, dtype=dtype, device=device)

    engine(device).add_rules()
    before = torch.get_autocast_dtype(device)
    torch.set_autocast_dtype(device, LOW)
    torch.set_autocast_enabled(device, True)
    try:
        return consistent(op_name, rule, device, make, LOW)
    finally:
        torch.set_autocast_enabled(device, False)
        torch.set_autocast_dtype(device, before)
        torch.clear_autocast_cache()


@pytest.fixture
def observe() -> Callable[[str, str, str], str]:
    return departure


@pytest.fixture
def region() -> Callable[..., Any]:
    """``region(policy)``: autocast under a policy, by the seam that `amp_core.autocast` uses."""

    @contextmanager
    def enter(policy: OpPolicy | None = None, dtype: torch.dtype | None = None) -> Iterator[None]:
        active = activation(get_backend("cpu"), policy)
        with torch.autocast("cpu", dtype):
            if active is not None:
                active.push()
            try:
                yield
            finally:
                if active is not None:
                    pop()

    return enter


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Check that no policy is in force afterwards, and that torch's own rules are listed and apply."""
    engine("cpu").add_rules()  # these stay
    before = registered("AutocastCPU")
    yield
    assert registered("AutocastCPU") == before
    assert pushed() == 0
    assert not policies_in_force()
    assert not any(engine("cpu")._users.values())
    x = torch.ones(2, 2)
    with torch.autocast("cpu"):
        assert torch.mm(x, x).dtype is torch.bfloat16
        assert torch.softmax(x.bfloat16(), -1).dtype is torch.bfloat16
