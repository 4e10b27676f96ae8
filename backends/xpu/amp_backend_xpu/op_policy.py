"""The op lists of XPU, as torch compiled them in (``ATen/autocast_mode.cpp``, 2.13).

A name without a namespace is ``aten``'s, one without an overload is the default overload. Ops that the
installed torch lacks are left out; tests/policy/test_tables.py holds the lists against the dispatcher.
"""

from __future__ import annotations

from amp_core.policy.tables import SHARED, Lists

LISTS: Lists = SHARED
