"""The conformance kit: behavior required of every backend, for backend authors to inherit.

The complete test file of a third-party backend::

    from amp_core.testing import BackendConformance

    class TestNpu(BackendConformance):
        device_type = "npu"

and its ``conftest.py``, which makes failures show values::

    import pytest

    pytest.register_assert_rewrite("amp_core.testing")

The classes have no ``Test`` prefix, so pytest does not collect them on import. Names of checks are public:
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

_MODULES = {
    "BackendConformance": "amp_core.testing.suite",
    "BackendFixtures": "amp_core.testing.fixtures",
    "CheckResult": "amp_core.testing.report",
    "Loopback": "amp_core.testing.loopback",
    "Report": "amp_core.testing.report",
    "check": "amp_core.testing.runner",
}


def __getattr__(name: str) -> Any:
    # Import lazily: pytest can rewrite asserts only in modules that are not loaded yet.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if not __debug__:
        raise ImportError("`python -O` leaves out what the kit's checks assert: run it without -O.")
    import importlib

    from amp_core.common.extras import needing

    with needing("pytest", "amp-core[testing]"):
        return getattr(importlib.import_module(_MODULES[name]), name)
