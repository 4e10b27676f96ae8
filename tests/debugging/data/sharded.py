"""Compare and advise on two ranks over gloo, against one process that has the whole model and batch."""

from __future__ import annotations

import copy
import math
import os
import runpy
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import amp_core
from amp_core import AmpError

MODELS = runpy.run_path(str(Path(__file__).parents[1] / "conftest.py"))
BATCH = torch.randn(4, 8, 16, generator=torch.Generator().manual_seed(1))
FP16 = torch.float16


def attention() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(MODELS["Block"](16, 300.0), nn.Linear(16, 4))


def of_ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def of_fsdp(model: nn.Module) -> nn.Module:
    fully_shard(model[0])
    return fully_shard(model)


def of_tp(model: nn.Module) -> nn.Module:
    inner = ColwiseParallel(use_local_output=False)  # GELU runs on a DTensor
    styles = {
        "0.mlp.0": inner,
        "0.mlp.2": RowwiseParallel(),
        "1": ColwiseParallel(output_layouts=Replicate()),
    }
    return parallelize_module(model, init_device_mesh("cpu", (2,)), styles)


def step(model: nn.Module, batch: torch.Tensor) -> object:
    return lambda: model(batch).square().mean()


def state(model: nn.Module) -> list[torch.Tensor]:
    return [p.full_tensor() if isinstance(p, DTensor) else p.detach().clone() for p in model.parameters()]


def same_on_all(found: object) -> None:
    each: list[object] = [None, None]
    dist.all_gather_object(each, found)
    assert each[0] == each[1], each


def compared(kind: object) -> None:
    """Ranks get the one comparison that a single process would get, and the model is as before."""
    part = BATCH if kind is of_tp else BATCH.chunk(2)[dist.get_rank()]
    model = kind(attention())
    before = state(model)
    found = amp_core.compare(step(model, part), "cpu", dtype=FP16)
    same_on_all([(d.key, d.error, d.added, d.noise) for d in found.differences])
    same_on_all((str(found.loss), found.reference_loss, [d.key for d in found.leads()]))
    assert math.isclose(found.reference_loss, ALONE.reference_loss, rel_tol=1e-5)
    assert found.loss_error == ALONE.loss_error == math.inf
    assert named(found.leads()[0]) == named(ALONE.leads()[0])
    ours, theirs = ({named(d): d.size for d in c.differences} for c in (found, ALONE))
    # Data-parallel ranks have parts of the batch; a DTensor is compared whole.
    level = None if kind is of_tp else "parameter"
    apart = [
        key
        for key, size in theirs.items()
        if level in (None, key[0]) and not math.isclose(ours.get(key, -1.0), size, rel_tol=1e-3, abs_tol=1e-6)
    ]
    assert not apart, apart
    assert all(p.grad is None for p in model.parameters())
    with torch.no_grad():  # without a backward pass, FSDP2 leaves parameters gathered
        low, again = (amp_core.compare(step(model, part), "cpu") for _ in range(2))
    assert low.loss == again.loss
    assert 0 < low.loss_error < 0.1
    assert all(map(torch.equal, state(model), before))


def named(difference: object) -> tuple[object, ...]:
    level, phase, place, name, *which = difference.key
    return level, phase, place.module.removeprefix("module."), name.removeprefix("module."), *which


def advised(kind: object) -> None:
    """Ranks choose other rules, or hang because one of them tries a rule that the others do not."""
    part = BATCH if kind is of_tp else BATCH.chunk(2)[dist.get_rank()]
    alone = amp_core.advise(step(attention(), BATCH), "cpu", dtype=FP16)
    model = kind(attention())
    optimizer = torch.optim.AdamW(model.parameters())
    advice = amp_core.advise(step(model, part), "cpu", dtype=FP16, optimizer=optimizer)
    same_on_all((advice.to_toml(), [(f.fault, f.before, f.after) for f in advice.findings]))
    assert advice.modules == alone.modules
    assert advice.modules
    assert advice.init_scale == alone.init_scale
    assert advice.after.loss_error < 1e-2
    with advice.apply(model), amp_core.autocast("cpu", dtype=FP16, policy=advice.policy):
        assert step(model, part)().isfinite()
    try:
        amp_core.advise(step(model, part), "cpu", goal="speed")
    except AmpError as error:
        assert "cannot time a model that several ranks share" in str(error)
    else:
        raise AssertionError("ranks were timed apart")


def guarded_and_watched(kind: object) -> None:
    """A tool asks a DTensor for its values, which torch refuses or answers with a collective."""
    model = kind(attention())
    with amp_core.guard(model, steps=range(2)) as guard, amp_core.watch(model, every=1) as ranges:
        for _ in range(2):
            step(model, BATCH)().backward()
        assert guard.step == 1
    expected = len([*model.parameters()])
    for what in ("weight", "weight gradient"):
        assert len([e for e in ranges.entries if e.kind == what and e.step == 1]) == expected
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    local = next(model.parameters()).grad
    (local.to_local() if isinstance(local, DTensor) else local)[0] = math.nan
    with amp_core.guard(model):
        try:
            optimizer.step()
        except amp_core.NonFiniteError as error:
            assert "have inf or NaN" in str(error)
        else:
            raise AssertionError("a step with NaN was taken")


def guarded_against(kind: object) -> None:
    """A rank with inf looks for the op alone while the other waits for it; or it is not named."""
    model, of_rank = kind(attention()), dist.get_rank()
    alone = kind is of_ddp  # the others have collectives in their forward passes
    batch = BATCH * (1e38 if of_rank == 0 or not alone else 1.0)
    for steps in (None, [0]):
        with amp_core.guard(model, steps=steps) as guard:
            try:
                model(batch)
            except amp_core.NonFiniteError as error:
                told = str(error)
            else:
                told = ""
        stops = of_rank == 0 or not alone
        assert bool(told) is stops, told
        if kind is of_fsdp and steps is None:
            assert "run the program again with amp_core.guard(model, steps=[0])" in told, told
        elif stops:
            assert guard.fault is not None, told
            assert guard.fault.place.module.startswith(("0.", "module.0.")), told
        dist.barrier()


def on_the_first_rank() -> None:
    """A rank outside of the mesh of a model, which calls it too, gets an IndexError."""
    mesh = DeviceMesh("cpu", [0])
    model = distribute_module(attention()[1], mesh)
    found = amp_core.compare(lambda: model(distribute_tensor(BATCH, mesh)).square().mean(), "cpu")
    assert bool(found.differences) or dist.get_rank() > 0


def refused() -> None:
    model = FullyShardedDataParallel(copy.deepcopy(attention()), device_id=torch.device("cpu"))
    try:
        amp_core.compare(step(model, BATCH), "cpu")
    except AmpError as error:
        assert "FSDP1" in str(error)
    else:
        raise AssertionError("a model of FSDP1 was compared")
    try:
        amp_core.compare(step(of_tp(attention()), BATCH), "cpu", format="mxfp8")
    except AmpError as error:
        assert "cannot tell how the operands of a tensor-parallel product" in str(error)
    else:
        raise AssertionError("rounded DTensors were compared")


dist.init_process_group("gloo")
ALONE = amp_core.compare(step(attention(), BATCH), "cpu", dtype=FP16)
for kind in (of_ddp, of_fsdp, of_tp):
    compared(kind)
for kind in (of_ddp, of_fsdp, of_tp):
    guarded_and_watched(kind)
    guarded_against(kind)
advised(of_fsdp)
on_the_first_rank()
refused()
dist.barrier()
print("all is well", flush=True)
os._exit(0)  # gloo's threads let go of tensors while the interpreter ends, and abort it (pytorch#190489)
