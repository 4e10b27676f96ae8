"""``pytest -p amp_core.testing.pytest_plugin --amp-device npu``: the conformance kit in any pytest run."""

from __future__ import annotations

from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options."""
    group = parser.getgroup("amp-core", "amp-core conformance kit")
    group.addoption(
        "--amp-device", metavar="DEVICE", help="also run the kit on this device's installed backend"
    )
    group.addoption(
        "--amp-fixtures", metavar="MODULE:CLASS", help="the BackendFixtures that describe the device"
    )
    group.addoption("--amp-thorough", action="store_true", help="check every combination instead of a sample")
    group.addoption(
        "--amp-report",
        metavar="FILE",
        action="append",
        default=[],
        help="write the kit's report: .json, .md for a page, .svg for a badge; may be repeated",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Add the kit's checks to the session."""
    device = config.getoption("--amp-device")
    if device is None:
        if config.getoption("--amp-fixtures") or config.getoption("--amp-report"):
            raise pytest.UsageError("--amp-fixtures and --amp-report need --amp-device=DEVICE.")
        return
    from amp_core.errors import BackendError
    from amp_core.plugin import get_backend
    from amp_core.testing.report import require_suffixes, require_writable
    from amp_core.testing.runner import COLLECTED, Collector, load_fixtures, require_present

    try:
        require_suffixes(config.getoption("--amp-report"))
        require_writable(config.getoption("--amp-report"))
        fixtures = load_fixtures(config.getoption("--amp-fixtures"))
        require_present(backend := get_backend(device))
    except (BackendError, ValueError) as error:
        raise pytest.UsageError(str(error)) from error
    collector = Collector(backend, (), fixtures, thorough=config.getoption("--amp-thorough"))
    config.stash[_KIT] = collector
    config.pluginmanager.register(collector, "amp-core-kit")
    config.args.append(str(COLLECTED))


_KIT = pytest.StashKey[Any]()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Write the reports and say whether the backend passes."""
    collector = config.stash.get(_KIT, None)
    if collector is None or collector.error or not collector.results:
        return
    report = collector.report()
    for path in config.getoption("--amp-report"):
        report.write(path)
    terminalreporter.write_line(f"amp-core conformance kit: {report.device_type} {report.summary()}")
