"""Random steps of several optimizers, with windows or without: each record against what was computed."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
import torch._dynamo  # the first optimizer would load it, for seconds
from torch import Tensor, nn

from amp_core import AccumulationWindow, GradScaler

from ..drawn import programs

KINDS: dict[str, Any] = {
    "plain": lambda params: torch.optim.SGD(params, lr=0.0, foreach=False),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.0, fused=True),
}
SIZE = 3


@dataclass
class Owner:
    """An optimizer, and what is true of its next step: the sums of its gradients, and what was bad."""

    name: str
    kind: str
    optimizer: torch.optim.Optimizer
    params: list[Tensor]
    key: str | None
    leave_out: bool = True
    sums: list[Tensor] = field(default_factory=list)
    batches: list[set[int]] = field(default_factory=list)  # the bad parameters of each in a window

    def clear(self, leave_out: bool) -> None:
        self.optimizer.zero_grad()
        self.leave_out, self.batches = leave_out, []
        self.sums = [torch.zeros(SIZE) for _ in self.params]

    def backward(self, scaler: GradScaler, values: list[Tensor]) -> None:
        loss = sum((p * value).sum() for p, value in zip(self.params, values, strict=True))
        scaler.scale(loss, key=self.key).backward()

    def add(self, values: list[Tensor], factor: float = 1.0) -> None:
        for total, value in zip(self.sums, values, strict=True):
            total += value * factor

    @property
    def bad(self) -> set[str]:
        return self.names({i for i, total in enumerate(self.sums) if not total.isfinite().all()})

    @property
    def left_out(self) -> set[str]:
        return self.names(set().union(*self.batches))

    def names(self, numbers: set[int]) -> set[str]:
        return {f"{self.name}.{i}" for i in numbers}


def drawn_owner(chance: Random, name: str, key: str | None, scaler: GradScaler) -> Owner:
    params: list[Tensor] = [nn.Parameter(torch.zeros(SIZE)) for _ in range(chance.randrange(1, 4))]
    scaler.name_parameters([(f"{name}.{i}", p) for i, p in enumerate(params)])
    kind = chance.choice([*KINDS])
    return Owner(name, kind, KINDS[kind](params), params, key)


def drawn_values(chance: Random, owner: Owner) -> tuple[list[Tensor], set[int]]:
    values = [torch.tensor([float(chance.randrange(1, 9)) for _ in range(SIZE)]) for _ in owner.params]
    bad = set()
    while chance.random() < 0.25:
        number = chance.randrange(len(values))
        values[number][chance.randrange(SIZE)] = chance.choice([math.inf, -math.inf, math.nan])
        bad.add(number)
    return values, bad


def window_of(chance: Random, scaler: GradScaler, owner: Owner) -> None:
    leave_out, reweight = owner.leave_out, chance.random() < 0.5
    window = AccumulationWindow(
        scaler, owner.optimizer, leave_out=leave_out, reweight=reweight, key=owner.key
    )
    parts = [drawn_values(chance, owner) for _ in range(chance.randrange(1, 4))]
    with window:
        for values, _ in parts:
            with window.micro_batch():
                owner.backward(scaler, values)
    batches = [bad for _, bad in parts]
    good = [values for values, bad in parts if not (bad and leave_out)]
    if not good and not any(total.any() for total in owner.sums):
        for number in set().union(*batches):
            owner.sums[number] += math.nan
    for values in good:
        owner.add(values, len(parts) / len(good) if reweight and leave_out else 1.0)
    if not leave_out and any(batches):  # only the first is known, and what is bad at the end
        first = next(i for i, bad in enumerate(batches) if bad)
        batches = [set().union(*batches) if i == first else set() for i in range(len(batches))]
    owner.batches += batches


def check_record(owner: Owner, scaler: GradScaler, skipped: bool, norm: float | None) -> None:
    record = scaler.last_step[owner.optimizer]
    assert (record.skipped, record.key) == (skipped, owner.key)
    wrong = [i for i, bad in enumerate(owner.batches) if bad]
    assert list(record.bad_micro_batches) == record.as_dict()["bad_micro_batches"] == wrong
    named, text = {b.name for b in record.bad_parameters}, str(record)
    if skipped:
        assert owner.bad <= named <= owner.bad | owner.left_out, text
        assert "skipped step" in text
        assert named or "no parameter of this" in text or "not known" in text
    else:
        assert named == owner.left_out, text
        assert ("out of step" in text) == bool(wrong)
    assert all(name in text for name in named)
    assert (record.total_norm is None) == (norm is None)
    assert skipped or norm is None or math.isclose(record.total_norm, norm, rel_tol=1e-4)


def norm_of(*owners: Owner) -> float:
    return math.hypot(*[torch.stack(owner.sums).double().norm().item() for owner in owners])


def step_as_one(chance: Random, scaler: GradScaler, owners: list[Owner]) -> list[Any]:
    """Step all or none; return how to check each record."""
    optimizers, norm, key = [owner.optimizer for owner in owners], None, owners[0].key
    if chance.random() < 0.5:
        norm = norm_of(*owners)
        scaler.clip_grad_norm_(optimizers, 1.0, key=key)
    else:
        scaler.unscale_(optimizers, key=key)
    for optimizer in optimizers:
        scaler.step(optimizer, key=key)
    skipped = any(owner.bad for owner in owners)
    return [(owner, scaler, skipped, norm) for owner in owners]


def step_alone(chance: Random, scaler: GradScaler, owner: Owner) -> Any:
    how = chance.choice(["step", "max_norm", "clip", "unscale"])
    if how == "clip":
        scaler.clip_grad_norm_(owner.optimizer, 1.0, key=owner.key)
    elif how == "unscale":
        scaler.unscale_(owner.optimizer, key=owner.key)
    scaler.step(owner.optimizer, max_norm=1.0 if how == "max_norm" else None, key=owner.key)
    check = owner, scaler, bool(owner.bad), norm_of(owner) if how in ("max_norm", "clip") else None
    if chance.random() < 0.5 and not (owner.kind == "fused" and how == "unscale"):  # known after update()
        check_record(*check)
    return check


def one_step(chance: Random, scaler: GradScaler, owners: list[Owner], said: list[Any]) -> None:
    key = owners[0].key
    for owner in owners:
        owner.clear(leave_out=chance.random() < 0.7)
        for _ in range(chance.choice([1, 1, 2, 3])):
            if chance.random() < 0.5:
                window_of(chance, scaler, owner)
            else:
                values, _ = drawn_values(chance, owner)
                owner.backward(scaler, values)
                owner.add(values)
            said.append((owner.name, owner.kind, owner.leave_out, owner.bad, list(owner.batches)))
    if len(owners) > 1 and chance.random() < 0.3:
        checks = step_as_one(chance, scaler, owners)
    else:
        checks = [step_alone(chance, scaler, owner) for owner in owners]
    before = scaler.get_scale(key)
    scaler.update()
    any_bad = any(owner.bad or owner.left_out for owner in owners)
    assert scaler.get_scale(key) == (before / 2 if any_bad else before)
    for check in checks:
        check_record(*check)
    for owner in owners:
        record = scaler.last_step[owner.optimizer]
        assert (record.scale_before, record.scale_after) == (before, scaler.get_scale(key))


def test_record_programs() -> None:
    """A record blames a parameter or a micro-batch that was good, or leaves out a bad one."""
    for chance in programs(4.0):
        scaler, key = (
            GradScaler("cpu", 4.0, warn_after=0, overlap=chance.random() < 0.3),
            chance.choice([None, None, "k"]),
        )
        owners = [drawn_owner(chance, name, key, scaler) for name in "abc"[: chance.choice([1, 2, 2, 3])]]
        said: list[Any] = []
        try:
            for _ in range(3):
                one_step(chance, scaler, owners, said)
        except Exception as error:
            raise AssertionError("\n".join(map(str, said))) from error
