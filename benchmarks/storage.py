"""bfloat16 weights: bytes, the time of a step, and the final loss of a small task, by storage."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from amp_core import master_weights
from benchmarks.ab import Ratio, compare

LOW = torch.bfloat16
STORAGES = ("fp32", "remainder", "kahan", "stochastic", "plain")
SEEDS = range(3)


def run() -> Iterator[Ratio]:
    """Count bytes, train on the digits, and time steps against other packages."""
    yield from _bytes()
    yield from _losses()
    yield from _steps()


def _stored(model: nn.Module, storage: str, **settings: Any) -> tuple[Optimizer, list[Tensor]]:
    """Return an AdamW for `model` with that storage, and the tensors kept beside parameters and states."""
    if storage == "plain":
        return AdamW(model.to(LOW).parameters(), **settings), []
    optimizer = AdamW(model.parameters(), **settings)
    if storage != "fp32":
        master_weights(model, optimizer, storage)  # type: ignore[call-overload]
        return optimizer, []
    return optimizer, [p.detach().to(LOW) for p in model.parameters()]


def _bytes() -> Iterator[Ratio]:
    """Count all that stays between two steps; float32 masters have a bfloat16 copy beside them."""
    wanted = 0
    for storage in STORAGES:
        model = nn.Linear(1024, 1024, bias=False)
        optimizer, beside = _stored(model, storage)
        model.weight.grad = torch.zeros_like(model.weight)
        optimizer.step()
        states = [v for s in optimizer.state.values() for k, v in s.items() if k != "step"]
        nbytes = sum(t.nbytes for t in [*model.parameters(), *states, *beside])
        wanted = wanted or nbytes
        yield Ratio(f"AdamW, a million parameters, {storage}", wanted, nbytes, nbytes / wanted, "B")


def _losses() -> Iterator[Ratio]:
    """Train a small network on the digits; rates fall to a value whose updates bfloat16 loses."""
    wanted = 0.0
    for storage in STORAGES:
        loss = sum(_final_loss(storage, seed) for seed in SEEDS) / len(SEEDS)
        wanted = wanted or loss
        yield Ratio(
            f"digits, final training loss, mean of 3 seeds, {storage}", wanted, loss, loss / wanted, ""
        )


def _final_loss(storage: str, seed: int, steps: int = 1500) -> float:
    digits = importlib.import_module("sklearn.datasets").load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer, _ = _stored(model, storage, lr=1e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, 1e-5)
    loss_of = nn.CrossEntropyLoss()
    for _ in range(steps):
        batch = torch.randint(len(x), (128,))
        optimizer.zero_grad()
        with torch.autocast("cpu", LOW):
            loss = loss_of(model(x[batch]), y[batch])
        loss.backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad(), torch.autocast("cpu", LOW):
        return float(loss_of(model(x), y))


def _weights() -> nn.Module:
    layers = [nn.Linear(768, 768) for _ in range(4)]
    model = nn.Sequential(*layers, nn.Linear(768, 3072), nn.Linear(3072, 768)).to(LOW)
    for param in model.parameters():
        param.grad = torch.randn(param.shape).to(LOW)
    return model


def _steps() -> Iterator[Ratio]:
    """Time a step of 7.1 million parameters against the packages that are installed."""
    for package, theirs in _others().items():
        for storage in ("remainder", "kahan", "stochastic"):
            ours, _ = _stored(_weights(), storage, lr=1e-4, fused=True)
            yield compare(f"AdamW step, {storage}, against {package}", theirs.step, ours.step, rounds=9)


def _others() -> dict[str, Any]:
    """Return the optimizers of other packages, each with weights of its own."""
    logging.disable(logging.WARNING)
    makers: dict[str, tuple[str, Callable[[Any, Any], Any]]] = {
        "optimi's Kahan AdamW": ("optimi", lambda m, p: m.AdamW(p, lr=1e-4, kahan_sum=True)),
        "torchao's stochastic _AdamW": (
            "torchao.optim.adam",
            lambda m, p: m._AdamW(p, lr=1e-4, bf16_stochastic_round=True),
        ),
    }
    others = {}
    for name, (module, make) in makers.items():
        try:
            others[name] = make(importlib.import_module(module), _weights().parameters())
        except ImportError:
            print(f"| {name}: not installed | | | |")
    return others
