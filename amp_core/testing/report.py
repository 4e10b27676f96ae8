"""The results of a kit run, as text, JSON or Markdown."""

from __future__ import annotations

import json
import platform
from collections import Counter
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version


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
    """The results of all checks of a backend, in execution order."""

    device_type: str
    backend: str
    availability: str
    results: tuple[CheckResult, ...]
    versions: dict[str, str] = field(default_factory=lambda: dict(versions()))

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

    def to_json(self) -> str:
        """Return the report as JSON."""
        return json.dumps({"ok": self.ok, **asdict(self)}, indent=2)

    def to_markdown(self) -> str:
        """Return the report as a page that a vendor can publish."""
        verdict = "passes" if self.ok else "does not pass"
        lines = [f"# {self.device_type}: {verdict} the amp-core conformance kit", ""]
        lines += [f"Backend: {self.backend}. {self.availability}.", ""]
        lines += [", ".join(f"{name} {number}" for name, number in self.versions.items()), ""]
        lines += ["| area | passed | failed | known failures | skipped |", "|---|---|---|---|---|"]
        for area, c in self.by_area().items():
            lines.append(f"| {area} | {c['passed']} | {c['failed']} | {c['known']} | {c['skipped']} |")
        notes = [r for r in self.results if r.outcome != "passed"]
        if notes:
            lines += ["", "| check | outcome | why |", "|---|---|---|"]
            lines += [f"| {r.check} | {r.outcome} | {_cell(r.message)} |" for r in notes]
        return "\n".join(lines) + "\n"


def versions() -> dict[str, str]:
    """Return the versions that a result depends on."""
    result = {"python": platform.python_version(), "platform": platform.platform()}
    for name in ("amp-core", "torch", "numpy", "pytest"):
        try:
            result[name] = version(name)
        except PackageNotFoundError:
            continue
    return result


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
