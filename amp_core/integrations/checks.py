"""Checks shared by the integrations."""

from __future__ import annotations

from amp_core import GradScaler


def check_scaler(scaler: object) -> None:
    """Refuse a scaler that is not amp-core's: the integrations call methods that torch's lacks."""
    if scaler is not None and not isinstance(scaler, GradScaler):
        kind = f"{type(scaler).__module__}.{type(scaler).__qualname__}"
        raise TypeError(f"scaler= takes an amp_core.GradScaler, not a {kind}.")
