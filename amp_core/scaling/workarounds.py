"""Workaround for torch's fused SGD, which leaves momentum uninitialised if its first step is skipped.

``torch.optim.sgd._fused_sgd`` allocates the buffers with ``empty_like`` for the kernel to fill, but the
kernel returns at once if ``found_inf`` is set (torch 2.13.0). The next step adds whatever is in that memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def groups_without_momentum(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the parameter groups whose momentum the next step will allocate."""
    if not isinstance(optimizer, torch.optim.SGD):
        return []
    return [group for group in optimizer.param_groups if group["momentum"] and _is_first(optimizer, group)]


def _is_first(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    # torch allocates all buffers of a group at once.
    with_gradient = next((p for p in group["params"] if p.grad is not None), None)
    if with_gradient is None:
        return False
    return optimizer.state.get(with_gradient, {}).get("momentum_buffer") is None


@torch.no_grad()
def clear_momentum(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], found_inf: Tensor) -> None:
    """Reset the momentum of `groups` to its initial state if the step was skipped.

    Without dampening that state is zero. With dampening the buffers must go, and the host waits to know.
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
