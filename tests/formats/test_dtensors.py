"""Quantising DTensors, as under tensor parallelism."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.functional import linear

from amp_core import OpPolicy, autocast, cached_casts
from amp_core.formats import Recipe, quantize


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", ["fp8_rowwise", "mxfp6", "nvfp4"])
def test_a_dtensor_is_quantised_like_its_whole(name: str) -> None:
    """Scales are magnitudes seen as exponents, and products NaN; or an error of mixed tensors comes."""
    how, whole = Recipe.named(name).grad_output, torch.randn(20, 24)
    assert how is not None
    sharded = distribute_tensor(whole, init_device_mesh("cpu", (1,)), [Shard(0)])
    ours, expected = (quantize(each, how, seed=1) for each in (sharded, whole))
    for part in ("values", "scale", "counts"):
        assert torch.equal(getattr(ours, part).full_tensor(), getattr(expected, part)), part
    assert torch.equal(ours.packed().dequantize().full_tensor(), expected.dequantize())


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", ["fp8_tiles", "mxfp8", "nvfp4"])
def test_a_quantised_dtensor_is_kept(name: str) -> None:
    """The second use of a weight in `cached_casts` mixes tensors, or multiplies in another order."""
    mesh = init_device_mesh("cpu", (1,))
    layer = torch.nn.Linear(48, 6, bias=False)
    layer.weight = torch.nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(1)]))
    policy = OpPolicy.default("cpu").override({"linear": Recipe.named(name)})
    results = []
    with cached_casts(layer):
        for _ in range(2):
            x = distribute_tensor(torch.ones(4, 48), mesh, [Shard(1)]).requires_grad_()
            torch.manual_seed(0)  # of stochastic rounding
            with autocast("cpu", dtype=torch.bfloat16, policy=policy):
                product = linear(x, layer.weight)
            product.sum().backward()
            results.append([product.full_tensor(), x.grad.full_tensor()])
    assert all(map(torch.equal, *results))
