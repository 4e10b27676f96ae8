"""Steps inside a mode: other defaults for new tensors, fake tensors; and gradients with lazy bits."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from amp_core import AccumulationWindow, AtFloor, GradScaler, LossScaleSchedule
from amp_core.testing.suite.data import default_dtype


def trained(mode: Any, fused: bool, how: str) -> tuple[list[torch.Tensor], list[Any]]:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.1, fused=fused)
    scaler, x = GradScaler("cpu", 8.0, overlap=how == "overlap"), torch.ones(4, 3)
    history = []
    for number in range(4):
        optimizer.zero_grad()
        with mode():
            window = AccumulationWindow(scaler, optimizer)
            if how == "window":
                with window, window.micro_batch():
                    scaler.scale(model(x).square().sum()).backward()
            else:
                scaler.scale(model(x).square().sum()).backward()
            if number == 2:
                model.weight.grad[0, 0] = float("inf")
            if how == "unscale":
                scaler.unscale_(optimizer)
            scaler.step(optimizer, max_norm=None if how in ("step", "unscale") else 1.0)
            scaler.update()
            record = scaler.last_step[optimizer]
            history.append((record.skipped, record.scale_after, record.total_norm, record.bad_parameters))
    return [p.detach().clone() for p in model.parameters()], history


HOWS = ["step", "clip", "unscale", "window", "overlap"]


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("default", ["meta", "cpu", torch.float64, torch.bfloat16])
def test_defaults_of_new_tensors_do_not_matter(default: Any, fused: bool, how: str) -> None:
    """A tensor made inside the scaler follows the default: a wrong step, or a segmentation fault."""
    mode = torch.device if isinstance(default, str) else default_dtype
    expected = trained(contextlib.nullcontext, fused, how)
    found = trained(lambda: mode(default), fused, how)
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=0)
    assert found[1] == expected[1]


@pytest.mark.parametrize("how", ["unscale_", "clip", "fused", "fused clip", "update"])
def test_fake_tensors_have_no_data_to_ask_for(how: str) -> None:
    """A memory estimate under FakeTensorMode fails in the scaler, where torch's runs."""
    with FakeTensorMode():
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=how.startswith("fused"))
        for scaler in (torch.amp.GradScaler("cpu"), GradScaler("cpu")):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(4, 3)).sum()).backward()
            ours = isinstance(scaler, GradScaler)
            if how == "clip" and ours:
                scaler.clip_grad_norm_(optimizer, 1.0)
            elif how.startswith("fused"):
                scaler.step(optimizer, **({"max_norm": 1.0} if ours and how.endswith("clip") else {}))
            else:
                scaler.unscale_(optimizer)
            scaler.update()
            assert scaler._scale.shape == ()
            repr(scaler)


@pytest.mark.parametrize("real", [False, True])
@pytest.mark.parametrize("at_floor", AtFloor)
def test_hooks_are_not_told_of_fake_steps(at_floor: AtFloor, real: bool) -> None:
    """A hook, which amp_core.guard has too, makes `update` ask fake tensors for data."""
    told: list[object] = []
    scaler = GradScaler("cpu", schedule=LossScaleSchedule(at_floor=at_floor))
    scaler.register_skip_hook(told.append)
    if real:
        scaler.scale(torch.ones(()))
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        for _ in range(2):
            scaler.scale(model(torch.ones(4, 3)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
    assert not told


def negated(values: torch.Tensor) -> torch.Tensor:
    return torch._neg_view(-values)


def conjugated(values: torch.Tensor) -> torch.Tensor:
    return values.conj().resolve_conj().conj()


@pytest.mark.parametrize("max_norm", [None, 0.5])
@pytest.mark.parametrize(
    ("lazy", "dtype"),
    [
        (negated, torch.float32),
        (negated, torch.bfloat16),
        (negated, torch.float64),
        (conjugated, torch.complex64),
        (negated, torch.complex64),
    ],
)
def test_lazy_negative_and_conjugate_gradients(lazy: Any, dtype: torch.dtype, max_norm: float | None) -> None:
    """A gradient that is a lazy view fails in a kernel, or is scaled with the wrong sign."""

    def gradient(make: Any) -> torch.Tensor:
        torch.manual_seed(0)
        param = torch.nn.Parameter(torch.zeros(5, dtype=dtype))
        param.grad = make(torch.randn(5, dtype=dtype) * 8.0)
        optimizer, scaler = torch.optim.SGD([param], lr=1.0), GradScaler("cpu", 8.0)
        scaler.scale(torch.ones(()))
        scaler.step(optimizer, max_norm=max_norm)
        scaler.update()
        assert not scaler.history[-1].skipped
        return param.detach().resolve_neg().resolve_conj()

    torch.testing.assert_close(gradient(lazy), gradient(lambda values: values))
