"""Tell which modules FSDP shards, without importing it."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn


def fsdp_class(name: str) -> Any:
    """Return the class, for `isinstance`, or what has no instances while FSDP is not imported.

    Another thread may be importing it: its module is there before the classes are.
    """
    return getattr(sys.modules.get("torch.distributed.fsdp"), name, ())


def is_sharded(module: nn.Module) -> bool:
    """Return whether FSDP, of either version, shards the parameters of `module`."""
    return isinstance(module, (fsdp_class("FSDPModule"), fsdp_class("FullyShardedDataParallel")))
