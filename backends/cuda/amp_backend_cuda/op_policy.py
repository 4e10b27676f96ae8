"""The op lists of CUDA and ROCm, as torch compiled them in (``ATen/autocast_mode.cpp``, 2.13).

A name without a namespace is ``aten``'s, one without an overload is the default overload. Ops that the
installed torch lacks are left out; tests/policy/test_tables.py checks the lists against the dispatcher.
"""

from __future__ import annotations

from amp_core.policy import rules
from amp_core.policy.tables import SHARED, Lists

LISTS: Lists = {
    **SHARED,
    rules.LOWER_PRECISION_FP: SHARED[rules.LOWER_PRECISION_FP]
    + " cudnn_convolution cudnn_convolution_transpose",
}
