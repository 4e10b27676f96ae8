"""Tools that show what mixed precision did: `record`, `compare`, `advise`, `guard` and `watch`."""

from __future__ import annotations

# Importing these modules registers the report types.
from amp_core.debugging import advice_report as _advice_report
from amp_core.debugging import comparison_report as _comparison_report
from amp_core.debugging import recording_report as _recording_report
from amp_core.debugging import watching_report as _watching_report

__all__ = ["_advice_report", "_comparison_report", "_recording_report", "_watching_report"]
