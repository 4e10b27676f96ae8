"""Recipes in graphs whose sizes only the values of a tensor give, as the tokens of an expert."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from amp_core import OpPolicy, autocast


def _step(x: Tensor, w: Tensor, policy: OpPolicy) -> Tensor:
    chosen = x[x[:, 0] > 0]
    with autocast("cpu", dtype=torch.bfloat16, policy=policy):
        return F.linear(chosen, w).float().square().sum()


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
@pytest.mark.parametrize(
    "recipe", [pytest.param("fp8_rowwise", marks=pytest.mark.slow), "fp8_tiles", "nvfp4"]
)
def test_a_graph_takes_any_number_of_rows(recipe: str) -> None:
    """torch.compile raises GuardOnDataDependentSymNode, or a graph quantises otherwise than eager mode."""
    policy = OpPolicy.default("cpu").override({"linear": f"recipe {recipe}"})
    torch._dynamo.reset()
    compiled = torch.compile(_step, backend="aot_eager", fullgraph=True)
    for rows in (40, 0):
        x = torch.randn(64, 40, generator=torch.Generator().manual_seed(0))
        x[:, 0] = torch.arange(64) < rows
        w = torch.eye(33, 40, requires_grad=True)
        got, wanted = (step(x, w, policy) for step in (compiled, _step))
        assert torch.equal(got, wanted)
        if recipe != "nvfp4":  # which rounds gradients at random
            assert torch.equal(*(torch.autograd.grad(loss, w)[0] for loss in (got, wanted)))
