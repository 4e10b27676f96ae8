"""Cast weights once and reuse the casts: `cached_casts`, `master_weights`, and the bulk cast behind them."""

from __future__ import annotations

from amp_core.casts.master import MasterWeights, master_weights
from amp_core.casts.scope import CachedCasts, cached_casts

__all__ = ["CachedCasts", "MasterWeights", "cached_casts", "master_weights"]
