"""What one rank does in the tests of `process_group`. The arguments name the scenes."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import os
import pickle
import random
import re
import sys
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from copies import copies  # noqa: F401
from drawn import programs
from experts import experts  # noqa: F401
from hybrid import hybrid  # noqa: F401
from joined import joined  # noqa: F401
from summands import summands  # noqa: F401
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.utils._python_dispatch import TorchDispatchMode
from uneven import uneven  # noqa: F401
from wide import wide  # noqa: F401
from windows import windows  # noqa: F401

import amp_core
from amp_core.callbacks import SkipAwareAverage

INPUTS = [torch.full((4, 6), value) for value in (0.5, 1.0, 2.0, -1.0)]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 5))


def trained(
    net: nn.Module,
    kind: str,
    overflow_at: int,
    max_norm: float | None,
    group: dist.ProcessGroup | None = None,
) -> tuple[nn.Module, list]:
    options = {"fused": True} if kind == "fused" else {}
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, **options)
    scaler = amp_core.GradScaler("cpu", 1024.0, growth_interval=2, process_group=group)
    seen = []
    for number, batch in enumerate(INPUTS):
        optimizer.zero_grad()
        scaler.scale(net(batch).square().mean()).backward()
        if number == overflow_at:
            spoil(net)
        scaler.step(optimizer, max_norm=max_norm)
        scaler.update()
        record = scaler.last_step[optimizer]
        seen.append((record.skipped, record.total_norm, scaler.get_scale()))
    return net, seen


def spoil(net: nn.Module) -> None:
    """An inf in the last element of the first weight: in the piece of one rank, if it is cut."""
    grads = [p.grad for p in net.parameters() if p.grad is not None and p.grad.numel()]
    grad = grads[0]
    if isinstance(net, FullyShardedDataParallel):
        if dist.get_rank() == dist.get_world_size() - 1:
            grads[-1].view(-1)[0] = math.inf
    elif not isinstance(grad, DTensor):
        grad.view(-1)[-1] = math.inf
    elif dist.get_rank() == dist.get_world_size() - 1:
        grad.to_local().view(-1)[-1] = math.inf


def full(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def fsdp() -> None:
    """Sharded training against one process, with one collective a step."""
    for kind in ("fused", "plain"):
        for max_norm in (None, 0.01):
            alone, expected = trained(model(), kind, 2, max_norm)
            net = model()
            for layer in (net[0], net[2]):
                fully_shard(layer)
            fully_shard(net)
            count = mock.Mock(wraps=dist.all_reduce)
            with mock.patch.object(dist, "all_reduce", count):
                net, seen = trained(net, kind, 2, max_norm)
            assert count.call_count == len(INPUTS), count.call_count
            assert [s[::2] for s in seen] == [e[::2] for e in expected], (seen, expected)
            assert [s[0] for s in seen] == [False, False, True, False]
            for (_, norm, _), (_, wanted, _) in zip(seen, expected, strict=True):
                if wanted is not None and math.isfinite(wanted):
                    assert math.isclose(norm, wanted, rel_tol=1e-5), (norm, wanted)
            for ours, theirs in zip(net.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(full(ours), theirs, rtol=1e-5, atol=1e-6)


def reduced() -> None:
    """FSDP2 that reduces and keeps gradients in other dtypes: as unscaling and clipping by hand."""
    low, high = torch.bfloat16, torch.float32
    cases = [(high, high, low, reduce) for reduce in (None, high, low)] + [(low, low, None, high)]
    if torch.__version__ >= "2.15":  # the first that can keep wider gradients of sharded weights
        cases += [(low, high, None, None), (low, high, low, high), (low, high, None, low)]
    for weights, kept, computed, reduce in cases:
        policy = MixedPrecisionPolicy(param_dtype=computed, reduce_dtype=reduce)
        (ours, norm), (theirs, wanted) = (reduced_run(weights, kept, policy, hand) for hand in (False, True))
        assert math.isclose(norm, wanted, rel_tol=1e-2 if kept is low else 1e-5), (norm, wanted)
        torch.testing.assert_close(ours, theirs)


def reduced_run(
    weights: torch.dtype, kept: torch.dtype, policy: MixedPrecisionPolicy, by_hand: bool
) -> tuple[list[torch.Tensor], float]:
    """Take three clipped steps; return the parameters and the last norm."""
    net = fully_shard(model().to(weights), mp_policy=policy)
    for param in net.parameters():
        if kept is not weights:
            param.grad_dtype = kept
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    scaler = amp_core.GradScaler("cpu", 1024.0)
    for batch in INPUTS[:3]:
        optimizer.zero_grad()
        loss = net(batch.to(weights)).float().square().mean()
        (loss * 1024 if by_hand else scaler.scale(loss)).backward()
        assert {p.grad.dtype for p in net.parameters()} == {kept}
        if by_hand:
            for param in net.parameters():
                param.grad.div_(1024)
            norm = float(nn.utils.clip_grad_norm_(net.parameters(), 0.5).full_tensor())
            optimizer.step()
        else:
            scaler.step(optimizer, max_norm=0.5)
            scaler.update()
            assert not scaler.last_step[optimizer].skipped
            norm = scaler.history[-1].total_norm
    return [full(p) for p in net.parameters()], norm


def fsdp1() -> None:
    """FullyShardedDataParallel: refused without its ranks; with them as in one process."""
    for kind in ("fused", "plain"):
        alone, expected = trained(model(), kind, 2, 0.01)
        for original in (True, False):
            net = FullyShardedDataParallel(model(), use_orig_params=original, device_id=torch.device("cpu"))
            optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, fused=kind == "fused")
            lone = amp_core.GradScaler("cpu", 1024.0)
            lone.scale(net(INPUTS[0]).square().mean()).backward()
            with raises(ValueError, r"process_group=model\.process_group"):
                lone.step(optimizer, max_norm=0.01)
            net, seen = trained(net, kind, 2, 0.01, net.process_group)
            assert [s[::2] for s in seen] == [e[::2] for e in expected], (seen, expected)
            for (_, norm, _), (_, wanted, _) in zip(seen, expected, strict=True):
                if math.isfinite(wanted):
                    assert math.isclose(norm, wanted, rel_tol=1e-5), (original, norm, wanted)
            with FullyShardedDataParallel.summon_full_params(net):
                for ours, theirs in zip(net.parameters(), alone.parameters(), strict=original):
                    if original:
                        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    for choose in programs(most=16):
        fsdp1_at_random(choose)


def fsdp1_at_random(choose: random.Random) -> None:
    """Layers of any width, so that shards are uneven, empty or padded, and an inf in any step."""
    widths = [6, *(choose.randint(1, 9) for _ in range(choose.randint(1, 3)))]
    kind, overflow_at = choose.choice(["fused", "plain"]), choose.randrange(len(INPUTS) + 1)
    max_norm, original = choose.choice([None, 0.01, 100.0]), choose.random() < 0.5
    strategies = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD
    strategy = choose.choice(strategies)

    def chain() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(*pair) for pair in itertools.pairwise(widths)))

    alone, expected = trained(chain(), kind, overflow_at, max_norm)
    net = FullyShardedDataParallel(
        chain(), use_orig_params=original, device_id=torch.device("cpu"), sharding_strategy=strategy
    )
    net, seen = trained(net, kind, overflow_at, max_norm, net.process_group)
    case = widths, kind, overflow_at, max_norm, original, strategy
    assert [s[::2] for s in seen] == [e[::2] for e in expected], (case, seen, expected)
    for (_, norm, _), (_, wanted, _) in zip(seen, expected, strict=True):
        if wanted is not None and math.isfinite(wanted):
            assert math.isclose(norm, wanted, rel_tol=1e-4, abs_tol=1e-7), (case, norm, wanted)
    with FullyShardedDataParallel.summon_full_params(net):
        ours = torch.cat([p.detach().reshape(-1) for p in net.parameters()])
        theirs = torch.cat([p.detach().reshape(-1) for p in alone.parameters()])
        torch.testing.assert_close(ours[: len(theirs)], theirs, rtol=1e-4, atol=1e-5)


def bucket_views() -> None:
    """Gradients that are views of DistributedDataParallel's buckets: a window keeps what they held."""
    sums = []
    for as_view in (False, True):
        net = DistributedDataParallel(model(), gradient_as_bucket_view=as_view)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        scaler = amp_core.GradScaler("cpu", 8.0)
        for number in range(3):
            optimizer.zero_grad()
            with amp_core.AccumulationWindow(scaler, optimizer) as window:
                for part, batch in enumerate(INPUTS[:3]):
                    with window.micro_batch():
                        scaler.scale(net(batch * (1 + dist.get_rank())).square().mean()).backward()
                        if number == part == 1:
                            net.module[0].weight.grad[0, 0] = math.inf
            sums.append([p.grad.clone() for p in net.parameters()])
            scaler.step(optimizer)
            scaler.update()
            assert not scaler.last_step[optimizer].skipped
    torch.testing.assert_close(sums[3:], sums[:3])


def plain() -> None:
    """Gradients that are copies: an inf on one rank keeps all from stepping, and the norm is not summed."""
    for kind in ("fused", "plain"):
        net = model()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, fused=kind == "fused")
        scaler = amp_core.GradScaler(
            "cpu", 8.0, process_group=dist.group.WORLD, named_parameters=net.named_parameters()
        )
        told: list[str] = []
        scaler.register_skip_hook(lambda _, record, told=told: told.append(str(record)))
        before = copy.deepcopy(net.state_dict())
        averaged = AveragedModel(net)
        SkipAwareAverage(averaged, scaler)
        scaler.scale(net(INPUTS[1]).square().mean()).backward()
        wanted = math.sqrt(sum(float(p.grad.square().sum()) for p in net.parameters())) / 8.0
        norm = scaler.clip_grad_norm_(optimizer, 1.0)
        assert math.isclose(float(norm), wanted, rel_tol=1e-5)
        assert math.isclose(float(scaler._per_optimizer_states.found_infs()[0]), 0.0)
        scaler.update()
        optimizer.zero_grad()
        scaler.scale(net(INPUTS[1]).square().mean()).backward()
        if dist.get_rank() == 1:
            spoil(net)
        scaler.step(optimizer)
        assert not scaler.landed(optimizer), "an inf of another rank goes unnoticed until update()"
        scaler.update()
        averaged.update_parameters(net)
        assert averaged.n_averaged == 0, "the average moves on some ranks only"
        assert scaler.last_step[optimizer].skipped
        bad = "0.weight (1 of 54)" if dist.get_rank() == 1 else "no parameter of this rank"
        rank = f"AdamW on rank {dist.get_rank()}"
        assert told == [f"{rank} skipped step 1: inf or NaN at scale 8 in {bad}"], told
        assert scaler.get_scale() == 4.0
        for name, value in net.state_dict().items():
            assert torch.equal(value, before[name])


def beyond() -> None:
    """What only one rank holds, and its norm alone would not show: a NaN, and a product that overflows."""
    last = dist.get_rank() == dist.get_world_size() - 1
    for value, scale, order in ((math.nan, 8.0, math.inf), (math.inf, 8.0, math.inf), (1e38, 2.0**-10, 2.0)):
        param = nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([param], lr=0.1)
        scaler = amp_core.GradScaler("cpu", scale, process_group=dist.group.WORLD)
        for max_norm in (math.inf, 1.0):
            scaler.scale(torch.ones(()))
            param.grad = torch.tensor([1.0, 1.0, value if last else 1.0])
            norm = float(scaler.clip_grad_norm_(optimizer, max_norm, order))
            found = [float(flag) for flag in scaler._per_optimizer_states.found_infs()]
            assert found == [1.0], (value, max_norm, found)
            assert math.isnan(norm) == math.isnan(value), (value, norm)
            assert math.isinf(norm) == (not math.isnan(value)), (value, norm)
            scaler.step(optimizer)
            scaler.update()
            assert scaler.last_step[optimizer].skipped
            assert torch.equal(param, torch.ones(3)), "a rank stepped alone"


def everywhere() -> None:
    """A gradient that is not finite on all ranks, whose flags add up: torch's kernels skip at 1 alone."""
    for order, at_step in itertools.product((1.0, 2.0, math.inf), (False, True)):
        param = nn.Parameter(torch.ones(3))
        optimizer = torch.optim.AdamW([param], lr=0.1, fused=True)
        scaler = amp_core.GradScaler("cpu", 8.0, process_group=dist.group.WORLD)
        scaler.scale(torch.ones(()))
        param.grad = torch.tensor([1.0, math.inf, 1.0])
        if not at_step:
            scaler.clip_grad_norm_(optimizer, 1.0, order)
        scaler.step(optimizer, **({"max_norm": 1.0, "norm_type": order} if at_step else {}))
        assert torch.equal(param, torch.ones(3)), (order, at_step, param)
        scaler.update()
        assert scaler.get_scale() == 4.0


def slices() -> None:
    """Parameters on slices of one mesh that cross, on meshes of other ranks, and on one within another."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    rows, columns, every = (DeviceMesh("cpu", ranks) for ranks in ([0, 1], [2, 3], [0, 1, 2, 3]))
    torch.manual_seed(0)
    values = [torch.randn(4, 6), torch.randn(4, 6)]
    wanted = float(torch.linalg.vector_norm(torch.stack(values)))
    world = dist.group.WORLD
    for places, group in (((grid["dp"], grid["tp"]), None), ((rows, columns), world), ((rows, every), world)):
        for spoilt in range(4):
            params = []
            for where, value in zip(places, values, strict=True):
                params.append(nn.Parameter(distribute_tensor(torch.ones_like(value), where, [Shard(0)])))
                params[-1].grad = distribute_tensor(value, where, [Shard(0)])
            order = 1 - 2 * (dist.get_rank() % 2)  # each rank may have met another mesh first
            optimizer = torch.optim.SGD(params[::order], lr=1.0)
            over = {rows: params[:1]} if every in places else {}
            scaler = amp_core.GradScaler("cpu", 1.0, process_group=group, sharded_over=over)
            scaler.scale(torch.ones(()))
            norm = float(scaler.clip_grad_norm_(optimizer, math.inf))
            assert math.isclose(norm, wanted, rel_tol=1e-5), (places, norm, wanted)
            scaler.update()
            for param in params:
                if dist.get_rank() == spoilt and param.grad.to_local().numel():
                    param.grad.to_local()[0, 0] = math.nan
            scaler.step(optimizer)
            scaler.update()
            assert scaler.last_step[optimizer].skipped, (places, spoilt)
    params = [nn.Parameter(distribute_tensor(values[0], where, [Shard(0)])) for where in (rows, columns)]
    for param in params:
        param.grad = param.detach().clone()
    before = params[0].to_local().clone()
    optimizer, lone = torch.optim.SGD(params, lr=1.0), amp_core.GradScaler("cpu", 1.0)
    lone.scale(torch.ones(()))
    for call in (lone.unscale_, lone.step):
        with raises(ValueError, r"meshes of ranks \[0, 1\], \[2, 3\]"):
            call(optimizer)
    assert torch.equal(params[0].to_local(), before)


class Stages:
    """Two pipeline stages of two ranks: tied, cut by hand and DTensor parameters, and experts."""

    def __init__(self, grid: DeviceMesh, fused: bool) -> None:
        self.grid, (stage, place) = grid, grid.get_coordinate()
        torch.manual_seed(0)
        values = [torch.randn(count, 4, 6) for count in (1, 2, 2, 4)]
        self.all_values = torch.cat([value.flatten() for value in values])
        places = (0, stage, stage, 2 * stage + place)
        self.values = [value[at] for value, at in zip(values, places, strict=True)]
        self.tied, self.own, self.expert = (nn.Parameter(torch.ones(4, 6)) for _ in range(3))
        self.sharded = nn.Parameter(self.cut(torch.ones(4, 6)))
        self.params = [self.tied, self.own, self.sharded, self.expert]
        self.optimizers = [
            torch.optim.SGD([self.tied, self.own], lr=0.1, fused=fused),
            torch.optim.AdamW([self.sharded], lr=0.1, fused=fused),
            torch.optim.AdamW([self.expert], lr=0.1, fused=fused),
        ]
        pipeline, data = grid.get_group("pp"), grid.get_group("dp")
        shared = [self.expert, self.expert]  # by two layers, each of which names it
        over = {grid["pp"]: [self.own, self.sharded], pipeline: shared, data: [self.expert]}
        self.scaler = amp_core.GradScaler("cpu", 8.0, process_group=dist.group.WORLD, sharded_over=over)

    def cut(self, value: torch.Tensor) -> DTensor:
        return distribute_tensor(value.clone(), self.grid["dp"], [Shard(0)])

    def backward(self) -> None:
        self.scaler.scale(torch.ones(()))
        for param, value in zip(self.params, self.values, strict=True):
            param.grad = self.cut(value) if param is self.sharded else value.clone()

    def step(self) -> None:
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)


def decision() -> None:
    """One collective of two numbers, whatever the parameters: one norm, one factor, one step."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    for fused in (True, False):
        stages = Stages(grid, fused)
        for order in (2.0, 1.0, math.inf):
            norm_of_all_stages(stages, order)
        for spoilt, bad in itertools.product(range(4), (stages.own, stages.expert)):
            overflow_of_one_rank(stages, spoilt, bad)
        same = [torch.empty(4, 6) for _ in range(4)]
        dist.all_gather(same, stages.tied.detach())
        assert all(torch.equal(each, same[0]) for each in same), "what all ranks share has parted"
    refused_descriptions(stages)


def norm_of_all_stages(stages: Stages, order: float) -> None:
    scaler = stages.scaler
    wanted = float(torch.linalg.vector_norm(stages.all_values, order)) / scaler.get_scale()
    stages.backward()
    with counted() as sent:
        norm = float(scaler.clip_grad_norm_(stages.optimizers, 0.125, order))
        stages.step()
    assert sent == [16], sent  # two float64 numbers
    assert math.isclose(norm, wanted, rel_tol=1e-5), (order, norm, wanted)
    for param, value in zip(stages.params, stages.values, strict=True):
        torch.testing.assert_close(full(param.grad), value / scaler.get_scale() * (0.125 / (wanted + 1e-6)))
    assert scaler.landed()
    scaler.update()


def overflow_of_one_rank(stages: Stages, spoilt: int, bad: nn.Parameter) -> None:
    scaler, scale = stages.scaler, stages.scaler.get_scale()
    before = [full(param).detach().clone() for param in stages.params]
    stages.backward()
    if dist.get_rank() == spoilt:
        bad.grad[0, 0] = math.inf
    if dist.get_rank() == 3 - spoilt:
        stages.expert.grad = None  # no token reached it: this optimizer has no gradient here
    with counted() as sent:
        scaler.unscale_(stages.optimizers)
        stages.step()
    assert sent == [4], sent
    for optimizer in stages.optimizers:
        assert not scaler.landed(optimizer), "a part of the model steps alone"
    scaler.update()
    assert scaler.get_scale() == scale / 2
    for param, value in zip(stages.params, before, strict=True):
        assert torch.equal(full(param), value)


def refused_descriptions(stages: Stages) -> None:
    own, pipeline, data = stages.own, stages.grid.get_group("pp"), stages.grid.get_group("dp")
    with raises(ValueError, "GradScaler.*process_group="):
        amp_core.GradScaler("cpu", sharded_over={pipeline: [own]})
    with raises(ValueError, "cut into 4 parts"):
        amp_core.GradScaler("cpu", process_group=data, sharded_over={pipeline: [own], data: [own]})
    with raises(TypeError, r"a key of sharded_over must be a torch\.distributed\.ProcessGroup"):
        amp_core.GradScaler("cpu", process_group=dist.group.WORLD, sharded_over={"pp": [own]})
    with raises(TypeError, "must map each group to its parameters"):
        amp_core.GradScaler("cpu", process_group=dist.group.WORLD, sharded_over={pipeline: ["weight"]})
    with raises(TypeError, "must map each group to an iterable of parameters, not to a Parameter"):
        amp_core.GradScaler("cpu", process_group=dist.group.WORLD, sharded_over={pipeline: own})
    lost = pickle.loads(pickle.dumps(stages.scaler))
    stages.backward()
    lost.scale(torch.ones(()))
    with raises(ValueError, "does not know which ranks step together"):
        lost.step(stages.optimizers[2])


@contextlib.contextmanager
def counted() -> Iterator[list[int]]:
    """Collect the bytes of each collective of this rank."""
    sent: list[int] = []

    class Collectives(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace in ("c10d", "_c10d_functional"):
                tensors = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
                sent.append(sum(t.nbytes for t in tensors))
            return func(*args, **(kwargs or {}))

    with Collectives():
        yield sent


def groups() -> None:
    """Groups that cannot agree on the step: no members of them, and fewer ranks than the gradients have."""
    pair = dist.new_group([0, 1])
    param = nn.Parameter(distribute_tensor(torch.ones(4), init_device_mesh("cpu", (3,)), [Shard(0)]))
    param.grad = param.detach().clone()
    if dist.get_rank() > 1:
        with raises(TypeError, "that this rank is a member of"):
            amp_core.GradScaler("cpu", 1.0, process_group=pair)
        return
    scaler = amp_core.GradScaler("cpu", 1.0, process_group=pair)
    scaler.scale(torch.ones(()))
    with raises(ValueError, "process_group has 2 ranks"):
        scaler.step(torch.optim.SGD([param], lr=1.0))


def outside() -> None:
    """Gradients on a mesh of the first rank alone: the others raise an error that says what is missing."""
    param = nn.Parameter(distribute_tensor(torch.ones(4), DeviceMesh("cpu", [0]), [Shard(0)]))
    for group in (None, dist.group.WORLD):
        optimizer = torch.optim.SGD([param], lr=1.0)
        scaler = amp_core.GradScaler("cpu", 4.0, process_group=group)
        scaler.scale(torch.ones(()))
        param.grad = param.detach() * math.inf
        alone = group is None and dist.get_rank() > 0
        with raises(ValueError, "which this rank is outside of") if alone else contextlib.nullcontext():
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == 2.0, "the scales of the ranks part"


@contextlib.contextmanager
def raises(kind: type[Exception], text: str) -> Iterator[None]:
    try:
        yield
    except kind as error:
        assert re.search(text, str(error)), error
    else:
        raise AssertionError(f"no {kind.__name__}")


def mesh() -> None:
    """A mesh of two dimensions: whatever is replicated or cut, the norm counts each element once."""
    grid = init_device_mesh("cpu", (2, 2))
    line = init_device_mesh("cpu", (4,))
    torch.manual_seed(0)
    layouts = [
        (grid, [Shard(0), Shard(1)]),
        (grid, [Replicate(), Shard(0)]),
        (grid, [Shard(1), Replicate()]),
        (grid, [Replicate(), Replicate()]),
        (line, [Shard(0)]),
        (None, None),
    ]
    values = [torch.randn(5, 7) for _ in layouts]
    for norm_type in (1.0, 2.0, 3.0, math.inf):
        params = []
        for (where, placements), value in zip(layouts, values, strict=True):
            pair = [value, torch.ones_like(value)]
            if where is not None:
                pair = [distribute_tensor(t, where, placements) for t in pair]
            params.append(nn.Parameter(pair[1]))
            params[-1].grad = pair[0].clone()
        optimizer = torch.optim.SGD(params, lr=1.0)
        scaler = amp_core.GradScaler("cpu", 4.0)
        scaler.scale(torch.ones(()))
        norm = scaler.clip_grad_norm_(optimizer, 0.5, norm_type)
        wanted = torch.linalg.vector_norm(torch.cat([v.flatten() for v in values]), norm_type) / 4.0
        assert math.isclose(float(norm), float(wanted), rel_tol=1e-5), (norm_type, norm, wanted)
        for param, value in zip(params, values, strict=True):
            torch.testing.assert_close(full(param.grad), value / 4.0 * (0.5 / (wanted + 1e-6)))


def overlap() -> None:
    """DistributedDataParallel writes gradients after their hooks ran: what was read before counts no more."""
    for as_view in (False, True):
        found = []
        for early in (False, True):
            net = DistributedDataParallel(model(), gradient_as_bucket_view=as_view)
            optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, fused=True)
            scaler = amp_core.GradScaler("cpu", 8.0, overlap=early)
            for batch in INPUTS:
                optimizer.zero_grad()
                scaler.scale(net(batch * (1 + dist.get_rank())).square().mean()).backward()
                scaler.step(optimizer, max_norm=0.01)
                scaler.update()
            norms = [r.total_norm for r in scaler.history]
            found.append((norms, [p.detach().clone() for p in net.parameters()]))
        torch.testing.assert_close(found[1], found[0])


def norm_of_copies(net: nn.Module, order: float) -> float:
    """Return the norm of gradients that count as copies: each rank has one share of it."""
    grads = [p.grad.flatten() for p in net.parameters() if p.grad is not None]
    every = [torch.empty(()) for _ in range(dist.get_world_size())]
    dist.all_gather(every, torch.linalg.vector_norm(torch.cat(grads), order))
    powers = [float(norm) ** 2 for norm in every]
    return math.sqrt(max(powers) if order == math.inf else sum(powers) / len(powers))


def delayed() -> None:
    """Delayed scales are those of all ranks, agreed on in one collective a step, which is the scaler's.

    Rank 1 first uses the second layer in the last step.
    """
    policy = amp_core.OpPolicy.default("cpu")
    policy = policy.override({"linear": amp_core.Recipe.fp8_delayed(history=4)})
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for norm_type in (None, 0.0, 2.0, math.inf):  # no scaler, no norm, and two kinds of norms
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
        enabled = norm_type is not None
        scaler = amp_core.GradScaler("cpu", 2.0, enabled=enabled, process_group=dist.group.WORLD)
        steps = (1.0, 3.0, math.inf, 2.0) if enabled else (1.0, 3.0, 2.0)
        with amp_core.delayed_scales(net, process_group=dist.group.WORLD) as scales:
            for step, factor in enumerate(steps):
                used = net[:1] if rank and step < len(steps) - 1 else net
                with amp_core.autocast("cpu", dtype=torch.bfloat16, policy=policy):
                    loss = used(INPUTS[0] * factor * (1 + rank)).float().square().mean()
                scaler.scale(loss).backward()
                wanted = norm_of_copies(net, norm_type) / scaler.get_scale() if norm_type else None
                with counted() as sizes:
                    if norm_type:
                        norm = scaler.clip_grad_norm_(optimizer, 1e9, norm_type)
                        assert norm.isfinite() == (factor < math.inf)
                        assert factor == math.inf or math.isclose(norm, wanted, rel_tol=1e-5)
                    scaler.step(optimizer)
                    scaler.update()
                if norm_type is None:
                    assert sizes == [4 * 12]
                elif norm_type == 2.0:
                    assert sizes == [8 * (12 + ranks + 1)]
                else:
                    assert sizes == [(8 if norm_type else 4) * (12 + 1 + bool(norm_type))]
                optimizer.zero_grad()
        states = scales.state_dict()
        assert {*states} == {"0.weight", "2.weight"}
        histories = [states[name][role]["seen"] for name in sorted(states) for role in sorted(states[name])]
        every = [torch.zeros(6, 4) for _ in range(ranks)]
        dist.all_gather(every, torch.stack(histories))
        assert all(torch.equal(each, every[0]) for each in every)
        assert states["0.weight"]["input"]["seen"].tolist() == [0.0, 0.5 * ranks, 1.5 * ranks, 1.0 * ranks]
        assert states["2.weight"]["input"]["seen"].count_nonzero() == 3


def resumed() -> None:
    """Delayed scales go on bit for bit from a checkpoint of any rank, one that has never used a layer too."""
    policy = amp_core.OpPolicy.default("cpu")
    policy = policy.override({"linear": amp_core.Recipe.fp8_delayed(history=4)})
    rank, world = dist.get_rank(), dist.group.WORLD

    def step(scales: amp_core.casts.delayed.DelayedScales, factor: float, layers: int) -> None:
        optimizer = torch.optim.SGD(scales.model.parameters(), lr=0.0)
        with scales:
            with amp_core.autocast("cpu", dtype=torch.bfloat16, policy=policy):
                loss = scales.model[:layers](INPUTS[0] * factor).float().square().mean()
            loss.backward()
            optimizer.step()

    scopes = [amp_core.delayed_scales(model(), process_group=world) for _ in range(3)]
    going_on, own, other = scopes
    for factor in (1.0, 8.0, 2.0):
        step(going_on, factor, layers=1 if rank else 3)
    saved = going_on.state_dict()
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, saved)
    assert all(torch.equal(*map(flattened, (each, saved))) for each in every)
    own.load_state_dict(saved)
    other.load_state_dict(every[1 - rank])
    for layers in (1, 3):  # rank 1 rests again, and begins
        for scales in scopes:
            step(scales, 1.0, layers=layers if rank else 3)
        states = [scales.state_dict() for scales in scopes]
        assert all(torch.equal(*map(flattened, (each, states[0]))) for each in states)


def flattened(states: dict[str, dict[str, dict[str, torch.Tensor]]]) -> torch.Tensor:
    roles = [state for name in sorted(states) for _, state in sorted(states[name].items())]
    return torch.cat([state[key].view(-1) for state in roles for key in ("seen", "current")])


dist.init_process_group("gloo")
for scene in sys.argv[1:]:  # several share the start of the processes
    globals()[scene]()
    dist.barrier()
time.sleep(0.2)  # none goes while another still reads from it
print("all is well", flush=True)
os._exit(0)  # gloo's threads let go of tensors while the interpreter ends, and abort it (pytorch#190489)
