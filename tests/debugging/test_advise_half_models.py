"""`advise` on models whose weights are in low precision: some of what it tries does not run."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import amp_core


class Squares(nn.Module):
    """Its square exceeds the range of float16."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * 400) * (x * 400)


def test_a_fix_that_does_not_run_is_none() -> None:
    """The advice ends in torch's error about dtypes, as the norm takes no float32 from the layer before."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), Squares(), nn.LayerNorm(16), nn.Linear(16, 3)).half()
    x = torch.randn(4, 8, dtype=torch.float16)

    def step() -> Tensor:
        result: Tensor = model(x).float().square().mean()
        return result

    advice = amp_core.advise(step, "cpu", dtype=torch.float16)
    (finding, *_) = advice.findings
    assert not advice.modules
    assert finding.module == "1"
    assert not finding.fix
    assert "the step raises 'mixed dtype" in finding.fault
    assert max(map(len, str(advice).splitlines())) <= 80


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_policy_that_does_not_run_is_not_timed(dtype: torch.dtype) -> None:
    """The advice for speed ends in the same error, as small products are the fastest in float32."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 3)).to(dtype)
    x = torch.randn(4, 8, dtype=dtype)
    advice = amp_core.advise(
        lambda: model(x).float().square().mean(), "cpu", dtype=dtype, goal="speed", rounds=1
    )
    assert advice.seconds["advice"] <= max(advice.seconds.values())
    with amp_core.autocast("cpu", dtype=dtype, policy=advice.policy, enabled=advice.enabled):
        model(x)
