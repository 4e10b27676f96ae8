"""The parameters of optimizers, and what happens after their steps."""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of all groups in order."""
    groups = optimizer.param_groups
    if len(groups) == 1:
        return list(groups[0]["params"])
    return [param for group in groups for param in group["params"]]


@functools.cache
def after_every_step(callback: Callable[[Optimizer], None]) -> None:
    """Call `callback` after each step of any optimizer, from the first request on and for good.

    A hook that came and went with a scope would change torch's hooks while other threads iterate over them.
    """
    register_optimizer_step_post_hook(lambda optimizer, _args, _kwargs: callback(optimizer))
