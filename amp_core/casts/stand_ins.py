"""Step an optimizer on float32 stand-ins of its parameters, one bucket of them at a time."""

from __future__ import annotations

import contextlib
import math
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from amp_core._torch.tensors import counts_writes, part_of, version_of
from amp_core.common.optimizers import is_torchs
from amp_core.plugin import get_backend

Bucket = list[tuple[dict[str, Any], list[tuple[int, Tensor]]]]
"""Parameter groups, each with the (index, parameter) pairs to step."""


def refuse_wrapper(optimizer: Optimizer, function: str) -> None:
    """Raise ValueError if `optimizer` steps another one, which has its own groups, or a state of its own."""
    for name, inner in vars(optimizer).items():
        if isinstance(inner, Optimizer) and vars(optimizer).get("state") is not inner.state:
            raise ValueError(
                f"This {type(optimizer).__name__} lets another optimizer step, its .{name}, which would not "
                f"step on the float32 weights, or would lose its state. Pass that one: "
                f"{function}(model, optimizer.{name}, ...). If it has only a part of the parameters, "
                f"call model.to(torch.bfloat16) before you create the {type(optimizer).__name__}."
            )


def bucket_nbytes(device_type: str) -> int:
    """Return the bytes of float32 weights that exist at a time during a step."""
    return get_backend(device_type).grad_bucket_nbytes


def buckets(optimizer: Optimizer) -> Iterator[Bucket]:
    """Yield the parameters that have gradients, in buckets.

    An optimizer of another package gets all in one, those without a gradient too: it may count its calls, or
    what it has.
    """
    splits = is_torchs(optimizer)
    index, size = 0, 0
    bucket: Bucket = []
    for group in optimizer.param_groups:
        bucket.append((group, []))
        for param in group["params"]:
            index += 1
            if splits and param.grad is None:
                continue
            nbytes = 4 * part_of(param).numel()
            limit = bucket_nbytes(param.device.type) if splits else math.inf
            if size and size + nbytes > limit:
                yield bucket
                bucket, size = [(group, [])], 0
            bucket[-1][1].append((index, param))
            size += nbytes
    yield bucket


def put_in_place(optimizer: Optimizer, bucket: Bucket, stand_ins: Mapping[int, Tensor]) -> None:
    """Let `optimizer` have only the parameters of `bucket`, and a stand-in for each whose id has one.

    It gets a list of its own for ``param_groups``, and each group of the bucket for ``params``.
    """
    for group, pairs in bucket:
        group["params"] = [stand_ins.get(id(p), p) for _, p in pairs]
    optimizer.param_groups = [group for group, _ in bucket]


@contextlib.contextmanager
def refused_writes(optimizer: Optimizer, params: list[Tensor]) -> Iterator[None]:
    """Raise RuntimeError if `optimizer` has written to `params`, in place of which it has others."""
    before = [version_of(param) for param in params]
    yield
    if counts_writes() and before != [version_of(param) for param in params]:
        raise RuntimeError(
            f"{type(optimizer).__name__} steps on weights that it has kept since its creation, not on those "
            f"of its param_groups, which are float32 in a step: its updates are lost. Use storage='fp32'."
        )


def unhooked_step(optimizer: Optimizer) -> Callable[..., Any]:
    """Return the step of `optimizer` without its hooks, which must run once per step."""
    step = type(optimizer).step
    step = step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]
    return types.MethodType(step, optimizer)
