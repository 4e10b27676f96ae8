"""The results of a kit run, as text, JSON or Markdown."""

from __future__ import annotations

import json
import os
import platform
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from os import PathLike
from pathlib import Path

from amp_core.common.files import why_unwritable
from amp_core.common.versions import installed_version


def _versions() -> dict[str, str]:
    """Return the versions that a result depends on."""
    system = " ".join(filter(None, (platform.system(), platform.machine(), *platform.libc_ver())))
    packages = {name: installed_version(name) for name in ("amp-core", "torch", "numpy", "pytest")}
    installed = {name: version for name, version in packages.items() if version}
    return {"python": platform.python_version(), "platform": system, **installed}


@dataclass(frozen=True)
class CheckResult:
    """The result of one check.

    Attributes:
        area: its area, such as ``"grad_stats"``.
        check: its name, as used in `BackendFixtures.known_failures`.
        outcome: ``"passed"``, ``"failed"``, ``"skipped"`` or ``"known"`` (a known failure).
        message: why it failed or was skipped, on one line.
        details: the whole traceback of a failure.
        seconds: how long it took.
    """

    area: str
    check: str
    outcome: str
    message: str = ""
    details: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Report:
    """The results of all checks of a backend.

    Attributes:
        device_type: the device type of the backend.
        backend: the full name of its class.
        availability: the reason that its `availability()` gave.
        results: one for each check, in execution order.
        capabilities: what the backend and the fixtures say that the device can do, by name, in words.
        versions: of Python, the system and the packages that a result depends on.
        partial: whether checks of the kit were left out: by area, by name, or because the run was stopped.
    """

    device_type: str
    backend: str
    availability: str
    results: tuple[CheckResult, ...]
    capabilities: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=_versions)
    partial: bool = False

    @property
    def ok(self) -> bool:
        """Whether at least one check passed and none failed."""
        return self.count("passed") > 0 and not self.failed

    @property
    def failed(self) -> list[str]:
        """The names of the checks that failed."""
        return [r.check for r in self.results if r.outcome == "failed"]

    def count(self, outcome: str) -> int:
        """Return how many checks had `outcome`."""
        return sum(r.outcome == outcome for r in self.results)

    def by_area(self) -> dict[str, Counter[str]]:
        """Return the number of checks per outcome for each area."""
        areas: dict[str, Counter[str]] = {}
        for result in self.results:
            areas.setdefault(result.area, Counter())[result.outcome] += 1
        return areas

    def summary(self) -> str:
        """Return the verdict with the number of checks."""
        counts = [f"{self.count(o)} {o}" for o in ("passed", "failed", "known", "skipped") if self.count(o)]
        return f"{self._verdict()}{' a part' if self.partial else ''}: {', '.join(counts) or 'no check ran'}"

    def _verdict(self) -> str:
        return "passes" if self.ok else "does not pass"

    def write(self, path: str | PathLike[str]) -> None:
        """Write the report: JSON, a page in Markdown or a badge in SVG, by the suffix of `path`.

        Raises:
            ValueError: the suffix is another one.
        """
        require_suffixes([path])
        text = _WRITERS[Path(path).suffix](self)
        # The text of an error may have bytes of a file name that are no UTF-8.
        Path(path).write_text(text, encoding="utf-8", errors="backslashreplace")

    def to_svg(self) -> str:
        """Return a badge with the verdict."""
        color = "#3a7d2c" if self.ok else "#b3261e"
        texts = f"amp-core {self.device_type}", self.summary().partition(",")[0]
        left, right = (round(6.3 * len(text)) + 12 for text in texts)
        half = 'fill="#fff" font-family="Verdana,sans-serif" font-size="11" text-anchor="middle" y="14"'
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="20" role="img" '
            f'aria-label="{texts[0]}: {texts[1]}">'
            f'<rect width="{left}" height="20" fill="#444"/>'
            f'<rect x="{left}" width="{right}" height="20" fill="{color}"/>'
            f'<text {half} x="{left / 2}">{texts[0]}</text>'
            f'<text {half} x="{left + right / 2}">{texts[1]}</text></svg>\n'
        )

    def to_json(self) -> str:
        """Return the report as JSON."""
        return json.dumps({"ok": self.ok, **asdict(self)}, indent=2)

    def to_markdown(self) -> str:
        """Return the report as a page that a vendor can publish."""
        kit = f"{'a part of ' if self.partial else ''}the amp-core conformance kit"
        lines = [f"# {self.device_type}: {self._verdict()} {kit}", ""]
        lines += [f"Backend: {self.backend}. {self.availability}.", ""]
        lines += [", ".join(f"{name} {number}" for name, number in self.versions.items()), ""]
        lines += ["| area | passed | failed | known failures | skipped |", "|---|---|---|---|---|"]
        for area, c in self.by_area().items():
            lines.append(f"| {area} | {c['passed']} | {c['failed']} | {c['known']} | {c['skipped']} |")
        if not self.results:
            lines += ["", "No check ran."]
        if self.capabilities:
            lines += ["", "| capability | |", "|---|---|"]
            lines += [f"| {name} | {_cell(text)} |" for name, text in self.capabilities.items()]
        notes = [r for r in self.results if r.outcome != "passed"]
        if notes:
            lines += ["", "| check | outcome | why |", "|---|---|---|"]
            lines += [f"| {r.check} | {r.outcome} | {_cell(r.message)} |" for r in notes]
        return "\n".join(lines) + "\n"


_WRITERS: dict[str, Callable[[Report], str]] = {
    ".json": Report.to_json,
    ".md": Report.to_markdown,
    ".svg": Report.to_svg,
}


def require_suffixes(paths: Iterable[str | PathLike[str]]) -> None:
    """Raise ValueError for a path that `Report.write` cannot write, before any check runs."""
    for path in paths:
        if Path(path).suffix not in _WRITERS:
            raise ValueError(f"{path} is no report: its suffix must be one of {', '.join(_WRITERS)}.")


def require_writable(paths: Iterable[str | PathLike[str]]) -> None:
    """Raise ValueError for a path that no file can have, before any check runs."""
    for path in paths:
        why = why_unwritable(Path(path)) if os.fspath(path) else "its name is empty"
        if why:
            raise ValueError(f"no report can be written to {path or repr(path)}: {why}.")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
