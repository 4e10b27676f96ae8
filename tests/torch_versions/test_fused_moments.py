"""Fused Adam whose moments are bfloat16; a skipped step must leave them as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from amp_core import GradScaler

BF16, FP32 = torch.bfloat16, torch.float32
NO_GPU = not torch.cuda.is_available() or torch.__version__ < "2.15"
CUDA = pytest.param(
    "cuda",
    FP32,
    marks=[pytest.mark.gpu, pytest.mark.skipif(NO_GPU, reason="needs a CUDA GPU and torch 2.15")],
)


def train(scaler: Any, device: str, dtype: torch.dtype, kind: Any) -> list[Any]:
    """Take steps 0 to 4, of which step 2 overflows; return what each left."""
    torch.manual_seed(0)
    model = nn.Linear(6, 5).to(device, dtype)
    optimizer = kind(model.parameters(), lr=0.1, fused=True)
    scale = scaler(device, init_scale=1024.0, growth_interval=2)
    results: list[Any] = []
    for i in range(5):
        optimizer.zero_grad()
        scale.scale(model(torch.full((4, 6), 0.5 + i, device=device, dtype=dtype)).float().sum()).backward()
        if i == 2:
            model.weight.grad[1, 1] = float("inf")
        scale.step(optimizer)
        scale.update()
        for state in optimizer.state.values():
            state.update({name: state[name].to(BF16) for name in ("exp_avg", "exp_avg_sq")})
        moments = [s[name].clone() for s in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
        results.append(([p.detach().clone() for p in model.parameters()] + moments, scale.get_scale()))
    return results


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize(("device", "dtype"), [("cpu", BF16), CUDA])
def test_bfloat16_moments_as_in_torch(device: str, dtype: torch.dtype, kind: Any) -> None:
    """A fused step writes other moments than torch does, or a skipped one writes any."""
    ours = train(GradScaler, device, dtype, kind)
    theirs = train(torch.amp.GradScaler, device, dtype, kind)
    for (our, scale), (their, expected) in zip(ours, theirs, strict=True):
        assert scale == expected
        assert all(map(torch.equal, our, their))
    assert all(map(torch.equal, ours[2][0], ours[1][0]))  # skipped
    assert not torch.equal(ours[3][0][0], ours[2][0][0])


def test_moments_that_the_kernel_refuses() -> None:
    """An error in a fused step leaves the scaler's divisor on the optimizer, for the next step to use."""
    if torch.__version__ >= "2.16":
        pytest.skip("this torch may take them")
    weight = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
    scaler = GradScaler("cpu", 8.0)
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    wide = optimizer.state[weight]["exp_avg"]
    optimizer.state[weight]["exp_avg"] = wide.to(BF16)
    before = weight.detach().clone()
    with pytest.raises(RuntimeError, match=r"found BFloat16|the same dtype"):
        scaler.step(optimizer)
    assert torch.equal(weight, before)
    assert not {"grad_scale", "found_inf"} & set(vars(optimizer))
    optimizer.state[weight]["exp_avg"] = wide
    scaler.step(optimizer)
    assert not torch.equal(weight, before)
