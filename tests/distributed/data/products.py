"""Random products of DTensors under recipes, with kept weights, against those of the whole tensors."""

from __future__ import annotations

import os
import random

import torch
import torch.distributed as dist
from drawn import programs
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from amp_core import OpPolicy, Recipe, autocast, cached_casts

dist.init_process_group("gloo")
MESH = init_device_mesh("cpu", (dist.get_world_size(),))
RECIPES = ["fp8_tensorwise", "fp8_rowwise", "fp8_tiles", "mxfp8", "mxfp4", "nvfp4"]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def results(factors: list[torch.Tensor], recipe: Recipe) -> list[torch.Tensor]:
    """Return the product and the gradients of its factors, the same at each use of a kept weight."""
    layer = torch.nn.Linear(1, 1, bias=False)
    layer.weight = torch.nn.Parameter(factors[1].clone())
    with cached_casts(layer):
        first, second = (used(factors[0], layer, recipe) for _ in range(2))
    assert all(map(torch.equal, first, second)), recipe
    return first


def used(factor: torch.Tensor, layer: torch.nn.Linear, recipe: Recipe) -> list[torch.Tensor]:
    leaves = [factor.clone().requires_grad_(), layer.weight]
    layer.zero_grad()
    torch.manual_seed(7)  # of stochastic rounding
    policy = OpPolicy.default("cpu").override({"linear": recipe})
    with autocast("cpu", dtype=torch.bfloat16, policy=policy):
        product = whole(torch.nn.functional.linear(*leaves)).float()
    (product * (torch.arange(product.numel()).view(product.shape) % 7 - 3)).sum().backward()
    return [product.detach(), *(whole(leaf.grad) for leaf in leaves)]


def program(draw: random.Random) -> None:
    torch.manual_seed(draw.randrange(2**30))
    rows, columns, summed = (draw.choice([4, 6, 16, 32, 48]) for _ in range(3))
    factors = [
        torch.randn(*draw.choice([(), (2,)]), rows, summed),
        torch.randn(columns, summed) * draw.choice([1, 100]),
    ]
    places = [draw.choice([Replicate(), *map(Shard, range(each.dim()))]) for each in factors]
    sharded = [distribute_tensor(each, MESH, [place]) for each, place in zip(factors, places, strict=True)]
    name = draw.choice(RECIPES)
    for ours, expected in zip(
        *(results(each, Recipe.named(name)) for each in (sharded, factors)), strict=True
    ):
        difference = (ours - expected).abs().max() / expected.abs().max()
        assert difference < 0.02, (name, [each.shape for each in factors], places, difference)


for draw in programs(most=12, number="products"):
    program(draw)
dist.barrier()
print("all is well", flush=True)
os._exit(0)  # gloo's threads let go of tensors while the interpreter ends, and abort it (pytorch#190489)
