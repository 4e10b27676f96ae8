"""Quantising DTensors, as under tensor parallelism."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

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
