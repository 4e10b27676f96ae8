"""The conformance kit: behaviour that every backend must show, for makers of devices to inherit.

A third party's whole test file::

    from amp_core.testing import BackendConformance

    class TestNpu(BackendConformance):
        device_type = "npu"

and its ``conftest.py``, without which failures show no values::

    import pytest

    pytest.register_assert_rewrite("amp_core.testing")

The classes have no ``Test`` prefix, so that importing them collects nothing. Names of checks are public:
``known_failures`` and published reports refer to them, so moving or renaming one is a breaking change.
Needs ``amp-core[testing]``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from amp_core.testing.fixtures import BackendFixtures
    from amp_core.testing.loopback import Loopback
    from amp_core.testing.report import CheckResult, Report
    from amp_core.testing.runner import check
    from amp_core.testing.suite import BackendConformance

__all__ = ["BackendConformance", "BackendFixtures", "CheckResult", "Loopback", "Report", "check"]

_HOMES = {
    "BackendConformance": "amp_core.testing.suite",
    "BackendFixtures": "amp_core.testing.fixtures",
    "CheckResult": "amp_core.testing.report",
    "Loopback": "amp_core.testing.loopback",
    "Report": "amp_core.testing.report",
    "check": "amp_core.testing.runner",
}


def __getattr__(name: str) -> Any:
    # On demand: pytest can only rewrite the asserts of modules that are not loaded yet.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
