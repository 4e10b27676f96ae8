"""Windows over sharded models, against a window of one process: what `ranks.py` runs on two processes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import amp_core

BATCHES = [torch.full((4, 6), value) for value in (0.5, 1.0, 2.0, -1.0)]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.LayerNorm(9), nn.ReLU(), nn.Linear(9, 5))


def sharded() -> nn.Module:
    net = model()
    for layer in (net[0], net[3]):
        fully_shard(layer)
    return fully_shard(net)


def tensor_parallel() -> nn.Module:
    """Some gradients are parts, some whole on each rank, and some no DTensors."""
    plan = {
        "0": ColwiseParallel(output_layouts=Replicate()),
        "3": RowwiseParallel(input_layouts=Replicate()),
    }
    return parallelize_module(model(), init_device_mesh("cpu", (dist.get_world_size(),)), plan)


def windows() -> None:
    """Sharded gradients are refused, or ranks leave out different micro-batches."""
    for shard, leave_out, before in itertools.product((sharded, tensor_parallel), (True, False), (0, 1)):
        for bad in ((), (1,), (0, 2), (0, 1, 2, 3)):
            seen, params = trained(shard, bad, leave_out, before)
            expected, wanted = trained(model, bad, leave_out, before)
            assert seen == expected, (shard, leave_out, before, bad, seen, expected)
            torch.testing.assert_close(params, wanted, rtol=1e-5, atol=1e-6)
    interrupted()
    in_bfloat16()
    reduced_in_pairs()
    before_a_micro_batch_without_gradients()


def trained(
    make: Callable[[], nn.Module], bad: tuple[int, ...], leave_out: bool, before: int
) -> tuple[list, list[Tensor]]:
    """Take three steps; in the second, the micro-batches `bad` overflow in the part of the last rank."""
    net = make()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.125)
    names = net.named_parameters()
    scaler = amp_core.GradScaler("cpu", 64.0, growth_interval=2, named_parameters=names)
    window = amp_core.AccumulationWindow(scaler, optimizer, leave_out=leave_out)
    seen = []
    for step in range(3):
        optimizer.zero_grad()
        for batch in BATCHES[:before]:
            scaler.scale(net(batch).square().mean()).backward()
        with window:
            for number, batch in enumerate(BATCHES):
                with window.micro_batch():
                    scaler.scale(net(batch * (step + 1)).square().mean()).backward()
                    if step == 1 and number in bad:
                        spoil(net[0].weight)
        scaler.step(optimizer, max_norm=1.0)
        scaler.update()
        record = scaler.last_step[optimizer]
        seen.append((record.skipped, record.bad_micro_batches, scaler.get_scale()))
        is_bad_here = step == 1 and bad and (make is model or dist.get_rank() == dist.get_world_size() - 1)
        if leave_out:
            assert [b.name for b in record.bad_parameters] == ["0.weight"] * bool(is_bad_here), record
    return seen, [whole(p.detach()) for p in net.parameters()]


def spoil(weight: Tensor) -> None:
    grad = weight.grad
    if isinstance(grad, DTensor):
        grad = grad.to_local() if dist.get_rank() == dist.get_world_size() - 1 else None
    if grad is not None:
        grad.view(-1)[-1] = math.inf


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def interrupted() -> None:
    """A block that raises on all ranks leaves other gradients than it found."""
    net = sharded()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.125)
    scaler = amp_core.GradScaler("cpu", 64.0)
    scaler.scale(net(BATCHES[0]).square().mean()).backward()
    grads = [whole(p.grad).clone() for p in net.parameters()]
    window = amp_core.AccumulationWindow(scaler, optimizer)
    try:
        with window:
            for batch in BATCHES:
                with window.micro_batch():
                    scaler.scale(net(batch).square().mean()).backward()
                    if batch is BATCHES[2]:
                        raise KeyError("in the block")
    except KeyError:
        pass
    torch.testing.assert_close([whole(p.grad) for p in net.parameters()], grads, rtol=0, atol=0)


def in_bfloat16() -> None:
    """A window adds up float32 gradients of weights gathered in bfloat16 otherwise than FSDP does."""
    sums = []
    for in_window in (False, True):
        net = fully_shard(model(), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.125)
        scaler = amp_core.GradScaler("cpu", 64.0)
        window = amp_core.AccumulationWindow(scaler if in_window else _disabled(), optimizer)
        with window:
            for batch in BATCHES:
                with window.micro_batch():
                    scaler.scale(net(batch.bfloat16()).float().square().mean()).backward()
        sums.append([whole(p.grad) for p in net.parameters()])
    torch.testing.assert_close(*sums)


def reduced_in_pairs() -> None:
    """Of micro-batches that FSDP reduces together, some count as good, or lead to a step on zeros."""
    for bad in ((), (1,), (2,), (0, 3)):
        net = sharded()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.125)
        scaler = amp_core.GradScaler("cpu", 64.0)
        with amp_core.AccumulationWindow(scaler, optimizer) as window:
            for number, batch in enumerate(BATCHES):
                net.set_requires_gradient_sync(number % 2 == 1)
                with window.micro_batch():
                    factor = math.inf if number in bad else 1.0
                    scaler.scale(net(batch).square().mean() * factor).backward()
        sums = [whole(p.grad).clone() for p in net.parameters()]
        scaler.step(optimizer)
        scaler.update()
        good = [pair for pair in ((0, 1), (2, 3)) if not set(pair) & set(bad)]
        assert scaler.last_step[optimizer].skipped == (not good)
        plain = model()
        for pair in good:
            for number in pair:
                (plain(BATCHES[number]).square().mean() * 64.0 * 2 / len(good)).backward()
        if good:
            torch.testing.assert_close(sums, [p.grad for p in plain.parameters()])


def before_a_micro_batch_without_gradients() -> None:
    """The step is skipped though one rank had gradients before the window, which the others do not know."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def sharded_over_ranks(*values: float) -> Tensor:
        return distribute_tensor(torch.tensor(values), mesh, [Shard(0)])

    param = nn.Parameter(sharded_over_ranks(0.0, 0.0))
    optimizer = torch.optim.SGD([param], lr=1.0)
    scaler = amp_core.GradScaler("cpu", 1.0)
    scaler.scale(torch.ones(()))
    param.grad = sharded_over_ranks(0.0, 1.0)
    with amp_core.AccumulationWindow(scaler, optimizer) as window:
        with window.micro_batch():
            param.grad = sharded_over_ranks(math.inf, 1.0)
        with window.micro_batch():
            pass
    scaler.step(optimizer)
    scaler.update()
    assert whole(param).tolist() == [0.0, -1.0]


def _disabled() -> amp_core.GradScaler:
    return amp_core.GradScaler("cpu", enabled=False)
