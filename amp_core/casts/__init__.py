"""Cast weights once and reuse the casts: `cached_casts`, `master_weights`, and the bulk cast behind them."""

from __future__ import annotations

from amp_core.casts.lost_updates import LostUpdates, count_lost_updates
from amp_core.casts.master import MasterWeights, master_weights
from amp_core.casts.scope import CachedCasts, cached_casts
from amp_core.casts.stored import StoredWeights

__all__ = [
    "CachedCasts",
    "LostUpdates",
    "MasterWeights",
    "StoredWeights",
    "cached_casts",
    "count_lost_updates",
    "master_weights",
]
