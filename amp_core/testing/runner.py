"""Run the kit on a backend with pytest, in this process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amp_core.plugin import Backend, get_backend
from amp_core.testing.report import CheckResult, Report

if TYPE_CHECKING:
    import pytest

_SUBJECT: list[type] = []


def check(
    device_type: str | Backend,
    *,
    areas: Sequence[str] = (),
    keyword: str = "",
    fixtures: type | None = None,
    junit: str | None = None,
) -> Report:
    """Run the kit on a backend and return the report.

    Args:
        device_type: the device type of an installed backend, or a backend object to check.
        areas: the areas to run, such as ``"grad_stats"``; by default all.
        keyword: a pytest ``-k`` expression over the names of the checks.
        fixtures: a `BackendFixtures` subclass that describes the device.
        junit: where to write a JUnit XML file.

    Raises:
        BackendNotFoundError: no backend exists for `device_type`.
        ValueError: an area is unknown.
    """
    import pytest

    backend = get_backend(device_type) if isinstance(device_type, str) else device_type
    collector = _Collector(lambda: _subject(backend, areas, fixtures))
    arguments = [*_ARGUMENTS, str(Path(__file__).with_name("collected.py"))]
    arguments += ["-k", keyword] if keyword else []
    arguments += [f"--junit-xml={junit}"] if junit else []
    with _on_its_own(), _collected_anew():
        pytest.main(arguments, plugins=[collector])
    if collector.error is not None:
        raise collector.error
    name = f"{type(backend).__module__}.{type(backend).__qualname__}"
    return Report(backend.device_type, name, _reason(backend), tuple(collector.results))


def _reason(backend: Backend) -> str:
    try:
        return backend.availability().reason
    except Exception as error:  # a broken backend; the checks report it
        return f"availability() is wrong: {type(error).__name__}: {error}"


_ARGUMENTS = [
    "-c", os.devnull, f"--rootdir={Path(__file__).parent}", "--import-mode=importlib", "-s",
    "-p", "no:cacheprovider", "-p", "no:terminal", "-p", "no:faulthandler",
    "-o", "python_files=collected.py",
]  # fmt: skip


def _subject(backend: Backend, areas: Sequence[str], fixtures: type | None) -> type:
    from amp_core.testing.suite import AREAS

    unknown = set(areas) - set(AREAS)
    if unknown:
        raise ValueError(f"unknown areas {sorted(unknown)}; there are {', '.join(AREAS)}")
    bases = [AREAS[name] for name in AREAS if not areas or name in areas]
    given = {"device_type": backend.device_type, "backend": property(lambda _: backend)}
    return type("TestBackend", ((fixtures,) if fixtures else ()) + tuple(bases), given)


@contextmanager
def _collected_anew() -> Iterator[None]:
    """Make pytest reload the module with the subject instead of reusing that of an earlier run."""
    for name in [n for n in sys.modules if n.rpartition(".")[2] == "collected"]:
        del sys.modules[name]
    subjects = list(_SUBJECT)
    try:
        yield
    finally:
        _SUBJECT[:] = subjects


@contextmanager
def _on_its_own() -> Iterator[None]:
    """Isolate the run from the plugins and options of an enclosing pytest."""
    mine = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "", "PYTEST_PLUGINS": ""}
    names = (*mine, "PYTEST_CURRENT_TEST", "PYTEST_VERSION")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(mine)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


class _Collector:
    """A pytest plugin that builds the subject and keeps the outcome of every check."""

    def __init__(self, build: Callable[[], type]) -> None:
        self.results: list[CheckResult] = []
        self.error: ValueError | None = None
        self._build = build
        self._areas: dict[str, str] = {}

    def pytest_configure(self) -> None:
        import pytest

        # pytest can rewrite asserts only from here on, and only in modules that are not loaded yet.
        if "amp_core.testing.suite" not in sys.modules:
            pytest.register_assert_rewrite("amp_core.testing.suite")
        try:
            _SUBJECT.append(self._build())
        except ValueError as error:
            self.error = error
            _SUBJECT.append(object)

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        from amp_core.testing.suite import AREAS

        for item in items:
            owner = next((a for a, c in AREAS.items() if item.originalname in vars(c)), "own")
            self._areas[item.nodeid] = owner
        order = [*AREAS, "own"]
        items.sort(key=lambda item: order.index(self._areas[item.nodeid]))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.results.append(
                CheckResult("collection", "collection", "failed", _line(report), str(report.longrepr))
            )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        name = report.nodeid.rpartition("::")[2].removeprefix("test_")
        details = str(report.longrepr) if report.failed else ""
        result = CheckResult(
            self._areas.get(report.nodeid, "own"),
            name,
            _outcome(report),
            _line(report),
            details,
            report.duration,
        )
        self.results.append(result)


def _outcome(report: pytest.TestReport) -> str:
    if report.skipped:
        return "known" if hasattr(report, "wasxfail") else "skipped"
    return report.outcome


def _line(report: Any) -> str:
    if getattr(report, "wasxfail", ""):
        return str(report.wasxfail)
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(report.longrepr or "")
    return " ".join(text.split())[:300]
