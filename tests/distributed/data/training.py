"""Random training programs of ranks, against scaling by hand that has the data of all ranks."""

from __future__ import annotations

import contextlib
import copy
import math
import os
import random
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from by_hand import KINDS, SPARSE, Batch, Part, Reference
from drawn import programs
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import amp_core

dist.init_process_group("gloo")
RANK, RANKS, WORLD = dist.get_rank(), dist.get_world_size(), dist.group.WORLD


class Plan:
    """What a program combines."""

    def __init__(self, draw: random.Random) -> None:
        self.layout = draw.choice(["own", "own", "ddp", "fsdp", "zero"])
        count = draw.choice([1, 2, 2])
        self.sparse = self.layout in ("own", "ddp") and draw.random() < 0.3
        self.window = draw.choice(["none", "none", "own", "shared"]) if not self.sparse else "none"
        self.leave_out = draw.random() < 0.7
        self.clip = draw.choice(["none", "step", "clip", "unscale"] + ["together"] * 2 * (count - 1))
        if self.window == "shared":
            self.clip = "together"
        if self.clip == "unscale" and (self.layout == "own" or self.sparse):
            self.clip = "clip"  # torch's clips what one rank has, and nothing sparse
        self.order = draw.choice([2.0, 2.0, 1.0, 3.0, math.inf])
        self.overlap, self.reweight = draw.random() < 0.3, draw.random() < 0.5
        self.first_unscaled = draw.random() < 0.3
        self.interrupted = draw.random() < 0.3
        keyed = draw.random() < 0.4 and self.clip != "together" and self.window != "shared"
        self.keys = [f"key {i}" if keyed and draw.random() < 0.7 else None for i in range(count)]
        self.closure = self.clip in ("none", "step") and self.window == "none" and draw.random() < 0.25
        kinds = [*SPARSE] if self.sparse else [*KINDS]
        if self.layout == "fsdp":
            kinds = ["adamw"]  # the only one that torch has fused for DTensors
        self.kinds = [draw.choice(kinds) for _ in range(count)]
        self.how = [
            draw.choice([{"fused": True}, {"foreach": True}, {"foreach": False}]) for _ in range(count)
        ]
        if self.sparse:
            self.how = [{"foreach": False}] * count
        # torch's fused momentum refuses parameters whose first gradient comes later than that of others.
        momentum = (self.layout == "own" and {"sgd", "dampened"}) or ()
        for i, kind in enumerate(self.kinds):
            self.how[i] = {"foreach": True} if kind in momentum else self.how[i]
        self.no_sync = self.layout in ("ddp", "zero") and self.window == "none" and draw.random() < 0.5
        self.max_norm = draw.choice([0.01, 1.0, 1e4])
        self.init_scale = draw.choice([2.0**-3, 1.0, 2.0**10])
        self.interval = draw.randint(1, 3)
        self.set_to_none = draw.random() < 0.7
        own = self.layout == "own"
        self.bad = draw.choice([0.0, 0.05, 0.2])
        self.idle, self.shallow = (0.3, 0.3) if own else (0.0, 0.0)
        self.between = draw.choice(["nothing", "state_dict", "copies", "checkpoint"])

        self.takes_out = self.leave_out and self.window != "none"
        self.has_norms = self.clip not in ("none", "unscale") and not self.interrupted
        options = {"max_norm": self.max_norm, "norm_type": self.order}
        self.step_options = options if self.clip == "step" else {}

    def __repr__(self) -> str:
        return str(vars(self))


class Side:
    """A rank's parts, optimizers and scaler."""

    def __init__(self, plan: Plan, parts: list[Part]) -> None:
        self.plan, self.bare = plan, parts
        wrap = {"own": lambda m: m, "fsdp": fully_shard}.get(plan.layout, DistributedDataParallel)
        self.models = [wrap(part) for part in parts]
        self.make_optimizers()
        self.make_scaler()

    def make_optimizers(self) -> None:
        self.optimizers = []
        for kind, how, model in zip(self.plan.kinds, self.plan.how, self.models, strict=True):
            if self.plan.layout == "zero":
                self.optimizers.append(ZeroRedundancyOptimizer(model.parameters(), KINDS[kind], **how))
            else:
                self.optimizers.append(KINDS[kind](model.parameters(), **how))

    def make_scaler(self) -> None:
        plan, group = self.plan, {}
        if plan.layout == "own":
            params = [p for part in self.bare for p in part.parameters()]
            group = {"process_group": WORLD, "sharded_over": {WORLD: params}}
        rule = amp_core.LossScaleSchedule(2.0, 0.25, plan.interval)
        schedules = {key: rule for key in plan.keys if key is not None}
        self.scaler = amp_core.GradScaler(
            "cpu", plan.init_scale, schedule=rule, schedules=schedules, overlap=plan.overlap, **group
        )
        for key in plan.keys:
            self.scaler.scale(torch.ones(()), key)
        self.windows = self.new_windows()

    def backward(self, i: int, batch: Batch) -> None:
        if not batch.idle:
            self.scaler.scale(batch.loss(self.models[i]), self.plan.keys[i]).backward()

    def accumulate(self, i: int, batches: list[list[list[Batch]]]) -> None:
        for number, batch in enumerate(batches):
            last = number == len(batches) - 1
            with contextlib.ExitStack() as stack:
                if self.plan.no_sync and not last:
                    stack.enter_context(self.models[i].no_sync())
                self.backward(i, batch[i][RANK])

    def step(self, batches: list[list[list[Batch]]]) -> tuple[list[bool], list[tuple[int, ...]], list]:
        """Take one step; return what `Reference.step` does."""
        plan, scaler = self.plan, self.scaler
        if not plan.closure:
            self.gather(batches)
        if plan.clip == "together":
            self.clip(self.optimizers, plan.keys[0])
        for i, (optimizer, key) in enumerate(zip(self.optimizers, plan.keys, strict=True)):
            if plan.closure:
                scaler.step_closure(optimizer, self.closure(i, batches), key=key, **plan.step_options)
                continue
            if plan.clip == "clip":
                self.clip(optimizer, key)
            elif plan.clip == "unscale":
                scaler.unscale_(optimizer, key=key)
                nn.utils.clip_grad_norm_(self.models[i].parameters(), plan.max_norm, plan.order)
            if not plan.interrupted or self.is_interrupted(optimizer, key):
                scaler.step(optimizer, key=key, **plan.step_options)
        records = [scaler.last_step[each] for each in self.optimizers]
        skipped = [record.skipped for record in records]
        assert [not bool(scaler.landed(each)) for each in self.optimizers] == skipped
        scaler.update()
        for each in self.optimizers:
            each.zero_grad(plan.set_to_none)
        norms = [record.total_norm for record in records] if plan.has_norms else []
        return skipped, [record.bad_micro_batches or () for record in records], norms

    def clip(self, optimizers: Any, key: str | None) -> None:
        if self.plan.first_unscaled:
            self.scaler.unscale_(optimizers, key=key)
        self.scaler.clip_grad_norm_(optimizers, self.plan.max_norm, self.plan.order, key=key)

    def closure(self, i: int, batches: list[list[list[Batch]]]) -> Callable[[], float]:
        def closure() -> float:
            self.optimizers[i].zero_grad(self.plan.set_to_none)
            self.accumulate(i, batches)
            return 0.0

        return closure

    def is_interrupted(self, optimizer: torch.optim.Optimizer, key: str | None) -> bool:
        """Take a step that raises before the optimizer changes anything; return whether it got there."""

        def stop(*_: object) -> None:
            raise KeyboardInterrupt

        handle = optimizer.register_step_pre_hook(stop)
        try:
            self.scaler.step(optimizer, key=key, **self.plan.step_options)
        except KeyboardInterrupt:
            return True
        finally:
            handle.remove()
        return False

    def gather(self, batches: list[list[list[Batch]]]) -> None:
        if self.plan.window == "none":
            for i in range(len(self.models)):
                self.accumulate(i, batches)
            return
        with contextlib.ExitStack() as stack:
            for each in self.windows:
                stack.enter_context(each)
            for batch in batches:
                with contextlib.ExitStack() as inner:
                    for each in self.windows:
                        inner.enter_context(each.micro_batch())
                    for i in range(len(self.models)):
                        self.backward(i, batch[i][RANK])

    def go_on(self, how: str) -> None:
        """Continue with other objects that have the same state."""
        if how == "state_dict" or (how == "copies" and self.plan.layout == "own"):
            saved = copy.deepcopy(self.scaler.state_dict())
            self.make_scaler()
            self.scaler.load_state_dict(saved)
            if self.plan.layout != "zero":
                states = [copy.deepcopy(each.state_dict()) for each in self.optimizers]
                self.make_optimizers()
                for each, state in zip(self.optimizers, states, strict=True):
                    each.load_state_dict(state)
            self.windows = self.new_windows()
        elif how == "copies":
            self.scaler = copy.deepcopy(self.scaler)
            self.windows = self.new_windows()
        elif how == "checkpoint":
            with contextlib.ExitStack() as stack:
                folder = [stack.enter_context(tempfile.TemporaryDirectory()) if RANK == 0 else None]
                dist.broadcast_object_list(folder)
                dcp.save({"scaler": self.scaler}, checkpoint_id=folder[0])
                self.make_scaler()
                dcp.load({"scaler": self.scaler}, checkpoint_id=folder[0])
                dist.barrier()  # the first rank removes the folder

    def new_windows(self) -> list[amp_core.AccumulationWindow]:
        plan, make = self.plan, amp_core.AccumulationWindow
        how = {"leave_out": plan.leave_out, "reweight": plan.reweight}
        if plan.window == "own":
            pairs = zip(self.optimizers, plan.keys, strict=True)
            return [make(self.scaler, each, key=key, **how) for each, key in pairs]
        return (
            [make(self.scaler, self.optimizers, key=plan.keys[0], **how)] if plan.window == "shared" else []
        )


def whole(value: Any) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def program(draw: random.Random) -> None:
    seed = draw.randrange(2**30)
    torch.manual_seed(seed)
    plan = Plan(draw)
    owners = RANKS if plan.layout == "own" else 1
    parts = [[Part(plan.sparse) for _ in plan.kinds] for _ in range(owners)]
    reference = Reference(plan, copy.deepcopy(parts))
    side = Side(plan, copy.deepcopy(parts[RANK % owners]))
    for step in range(4):
        micro_batches = [
            [[Batch(draw, plan.bad, plan.idle, plan.shallow) for _ in range(RANKS)] for _ in plan.kinds]
            for _ in range(draw.randint(1, 3))
        ]
        expected, got = reference.step(micro_batches), side.step(micro_batches)
        *got, norms = got
        *expected, wanted = expected
        if plan.window == "none":
            expected, got = expected[0], got[0]
        assert got == expected, (step, got, expected, plan)
        for mine, other in zip(norms, wanted, strict=bool(norms)):
            close = math.isclose(mine, other, rel_tol=1e-4) or not (
                math.isfinite(mine) or math.isfinite(other)
            )
            assert close, (step, norms, wanted, plan)
        scales = [side.scaler.get_scale(key) for key in plan.keys]
        wanted = [reference.scales[key][0] for key in plan.keys]
        assert scales == wanted, (step, scales, wanted, plan)
        for i, model in enumerate(side.bare):
            theirs = reference.parts[RANK % owners][i].parameters()
            for mine, other in zip(model.parameters(), theirs, strict=True):
                close = torch.allclose(whole(mine), other, rtol=1e-4, atol=1e-5)
                assert close, (step, i, whole(mine), other, expected, plan)
        if step == 1:
            side.go_on(plan.between)


if __name__ == "__main__":
    for draw in programs(most=int(sys.argv[1]), number="training"):
        program(draw)
    dist.barrier()
    print("all is well", flush=True)
    os._exit(0)  # gloo's threads let go of tensors while the interpreter ends, and abort it (pytorch#190489)
