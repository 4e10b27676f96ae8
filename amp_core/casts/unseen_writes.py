"""Which steps of optimizers write to weights without changing their version counters."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_core.common.optimizers import is_torchs
from amp_core.kernels.memory import on_host, read


def may_write_unseen(optimizer: Optimizer) -> bool:
    """Return whether the next step of `optimizer` may; fused steps and those of other packages do."""
    return not is_torchs(optimizer) or _is_fused(optimizer)


def is_traced_and_seen(optimizer: Optimizer) -> bool:
    """Return whether Dynamo traces a step that changes version counters: each that is not fused."""
    return torch.compiler.is_dynamo_compiling() and not _is_fused(optimizer)


def _is_fused(optimizer: Optimizer) -> bool:
    return any(group.get("fused") for group in optimizer.param_groups)  # each may have a setting of its own


def is_skipped(optimizer: Optimizer) -> bool:
    """Return whether the host knows, without waiting, that a fused step of torch writes nothing."""
    found_inf = getattr(optimizer, "found_inf", None)
    if not (is_torchs(optimizer) and isinstance(found_inf, Tensor) and on_host(found_inf)):
        return False
    return bool(read(found_inf) == 1.0)  # as torch's kernels ask
