"""Run the kit on a backend with pytest, in this process."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amp_core._torch.autocast import is_device_type
from amp_core.common.extras import needing
from amp_core.plugin import Backend, get_backend
from amp_core.plugin.results import described
from amp_core.plugin.status import unknown_to_torch
from amp_core.testing.report import CheckResult, Report

if TYPE_CHECKING:
    import pytest

SUBJECTS: list[dict[str, type]] = []
"""What `amp_core.testing.collected` defines, for each run in progress."""

COLLECTED = Path(__file__).with_name("collected.py")


def check(
    device_type: str | Backend,
    *,
    areas: Sequence[str] = (),
    keyword: str = "",
    fixtures: type | None = None,
    junit: str | None = None,
    thorough: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Report:
    """Run the kit on a backend and return the report.

    Args:
        device_type: the device type of an installed backend, or a backend object to check.
        areas: the areas to run, such as ``"grad_stats"``; by default all.
        keyword: a pytest ``-k`` expression over the names of the checks.
        fixtures: a `BackendFixtures` subclass that describes the device.
        junit: where to write a JUnit XML file.
        thorough: whether to check every combination instead of a sample, which takes minutes.
        progress: called before each check with its number, how many there are, and its name.

    Raises:
        BackendNotFoundError: no backend exists for `device_type`.
        TypeError: `device_type` is no backend, or `areas` one string.
        ValueError: an area is unknown, `keyword` is no expression, or `fixtures` no `BackendFixtures`.
        KeyboardInterrupt: the run was interrupted.
    """
    with needing("pytest", "amp-core[testing]"):
        import pytest

    backend = get_backend(device_type) if isinstance(device_type, str) else device_type
    if not isinstance(backend, Backend):
        raise TypeError(f"check() needs a device type or an instance of a Backend, not {backend!r}.")
    if isinstance(areas, str):
        raise TypeError(f"areas= must be a collection of areas, not {areas!r}; pass [{areas!r}].")
    collector = Collector(backend, areas, fixtures, thorough=thorough, progress=progress)
    arguments = [*_ARGUMENTS, str(COLLECTED)]
    arguments += ["-k", keyword] if keyword else []
    arguments += [f"--junit-xml={junit}"] if junit else []
    with pytest.MonkeyPatch.context() as patch, _collected_anew():
        _isolate(patch)
        ended = pytest.main(arguments, plugins=[collector])
    if collector.error is not None:
        raise collector.error
    if ended == pytest.ExitCode.USAGE_ERROR:
        raise ValueError(f"pytest takes no expression {keyword!r}; write one as 'cast and not layout'.")
    return collector.report()


def require_present(backend: Backend) -> None:
    """Raise ValueError if the device of `backend` cannot be used here."""
    available = backend.availability()
    if not available.usable:
        raise ValueError(f"{backend.device_type!r} cannot be checked here: {available.reason}")
    if not is_device_type(backend.device_type):
        raise ValueError(unknown_to_torch(backend))


def load_fixtures(name: str | None) -> type | None:
    """Return the class that ``package.module:Class`` names.

    Raises:
        ValueError: there is no such class.
    """
    if name is None:
        return None
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the module's own code may exit, or skip, as pytest.importorskip does
        why = described(error)
        raise ValueError(f"{name} names no fixtures, as package.module:Class does: {why}") from error
    _require_fixtures(found, name)
    return found  # type: ignore[no-any-return]


def _require_fixtures(found: object, name: str) -> None:
    from amp_core.testing.fixtures import BackendFixtures

    if not (isinstance(found, type) and issubclass(found, BackendFixtures)):
        raise ValueError(f"{name} is {found!r}, no subclass of amp_core.testing.BackendFixtures.")


_ARGUMENTS = [
    "-c", os.devnull, f"--rootdir={Path(__file__).parent}", "--import-mode=importlib", "-s",
    "-p", "no:cacheprovider", "-p", "no:terminal", "-p", "no:faulthandler",
    "-p", "no:unraisableexception",  # collects garbage ten times a run, for warnings that nobody sees
    "-o", "python_files=collected.py",
]  # fmt: skip


@contextmanager
def _collected_anew() -> Iterator[None]:
    """Make pytest reload the module with the subject instead of reusing that of an earlier run."""
    for name in [n for n in sys.modules if n.rpartition(".")[2] == "collected"]:
        del sys.modules[name]
    subjects = list(SUBJECTS)
    try:
        yield
    finally:
        SUBJECTS[:] = subjects


def _isolate(patch: pytest.MonkeyPatch) -> None:
    """Keep the plugins and options of an enclosing pytest out of the run, and its variables as they are."""
    patch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    for name in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS"):
        patch.setenv(name, "")
    for name in ("PYTEST_CURRENT_TEST", "PYTEST_VERSION"):  # pytest sets them
        patch.delenv(name, raising=False)


class Collector:
    """A pytest plugin that defines the checks of a backend and keeps the outcome of each."""

    def __init__(
        self,
        backend: Backend,
        areas: Sequence[str],
        fixtures: type | None,
        *,
        thorough: bool,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        self.results: list[CheckResult] = []
        self.error: BaseException | None = None
        self._progress, self._count = progress, 0
        self._backend, self._chosen, self._fixtures, self._thorough = backend, areas, fixtures, thorough
        self._areas: dict[str, str] = {}
        self._subject: type = object

    def report(self) -> Report:
        """Return the results so far."""
        from amp_core.testing.suite import AREAS

        kind = type(self._backend)
        name, reason = f"{kind.__module__}.{kind.__qualname__}", _reason(self._backend)
        return Report(
            self._backend.device_type,
            name,
            reason,
            tuple(self.results),
            _capabilities(self._subject()),
            partial=len(self.results) < len(self._areas) or {*(self._chosen or AREAS)} != {*AREAS},
        )

    def pytest_configure(self) -> None:
        """Define the class of checks."""
        import pytest

        # pytest can rewrite asserts only from here on, and only in modules that are not loaded yet.
        if "amp_core.testing.suite" not in sys.modules:
            pytest.register_assert_rewrite("amp_core.testing.suite")
        try:
            self._subject = self._build()
        except ValueError as error:
            self.error = error
        name = "Test" + "".join(part.capitalize() for part in self._backend.device_type.split("_"))
        SUBJECTS.append({name: self._subject})

    def _build(self) -> type:
        from amp_core.testing.fixtures import BackendFixtures
        from amp_core.testing.suite import AREAS

        backend, fixtures = self._backend, self._fixtures or BackendFixtures
        _require_fixtures(fixtures, "fixtures=")
        unknown = set(self._chosen) - set(AREAS)
        if unknown:
            raise ValueError(f"unknown areas {sorted(unknown)}; there are {', '.join(AREAS)}")
        bases = [AREAS[name] for name in AREAS if not self._chosen or name in self._chosen]
        given = {
            "device_type": backend.device_type,
            "backend": property(lambda _: backend),
            "thorough": self._thorough,
        }
        first = () if fixtures is BackendFixtures else (fixtures,)
        return type("TestBackend", (*first, *bases), given)

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Put the kit's checks last, in the order of the areas."""
        from amp_core.testing.suite import AREAS

        mine = [item for item in items if getattr(item, "cls", None) is self._subject]
        for item in mine:
            owner = next((a for a, c in AREAS.items() if item.originalname in vars(c)), "own")
            self._areas[item.nodeid] = owner
        order = [*AREAS, "own"]
        mine.sort(key=lambda item: order.index(self._areas[item.nodeid]))
        chosen = {*(self._chosen or AREAS), "own"}  # the fixtures may be a test class, with every area
        mine = [item for item in mine if self._areas[item.nodeid] in chosen]
        items[:] = [item for item in items if item.nodeid not in self._areas] + mine

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Count the checks that `-k` has left."""
        self._count = len(session.items)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Name the check that starts."""
        if self._progress is not None:
            self._progress(f"{len(self.results) + 1}/{self._count} {_name(nodeid)}")

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Keep what stopped the run, so that the checks before it are not taken for all."""
        import pytest

        if not isinstance(excinfo.value, pytest.Session.Interrupted):  # by a failed collection
            self.error = excinfo.value

    def pytest_internalerror(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Keep what ended pytest itself, such as a module that cannot be imported."""
        self.error = excinfo.value

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep a failure to define the checks."""
        if report.failed and COLLECTED.name in report.nodeid:
            self.results.append(
                CheckResult("collection", "collection", "failed", _line(report), str(report.longrepr))
            )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the outcome of a check."""
        if report.nodeid not in self._areas or (report.when != "call" and report.passed):
            return
        name = _name(report.nodeid)
        details = str(report.longrepr) if report.failed else ""
        area = self._areas[report.nodeid]
        if report.when == "teardown":  # what the check did to the process outweighs its own outcome
            self.results[:] = [result for result in self.results if result.check != name]
        self.results.append(
            CheckResult(area, name, _outcome(report), _line(report), details, report.duration)
        )


def _name(nodeid: str) -> str:
    return nodeid.rpartition("::")[2].removeprefix("test_")


def _reason(backend: Backend) -> str:
    try:
        return backend.availability().reason
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # of a broken backend, which may panic in Rust; the checks report it
        return f"availability() is wrong: {type(error).__name__}: {error}"


def _capabilities(subject: Any) -> dict[str, str]:
    """Return what the device can do, as the fixtures and the backend say."""
    queries: dict[str, Callable[[], object]] = {
        "default dtype": subject.backend.default_dtype,
        "region dtypes": lambda: ", ".join(map(str, subject.backend.supported_dtypes())),
        "gradient dtypes": lambda: ", ".join(map(str, subject.dtypes())),
        "kernels": lambda: subject.kernels.name,
        "op rules": lambda: len(subject.backend.op_policy()),
    }
    for name in ("complex", "float8", "compile", "export"):
        queries[name] = lambda name=name: getattr(subject, f"supports_{name}")  # type: ignore[misc]
    queries["subnormals"] = lambda: subject.keeps_subnormals
    answers = {}
    for name, query in queries.items():
        try:
            answer = query()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a broken backend, or no subject; the checks report it
            answer = f"unknown: {type(error).__name__}"
        text = {True: "yes", False: "no"}.get(answer) if isinstance(answer, bool) else None
        answers[name] = text or str(answer).replace("torch.", "")
    return answers


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
