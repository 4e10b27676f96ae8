"""`advise`: propose the rules that make a step accurate, or fast, in mixed precision."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_core.common.arguments import as_whole, check_optimizer
from amp_core.common.optimizers import innermost
from amp_core.debugging.advice import Advice, FormatAdvice, SpeedAdvice
from amp_core.debugging.comparison import check_tolerance
from amp_core.debugging.format_search import FormatSearch
from amp_core.debugging.search import Search
from amp_core.debugging.speed import SpeedSearch
from amp_core.debugging.step import Step, quantising
from amp_core.formats import Recipe
from amp_core.policy import OpPolicy


@overload
def advise(
    fn: Callable[[], Any],
    device: str | torch.device | Tensor = ...,
    *,
    policy: OpPolicy | None = ...,
    dtype: torch.dtype | None = ...,
    model: nn.Module | None = ...,
    tolerance: float | None = ...,
    rounds: int = ...,
    seed: int = ...,
    limit: int = ...,
    progress: bool | None = ...,
    goal: Literal["speed"],
) -> SpeedAdvice: ...


@overload
def advise(
    fn: Callable[[], Any],
    device: str | torch.device | Tensor = ...,
    *,
    format: str | Recipe,
    policy: OpPolicy | None = ...,
    dtype: torch.dtype | None = ...,
    model: nn.Module | None = ...,
    tolerance: float | None = ...,
    rounds: int = ...,
    seed: int = ...,
    limit: int = ...,
    progress: bool | None = ...,
) -> FormatAdvice: ...


@overload
def advise(
    fn: Callable[[], Any],
    device: str | torch.device | Tensor = ...,
    *,
    format: None = ...,
    policy: OpPolicy | None = ...,
    dtype: torch.dtype | None = ...,
    model: nn.Module | None = ...,
    tolerance: float | None = ...,
    rounds: int = ...,
    seed: int = ...,
    limit: int = ...,
    progress: bool | None = ...,
    goal: str = ...,
    optimizer: Optimizer | None = ...,
) -> Advice: ...


def advise(
    fn: Callable[[], Any],
    device: str | torch.device | Tensor = "auto",
    *,
    format: str | Recipe | None = None,  # noqa: A002
    policy: OpPolicy | None = None,
    dtype: torch.dtype | None = None,
    model: nn.Module | None = None,
    tolerance: float | None = None,
    rounds: int = 8,
    seed: int = 0,
    limit: int = 16384,
    progress: bool | None = None,
    goal: str = "accuracy",
    optimizer: Optimizer | None = None,
) -> Advice:
    """Propose rules that make a step accurate or fast in mixed precision, or find the layers for a format.

    `advise` runs the step in float32 and in mixed precision, and for float16 once more with a loss scale that
    fits its gradients. If the loss and gradients are then within the tolerance, it proposes no rules.
    Otherwise it changes the ops whose error reaches them, the most harmful first. It tests each change by
    running the step. It starts with the narrowest, float32 for the op in its module; then follow the ops that
    lead to it in this module, the whole module, and the enclosing modules. It keeps the first change that
    fixes the op and makes nothing else worse. The model is left unchanged; see `compare` for what else is
    restored.

    With ``goal="speed"`` it instead times each op of the step, by shape, in both precisions, casts included.
    It proposes thresholds on the work of the ops' calls, tries modules in float32, and times whole steps. The
    result is a `SpeedAdvice`: measured again at the end, the step is no slower with it than in float32 or in
    plain autocast. For this, `fn` must not enter a region itself, and no other rank may share the model.

    Under DDP, FSDP2 and tensor parallelism all ranks must call it, and get the same advice, as for `compare`.

    With `format` it finds how much of the work of matrix products can be in a format of 8, 6 or 4 bits while
    loss and gradients stay within the tolerance. It runs the step with each layer alone in the format, then
    with sets of layers, on any machine. The result is a `FormatAdvice`: the policy, the layers that have to
    be left out, and what the format does to each. The step runs once for each layer, and a few times more.

    Args:
        fn: as for `compare`; it must leave the backward pass to `advise` to get a loss scale.
        device: as for `compare`.
        format: as for `compare`.
        policy: the policy to start from; by default the device's.
        dtype: as for `compare`; with `format`, bfloat16 by default, if the device has it.
        model: the model whose modules may get rules; by default, the outermost module that `fn` calls.
        tolerance: the relative error to accept from each op and in the loss and gradients; by default 0.03
            and 0.125, but at least 16 times the dtype's ``eps``. A ReLU can add that much if rounding moves
            a number across 0. With `format` only the second counts; errors of gradients are relative to the
            largest gradient.
        rounds: the maximum number of faults to handle; with `format`, of layers to try beyond the estimate.
        seed: as for `compare`.
        limit: as for `compare`.
        progress: write progress to stderr; by default only if it is a terminal.
        goal: ``"accuracy"`` or ``"speed"``. For speed, `rounds` is the maximum number of modules to try, and
            `tolerance` and `limit` have no effect.
        optimizer: the optimizer of the step. With it, `advise` also names the bfloat16 and float16 weights
            for which rounding undoes the update of more than a tenth of the elements. `fn` must then leave
            the optimizer's step, and any ``zero_grad`` after the backward pass, to the caller. If it lets
            another optimizer step, that one's updates count.

    Returns:
        An `Advice` to print, save or apply.

    Raises:
        AmpError: as for `compare`; or, for speed, several ranks share the model, or all ops of `fn` are in
            regions of its own.
        PolicyError: as for `compare`, or no matrix product of the step takes the format.
        ValueError: `goal` is unknown, or `optimizer` is given for speed; or `format` is given with either; or
            `tolerance` or `rounds` is below 0; or as for `compare`.
        TypeError: `optimizer` is no optimizer; or as for `compare`.

    Example::

        advice = advise(lambda: loss_fn(model(inputs), targets), "cpu", dtype=torch.float16)
        print(advice)
        with autocast("cpu", dtype=torch.float16, policy=advice.policy):
            loss = loss_fn(model(inputs), targets)
    """
    if goal not in ("accuracy", "speed"):
        raise ValueError(f'goal= must be "accuracy" or "speed", not {goal!r}.')
    check_tolerance(tolerance)
    rounds = as_whole(rounds, "rounds", 0)
    if format is not None:
        if goal != "accuracy" or optimizer is not None:
            raise ValueError(
                "format= finds the layers that tolerate a format; it takes no goal= or optimizer=."
            )
        rehearsed, dtype = quantising(device, policy, format, dtype)
        step = Step(fn, device, dtype, policy, model, seed, limit)
        return FormatSearch(step, rehearsed, tolerance, _progress_line(progress)).run(rounds)
    step = Step(fn, device, dtype, policy, model, seed, limit)
    if goal == "speed":
        if optimizer is not None:
            raise ValueError('optimizer= serves goal="accuracy": lost updates are no matter of speed.')
        return SpeedSearch(step, policy, _progress_line(progress)).run(rounds)
    if optimizer is not None:
        check_optimizer(optimizer, "advise")
        optimizer = innermost(optimizer)
    return Search(step, tolerance, _progress_line(progress), optimizer).run(rounds)


def _progress_line(shown: bool | None) -> Callable[[str], None]:
    """Return a function that writes numbered lines to stderr; by default only to a terminal."""
    if not ((sys.stderr is not None and sys.stderr.isatty()) if shown is None else shown):
        return lambda _words: None
    numbers = itertools.count(1)
    return lambda words: print(f"advise: run {next(numbers)}, {words}", file=sys.stderr, flush=True)  # noqa: T201
