"""What mypy and pyright know of the public names; both check this file, and pytest that it is right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import assert_type

import amp_compat.cpu.amp as cpu_amp
import amp_compat.cuda.amp as cuda_amp
import amp_core
from amp_core import (
    Advice,
    BadParameter,
    CachedCasts,
    GradScaler,
    MasterWeights,
    OpPolicy,
    Recording,
    StepRecord,
    StoredWeights,
    autocast,
)
from amp_core.debugging import Guard, Watch
from amp_core.testing import BackendFixtures


@autocast("cpu")
def _double(x: Tensor, times: int = 2) -> Tensor:
    return x * times


def _inside(x: Tensor) -> Tensor:
    with autocast("cpu"), amp_core.cached_casts(nn.Linear(1, 1)), amp_core.record():
        return x


class _Double(torch.autograd.Function):
    @staticmethod
    @amp_core.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    @amp_core.custom_bwd(device_type="cpu")
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


class _Fixtures(BackendFixtures):
    device_type = "cpu"
    known_failures = {"cast_of_views": "driver 2.1"}  # noqa: RUF012  # as in the guide
    supports_float64 = False
    keeps_subnormals = False


def test_capabilities_of_a_device() -> None:
    """Editors would call it wrong to say of a device what it cannot do, as the guide says it."""
    fixtures = _Fixtures()
    assert_type(fixtures.supports_float64, bool)
    assert assert_type(fixtures.supports_float16, bool)
    assert (fixtures.supports_float64, fixtures.keeps_subnormals) == (False, False)


def test_regions() -> None:
    """A region would accept less for a type checker than it does, or a function lose its signature."""
    x = torch.ones(2)
    policy = OpPolicy.default("cpu")
    for device in ("cpu", torch.device("cpu"), x):
        with autocast(device, torch.bfloat16, policy=policy) as region:
            assert_type(region, autocast)
            assert isinstance(region, autocast)
    assert_type(_double(x, times=3), Tensor)
    with pytest.raises(TypeError):
        _double(x, time=3)  # type: ignore[call-arg]
    with pytest.raises(amp_core.PolicyError):
        autocast("cpu", policy="fp32")  # type: ignore[arg-type]
    assert_type(_inside(x), Tensor)
    assert_type(_Double.forward(torch.autograd.function.FunctionCtx(), x), Tensor)
    with pytest.raises(RuntimeError, match="custom_fwd"):
        _Double.backward(x)  # type: ignore[call-arg]


def test_scalers() -> None:
    """`scale` would lose what torch's own annotations know, or a record be of no type."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler(torch.device("cpu"), init_scale=4.0)
    loss: Tensor = model(torch.ones(1, 2)).sum()
    product = assert_type(scaler.scale(loss), Tensor)
    product.backward()  # type: ignore[no-untyped-call]  # torch's own
    assert_type(scaler.scale([loss]), list[Tensor])
    assert_type(scaler.scale((loss, [loss])), tuple[Tensor, list[Tensor]])
    assert_type(scaler.scale({"loss": loss}, key="other"), dict[str, Tensor])
    assert_type(scaler.step(optimizer, max_norm=1.0), float | None)
    scaler.update()
    assert_type(scaler.history[0], StepRecord)
    assert_type(scaler.history[-1:], list[StepRecord])
    assert_type(scaler.last_step[optimizer].bad_parameters, tuple[BadParameter, ...])
    assert_type(scaler.landed(), Tensor)
    assert isinstance(scaler.history[0], StepRecord)
    assert isinstance(scaler.history[-1:], list)


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_deprecated_names() -> None:
    """Type checkers would find fault with right arguments of old code, or none with wrong ones."""
    assert_type(cpu_amp.GradScaler(4.0, enabled=False), cpu_amp.GradScaler)
    assert_type(cuda_amp.GradScaler(init_scale=4.0, enabled=False), cuda_amp.GradScaler)
    assert_type(cpu_amp.autocast(True, torch.bfloat16), cpu_amp.autocast)
    assert_type(cuda_amp.autocast(enabled=False, dtype=torch.bfloat16), cuda_amp.autocast)
    with pytest.raises(TypeError, match="device"):
        cpu_amp.GradScaler(device="cpu")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="device_type"):
        cuda_amp.autocast(device_type="cuda")  # type: ignore[call-arg]


def test_scopes_and_reports(tmp_path: Path) -> None:
    """What a scope or a report is would be unknown, so that an editor could not complete its names."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with amp_core.cached_casts(model) as casts:
        assert_type(casts, CachedCasts)
    with amp_core.master_weights(model, optimizer) as kept:
        assert_type(kept, MasterWeights)
    low = nn.Linear(2, 2).bfloat16()
    with amp_core.master_weights(low, torch.optim.SGD(low.parameters(), lr=0.1), "kahan") as stored:
        assert_type(stored, StoredWeights)
    with amp_core.record(model) as recording:
        assert_type(recording, Recording)
    recording.save(tmp_path / "recording.json")
    assert_type(Recording.load(tmp_path / "recording.json"), Recording)
    with amp_core.guard(model) as guard:
        assert_type(guard, Guard)
    with amp_core.watch(model) as watch:
        assert_type(watch, Watch)

    advice = amp_core.advise(lambda: model(torch.ones(1, 2)).square().sum(), torch.device("cpu"))
    assert_type(advice, Advice)
    assert isinstance(advice, Advice)
