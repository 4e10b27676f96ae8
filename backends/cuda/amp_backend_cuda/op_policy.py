"""The op lists compiled into torch for CUDA and ROCm (``ATen/autocast_mode.cpp``, 2.13).

Names without a namespace are in ``aten``; names without an overload mean the default one. Ops missing from
the installed torch are skipped; tests/policy/test_tables.py checks the lists against the dispatcher.
"""

from __future__ import annotations

from amp_core.policy import rules
from amp_core.policy.tables import SHARED, Lists

LISTS: Lists = {
    **SHARED,
    rules.LOWER_PRECISION_FP: SHARED[rules.LOWER_PRECISION_FP]
    + " cudnn_convolution cudnn_convolution_transpose",
    rules.FP32: SHARED[rules.FP32] + " linalg_matrix_sqrth",
}
