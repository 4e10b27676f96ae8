"""Unscaling, the overflow check, clipping and the step."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import amp_core
from benchmarks.ab import Ratio, compare
from benchmarks.shapes import gpt2_small, many, tensors


class NoStep(torch.optim.Optimizer):
    """An optimizer that does nothing: what is left is the scaler's part."""

    def __init__(self, params: Any, **_: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:
        """Do nothing."""


class Recorded(torch.amp.GradScaler):
    """torch's scaler with the least record of each step: scale before and after, and overflow flag."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.history: deque[list[float]] = deque(maxlen=1000)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step and begin the record."""
        before = self.get_scale()
        result = super().step(optimizer, *args, **kwargs)
        flags = self._found_inf_per_device(optimizer).values()
        self.history.append([before, *(flag.item() for flag in flags)])
        return result

    def update(self, new_scale: Any = None) -> None:
        """Update and complete the record."""
        super().update(new_scale)
        self.history[-1].append(self.get_scale())


def run() -> Iterator[Ratio]:
    """Compare steps (unscale, check, clip, step, update) for several models and optimizers.

    The limit of a few small tensors is what torch's own scaler takes if it, too, keeps a record of each
    step; that of many large ones is to read them all once and to read and write them all once. The limit of a
    fused optimizer is to read them all once before it steps. A training step of a small model has all the
    rest, too: region, forward and backward pass, which leave little of the scaler in the CPU's caches.
    """
    models = {
        "10 tensors of 1k": many(10),
        "200 tensors of 1k": many(200),
        "2000 tensors of 1k": many(2000),
        "24 tensors of 250k": many(24, 250_000),
        "GPT-2 small": gpt2_small(),
    }
    for name, shapes in models.items():
        yield _steps(f"{name}, no-op, clip", shapes, NoStep, {}, clip=True)
        yield _steps(f"{name}, no-op, no clip", shapes, NoStep, {}, clip=False)
    yield _steps("10 tensors of 1k, no-op, no clip: limit", many(10), NoStep, {}, clip=False, ours=Recorded)
    yield _training_step("training step of a small model, clip", clip=True)
    yield _training_step("training step of a small model, no clip", clip=False)
    yield _training_step("training step of a small model, no clip: limit", clip=False, limit=True)
    yield _two_passes("GPT-2 small, no-op, clip: limit", models["GPT-2 small"])
    adamw = torch.optim.AdamW
    for name in ("200 tensors of 1k", "24 tensors of 250k", "GPT-2 small"):
        yield _steps(f"{name}, AdamW fused, clip", models[name], adamw, {"fused": True}, clip=True)
        yield _steps(f"{name}, AdamW fused, no clip", models[name], adamw, {"fused": True}, clip=False)
    yield _read_and_step("GPT-2 small, AdamW fused, clip: limit", models["GPT-2 small"])
    yield _steps("200 tensors of 1k, AdamW foreach, clip", models["200 tensors of 1k"], adamw, {}, clip=True)
    yield _float16_steps()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        yield from _kernels(dtype)


def _steps(
    name: str,
    shapes: list[tuple[int, ...]],
    kind: type[Any],
    options: dict[str, Any],
    *,
    clip: bool,
    ours: type[torch.amp.GradScaler] = amp_core.GradScaler,
) -> Ratio:
    sides = sides_of_step(shapes, kind, options, clip=clip, ours=ours)
    small = _elements(shapes) < 10_000_000
    return compare(name, *sides, rounds=15 if small else 7, calls=10 if small else 1)


def sides_of_step(
    shapes: list[tuple[int, ...]],
    kind: type[Any],
    options: dict[str, Any],
    *,
    clip: bool,
    ours: type[torch.amp.GradScaler] = amp_core.GradScaler,
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return torch's step and ours, each with parameters of its own: both touch the same amount of memory."""
    sides = []
    for scaler in (torch.amp.GradScaler("cpu", 1.0), ours("cpu", 1.0)):
        params = [torch.nn.Parameter(t) for t in tensors(shapes)]
        for param, grad in zip(params, tensors(shapes), strict=True):
            param.grad = grad
        scaler.scale(torch.ones(()))
        sides.append(_step(scaler, kind(params, lr=1e-6, **options), params, clip))
    return sides[0], sides[1]


def _step(scaler: Any, optimizer: Any, params: list[torch.nn.Parameter], clip: bool) -> Callable[[], None]:
    if isinstance(scaler, amp_core.GradScaler):
        options = {"max_norm": 1.0} if clip else {}

        def ours() -> None:
            scaler.step(optimizer, **options)
            scaler.update()

        return ours

    def theirs() -> None:
        if clip:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(params, 1.0)
        scaler.step(optimizer)
        scaler.update()

    return theirs


def _training_step(name: str, *, clip: bool, limit: bool = False) -> Ratio:
    ours = (torch.amp.autocast, Recorded) if limit else (amp_core.autocast, amp_core.GradScaler)
    sides = []
    for autocast, scaler_of in ((torch.amp.autocast, torch.amp.GradScaler), ours):
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        scaler = scaler_of("cpu", 1.0)
        step = _step(scaler, optimizer, list(model.parameters()), clip)
        sides.append(functools.partial(_train, model, optimizer, autocast, scaler, step))
    return compare(name, *sides, rounds=1000)


def _train(
    model: nn.Module, optimizer: torch.optim.Optimizer, autocast: Any, scaler: Any, step: Callable[[], None]
) -> None:
    optimizer.zero_grad()
    with autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(model(_INPUTS), _TARGETS)
    scaler.scale(loss).backward()
    step()


_INPUTS, _TARGETS = torch.randn(32, 64), torch.arange(32) % 10


def _two_passes(name: str, shapes: list[tuple[int, ...]]) -> Ratio:
    theirs, _ = sides_of_step(shapes, NoStep, {}, clip=True)
    plain, one = torch.randn(_elements(shapes)), torch.ones(())

    def passes() -> None:
        torch.dot(plain, plain)
        plain.mul_(one)

    return compare(name, theirs, passes, rounds=7)


def _read_and_step(name: str, shapes: list[tuple[int, ...]]) -> Ratio:
    theirs, _ = sides_of_step(shapes, torch.optim.AdamW, {"fused": True}, clip=True)
    plain, params = torch.randn(_elements(shapes)), [torch.nn.Parameter(t) for t in tensors(shapes)]
    for param, grad in zip(params, tensors(shapes), strict=True):
        param.grad = grad
    optimizer = torch.optim.AdamW(params, lr=1e-6, fused=True)
    optimizer.grad_scale, optimizer.found_inf = torch.ones(()), torch.zeros(())

    def passes() -> None:
        torch.dot(plain, plain)
        optimizer.step()

    return compare(name, theirs, passes, rounds=7)


def _elements(shapes: list[tuple[int, ...]]) -> int:
    return sum(torch.Size(shape).numel() for shape in shapes)


def _float16_steps() -> Ratio:
    # torch's scaler refuses float16 gradients: its kernels are called as the scaler would.
    params = [torch.nn.Parameter(t) for t in tensors(gpt2_small(), torch.float16)]
    for param, grad in zip(params, tensors(gpt2_small(), torch.float16), strict=True):
        param.grad = grad
    grads = [p.grad for p in params if p.grad is not None]
    scaler = amp_core.GradScaler("cpu", 1.0, allow_fp16_gradients=True)
    scaler.scale(torch.ones(()))
    one, found = torch.ones(()), torch.zeros(())

    def theirs() -> None:
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found, one)
        torch.nn.utils.clip_grad_norm_(params, 1.0)

    ours = _step(scaler, NoStep(params), params, clip=True)
    return compare("GPT-2 small float16, no-op, clip", theirs, ours, rounds=7)


def _kernels(dtype: torch.dtype) -> Iterator[Ratio]:
    grads = tensors(gpt2_small(), dtype)
    kernels = amp_core.get_backend("cpu").kernels()
    one, found = torch.ones(()), torch.zeros(())

    def unscale() -> None:
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found, one)

    short = str(dtype).removeprefix("torch.")
    yield compare(
        f"GPT-2 small {short}: read pass against torch's unscale",
        unscale,
        lambda: kernels.grad_stats(grads),
        rounds=7,
    )
    if dtype is not torch.float16:
        yield compare(
            f"GPT-2 small {short}: multiply_ against torch's unscale",
            unscale,
            lambda: kernels.multiply_(grads, one, found),
            rounds=7,
        )
