"""Random DTensors on a mesh of two dimensions, with plain parameters, against one process that has all."""

from __future__ import annotations

import itertools
import math
import os
import random

import torch
import torch.distributed as dist
from drawn import programs
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

import amp_core

dist.init_process_group("gloo")
MESH = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
MESHES = {"both": MESH, "dp": MESH["dp"], "tp": MESH["tp"], "none": None}
SHAPES = [(1,), (3,), (5,), (1, 1), (2, 3), (4, 4), (7, 2)]


class Param:
    """A parameter of which each rank has a part, and the whole one of one process."""

    def __init__(self, draw: random.Random, mesh: DeviceMesh | None) -> None:
        shape = draw.choice(SHAPES)
        self.mesh, value = mesh, torch.randn(shape)
        self.whole = nn.Parameter(value.clone())
        self.placements: list[Placement] = []
        if mesh is not None:
            every = [Replicate(), *map(Shard, range(len(shape))), *map(Shard, range(len(shape)))]
            self.placements = [draw.choice(every) for _ in range(mesh.ndim)]
        self.part = nn.Parameter(self.spread(value, ()))

    def spread(self, value: Tensor, summands: tuple[int, ...]) -> Tensor:
        """Return this rank's part of `value`; in the dimensions `summands`, each rank has a summand."""
        if self.mesh is None:
            return value.clone()
        part = distribute_tensor(value.clone(), self.mesh, self.placements)
        if not summands:
            return part
        is_first = all(self.mesh.get_coordinate()[i] == 0 for i in summands)
        share = part.to_local() if is_first else torch.zeros_like(part.to_local())
        placements = [Partial() if i in summands else p for i, p in enumerate(self.placements)]
        return DTensor.from_local(
            share, self.mesh, placements, run_check=False, shape=value.shape, stride=value.stride()
        )

    def receive(self, draw: random.Random, scale: float, bad: bool, absent: bool) -> None:
        grad = torch.randn(self.whole.shape) * scale
        if bad:
            grad.view(-1)[draw.randrange(grad.numel())] = draw.choice([math.inf, math.nan])
        copied = [i for i, placement in enumerate(self.placements) if placement.is_replicate()]
        dims = tuple(i for i in copied if draw.random() < 0.5)
        self.whole.grad = None if absent else grad / scale
        self.part.grad = None if absent else self.spread(grad, dims)

    def check(self, why: object) -> None:
        part = self.part.full_tensor() if isinstance(self.part, DTensor) else self.part
        torch.testing.assert_close(part, self.whole, rtol=1e-4, atol=1e-4, msg=lambda text: f"{text} {why}")


class Program:
    """Optimizers of a rank and of one process, and how both step."""

    def __init__(self, draw: random.Random) -> None:
        torch.manual_seed(draw.randrange(2**30))
        kinds = draw.choice([["both"], ["dp"], ["both", "dp", "tp", "none"], ["dp", "tp"], ["tp", "none"]])
        self.draw = draw
        self.groups = [self.params(kinds) for _ in range(draw.randint(1, 2))]
        has_plain = any(all(param.mesh is None for param in group) for group in self.groups)
        ranks = {"process_group": dist.group.WORLD} if has_plain or draw.random() < 0.3 else {}
        make = draw.choice([torch.optim.SGD, torch.optim.AdamW])
        self.ours, self.theirs = (
            [make([getattr(p, of) for p in group], lr=0.1, foreach=False) for group in self.groups]
            for of in ("part", "whole")
        )
        self.scale = draw.choice([0.125, 1.0, 64.0])
        self.scaler = amp_core.GradScaler("cpu", self.scale, overlap=draw.random() < 0.3, **ranks)
        self.order = draw.choice([1.0, 2.0, 2.0, 3.0, math.inf])
        self.max_norm = draw.choice([0.01, 1.0, 1e4])
        self.style = draw.choice(["plain", "step", "clip", "together"])
        placements = [[param.placements for param in group] for group in self.groups]
        self.why = kinds, bool(ranks), self.style, self.order, self.max_norm, placements

    def params(self, kinds: list[str]) -> list[Param]:
        return [Param(self.draw, MESHES[self.draw.choice(kinds)]) for _ in range(self.draw.randint(1, 4))]

    def receive(self, spoilt: int | None) -> None:
        for i, group in enumerate(self.groups):
            for j, param in enumerate(group):
                absent = bool(j) and self.draw.random() < 0.15
                param.receive(self.draw, self.scale, i == spoilt and not j, absent)

    def expected(self, spoilt: int | None) -> tuple[list[bool], list[float]]:
        """Let the one process step; return which optimizers skip, and the norms."""
        params = [[param.whole for param in group] for group in self.groups]
        skips = [i == spoilt for i in range(len(params))]
        if self.style == "together":
            params, skips = [[*itertools.chain(*params)]], [spoilt is not None] * len(params)
        norms = []
        if self.style != "plain":
            norms = [float(nn.utils.clip_grad_norm_(p, self.max_norm, self.order)) for p in params]
        for optimizer, skip in zip(self.theirs, skips, strict=True):
            if not skip:
                optimizer.step()
        return skips, norms

    def step(self) -> tuple[list[bool], list[float]]:
        """Return the same of this rank."""
        norms, options = [], {}
        if self.style == "step":
            options = {"max_norm": self.max_norm, "norm_type": self.order}
        clipped = {"clip": self.ours, "together": [self.ours]}
        for each in clipped.get(self.style, []):
            norms.append(float(self.scaler.clip_grad_norm_(each, self.max_norm, self.order)))
        for optimizer in self.ours:
            self.scaler.step(optimizer, **options)
        records = [self.scaler.last_step[each] for each in self.ours]
        if self.style == "step":
            norms = [record.total_norm for record in records]
        self.scaler.update()
        return [record.skipped for record in records], norms

    def check(self) -> None:
        for _ in range(3):
            self.scaler.scale(torch.ones(()))
            spoilt = self.draw.choice([*range(len(self.groups)), *[None] * 3])
            self.receive(spoilt)
            self.scale *= 1.0 if spoilt is None else 0.5
            (skips, wanted), (skipped, norms) = self.expected(spoilt), self.step()
            assert skipped == skips, self.why
            assert self.scaler.get_scale() == self.scale, self.why
            for norm, other in zip(norms, wanted, strict=True):
                bad = not (math.isfinite(norm) or math.isfinite(other))
                assert bad or math.isclose(norm, other, rel_tol=1e-4), (norms, wanted, self.why)
            for param in itertools.chain(*self.groups):
                param.check(self.why)


for draw in programs(most=40, number="placements"):
    Program(draw).check()
dist.barrier()
print("all is well", flush=True)
os._exit(0)  # gloo's threads let go of tensors while the interpreter ends, and abort it (pytorch#190489)
