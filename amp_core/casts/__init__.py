"""Weights that are cast once: `cached_casts`, and the bulk cast behind it."""

from __future__ import annotations

from amp_core.casts.scope import CachedCasts, cached_casts

__all__ = ["CachedCasts", "cached_casts"]
