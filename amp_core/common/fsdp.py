"""Tell which modules FSDP shards, without importing it."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn


def is_sharded(module: nn.Module) -> bool:
    """Return whether FSDP, of either version, shards the parameters of `module`."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, (fsdp.FSDPModule, fsdp.FullyShardedDataParallel))
