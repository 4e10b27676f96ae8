"""Tools that show what mixed precision did: `record`, `compare`, `advise`, `guard` and `watch`.

Here are the classes of what they return.
"""

from __future__ import annotations

# Importing the reports registers how they are shown.
from amp_core.debugging import advice_report as _advice_report  # noqa: F401
from amp_core.debugging import comparison_report as _comparison_report  # noqa: F401
from amp_core.debugging import recording_diff_report as _recording_diff_report  # noqa: F401
from amp_core.debugging import recording_report as _recording_report  # noqa: F401
from amp_core.debugging import watching_report as _watching_report  # noqa: F401
from amp_core.debugging.advice import Finding, FormatAdvice, LayerInFormat, OpTime, SpeedAdvice
from amp_core.debugging.capture import Key
from amp_core.debugging.collectives import CollectiveCount, CollectiveKey
from amp_core.debugging.difference import Difference
from amp_core.debugging.fits import Fit
from amp_core.debugging.guard import Guard
from amp_core.debugging.op_counts import CastCount, CastKey, OpKey
from amp_core.debugging.op_faults import OpFault
from amp_core.debugging.quantized_counts import QuantizedCount, QuantizedKey
from amp_core.debugging.ranges import Entry, Extent, Format
from amp_core.debugging.stored_dtypes import TensorKey
from amp_core.debugging.violations import Violation
from amp_core.debugging.watching import Watch

__all__ = [
    "CastCount",
    "CastKey",
    "CollectiveCount",
    "CollectiveKey",
    "Difference",
    "Entry",
    "Extent",
    "Finding",
    "Fit",
    "Format",
    "FormatAdvice",
    "Guard",
    "Key",
    "LayerInFormat",
    "OpFault",
    "OpKey",
    "OpTime",
    "QuantizedCount",
    "QuantizedKey",
    "SpeedAdvice",
    "TensorKey",
    "Violation",
    "Watch",
]
