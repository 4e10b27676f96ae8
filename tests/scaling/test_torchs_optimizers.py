"""Every optimizer of torch's own tests with all settings they have, stepped by both scalers."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp_core

from ..drawn import programs


@functools.cache
def settings() -> list[Any]:
    """Return each optimizer with each of the settings that torch's tests give it."""
    from torch.testing._internal import common_optimizers as torchs  # takes seconds

    inputs = torchs._get_optim_inputs_including_global_cliquey_kwargs
    return [
        (info.optim_cls, given.kwargs)
        for info in torchs.optim_db
        for given in inputs("cpu", torch.float32, info)
        # These take no step of a scaler.
        if info.name != "LBFGS" and not given.kwargs.get("differentiable")
        # torch leaves garbage where a first fused step is skipped.
        if not (given.kwargs.get("fused") and given.kwargs.get("momentum"))
    ]


SHAPES: dict[str, list[Tensor]] = {
    "matrices": [torch.ones(4, 3), torch.ones(3, 5).t(), torch.ones(6, 4)[::2]],
    "odd": [
        torch.ones(()), torch.ones(0), torch.ones(2, 3, 2, 2).contiguous(memory_format=torch.channels_last),
        torch.ones(0, 3), torch.ones(6)[::2],
    ],
    "dtypes": [torch.ones(4, 3), torch.ones(3).double(), torch.ones(2, 2).bfloat16()],
    "empty": [torch.ones(0), torch.ones(0, 2)],
    "sparse": [torch.ones(8, 3)],
    "many": [torch.ones(number % 3 + 1) for number in range(60)],
}  # fmt: skip
KNOWN = ("No inf checks were recorded", "Attempting to unscale FP16")


class Training:
    """An optimizer and a scaler; its methods are the steps of a training loop."""

    def __init__(self, amp: Any, drawn: dict[str, Any]) -> None:
        generator = torch.Generator().manual_seed(drawn["seed"])
        self.params = [nn.Parameter(torch.empty_like(p)) for p in SHAPES[drawn["shapes"]]]
        for param in self.params:
            param.data.copy_(torch.randn(param.shape, generator=generator))
        kind, given = drawn["optimizer"]
        given = {k: v.clone() if isinstance(v, Tensor) else v for k, v in given.items()}
        half = len(self.params) // 2
        groups: Any = {
            "one": self.params,
            "two": [{"params": self.params[:half]}, {"params": self.params[half:]}],
            "empty": [{"params": []}, {"params": self.params}],
        }[drawn["groups"]]
        self.optimizer = kind(groups, **given)
        self.scaler = amp.GradScaler("cpu", 1024.0, growth_interval=2)
        self.scaler.scale(torch.ones(()))
        self.sparse = drawn["shapes"] == "sparse"

    def backward(self, seed: int, bad: float) -> None:
        choose, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        for param in self.params:
            grad = torch.randn(param.shape, generator=generator).to(param.dtype) * self.scaler.get_scale()
            if bad and grad.numel():
                grad.view(-1)[0] = bad
            if self.sparse:
                rows = torch.tensor([[0, 2, 5]])
                grad = torch.sparse_coo_tensor(rows, grad[rows[0]], param.shape).coalesce()
            elif choose.random() < 0.3:
                grad = torch.stack([grad, grad], -1)[..., 0]
            param.grad = None if choose.random() < 0.1 else grad

    def clip(self) -> float:
        self.scaler.unscale_(self.optimizer)
        return float(nn.utils.clip_grad_norm_(self.params, 0.5))

    def step(self) -> None:
        self.scaler.step(self.optimizer)

    def update(self) -> None:
        self.scaler.update()

    def reload(self) -> None:
        self.optimizer.load_state_dict(self.optimizer.state_dict())
        self.scaler.load_state_dict(self.scaler.state_dict())

    def seen(self) -> list[Any]:
        states = [self.optimizer.state.get(p, {}) for p in self.params]
        values = [v for state in states for _, v in sorted(state.items())]
        return [self.scaler.state_dict(), *self.params, *(p.grad for p in self.params), *values]


def same(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return bool(one == other)
    one, other = (t.to_dense() if t.is_sparse else t for t in (one, other))
    alike = (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
    return alike and torch.allclose(one, other, 0, 0, equal_nan=True)


def outcome(training: Training, action: tuple[Any, ...]) -> Any:
    """Return the result, or the error, which must be the same from both; torch refuses some parameters."""
    try:
        return getattr(training, action[0])(*action[1:])
    except (RuntimeError, ValueError, AssertionError, NotImplementedError, ZeroDivisionError) as error:
        known = [text for text in KNOWN if str(error).startswith(text)]  # amp-core's errors say more
        return type(error), (known or [str(error)[:45]])[0]


def program(choose: random.Random) -> tuple[dict[str, Any], list[tuple[Any, ...]]]:
    drawn = {
        "optimizer": choose.choice(settings()),
        "shapes": choose.choice([*SHAPES]),
        "groups": choose.choice(["one", "two", "empty"]),
        "seed": choose.randrange(999),
    }
    actions: list[tuple[Any, ...]] = []
    for _ in range(4):
        actions.append(("backward", choose.randrange(999), choose.choice([0.0, 0.0, torch.inf, torch.nan])))
        actions += choose.choice([[], [], [("clip",)], [("reload",)], [("clip",), ("reload",)]])
        actions += [("step",), ("update",)]
    return drawn, actions


@pytest.mark.filterwarnings("ignore")
def test_torchs_optimizers() -> None:
    """A setting, a layout or an empty parameter ends in another state than with torch's scaler."""
    assert len(settings()) > 100
    for choose in programs(8.0, number="torch's optimizers"):
        drawn, actions = program(choose)
        try:
            theirs, ours = Training(torch.amp, drawn), Training(amp_core, drawn)
        except (ValueError, RuntimeError, AssertionError):
            continue  # torch takes no such parameters
        for number, action in enumerate(actions):
            wanted, got = outcome(theirs, action), outcome(ours, action)
            assert same(wanted, got) or wanted != wanted, (drawn, actions[: number + 1], wanted, got)
            if isinstance(wanted, tuple) and wanted[1] not in KNOWN:
                break  # torch's own limits leave a step half done
            for one, other in zip(theirs.seen(), ours.seen(), strict=True):
                assert same(one, other), (drawn, actions[: number + 1], one, other)
