"""A fault of torch's fused SGD: a first step that is skipped leaves its momentum uninitialised.

``torch.optim.sgd._fused_sgd`` allocates the buffers with ``empty_like`` and lets the kernel fill them, which
returns at once where ``found_inf`` is set (seen on torch 2.13.0). The next step adds what lay in that memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def groups_without_momentum(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the parameter groups for which the next step allocates momentum."""
    if not isinstance(optimizer, torch.optim.SGD):
        return []
    return [group for group in optimizer.param_groups if group["momentum"] and _is_first(optimizer, group)]


def _is_first(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    # torch has all buffers of a group or none.
    with_gradient = next((p for p in group["params"] if p.grad is not None), None)
    if with_gradient is None:
        return False
    return optimizer.state.get(with_gradient, {}).get("momentum_buffer") is None


@torch.no_grad()
def clear_momentum(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], found_inf: Tensor) -> None:
    """Make the momentum of `groups` what it is before a first step, if the step was skipped.

    Zero is that where there is no dampening; else the buffers must go, and the host waits to know.
    """
    for group in groups:
        states = [optimizer.state[p] for p in group["params"] if p.grad is not None]
        if not group["dampening"]:
            for state in states:
                buffer = state["momentum_buffer"]
                buffer.masked_fill_(found_inf.to(buffer.device, non_blocking=True) > 0, 0)
        elif found_inf.item():
            for state in states:
                state["momentum_buffer"] = None
