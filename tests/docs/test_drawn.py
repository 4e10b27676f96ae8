"""What the documentation draws from the code's tables when it is built."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from amp_core import OpPolicy

DOCS = Path(__file__).parents[2] / "docs"
MARKS = {"_pictures.py": "<!-- draw:", "_charts.py": "<!-- chart:"}
PAGES = [
    (page, hook) for page in DOCS.rglob("*.md") for hook, mark in MARKS.items() if mark in page.read_text()
]


def load(hook: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"docs{Path(hook).stem}", DOCS / hook)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pictures() -> ModuleType:
    return load("_pictures.py")


@pytest.mark.parametrize(("page", "hook"), PAGES, ids=lambda part: Path(part).stem)
def test_every_mark_is_drawn(page: Path, hook: str) -> None:
    """A page asks for a picture that is not there: the build fails."""
    drawn = load(hook).on_page_markdown(page.read_text())
    assert MARKS[hook] not in drawn
    assert drawn.count("<svg") + drawn.count("<iframe") + drawn.count("|") > page.read_text().count("|")


@pytest.mark.parametrize("device", ["cpu", "cuda", "mps"])
def test_the_table_of_ops_holds_every_rule(device: str, pictures: ModuleType) -> None:
    """The reference leaves out an op, or gives it the rule of another device."""
    found = {}
    for line in pictures.ops().splitlines()[2:]:
        op, cell = (part.strip() for part in line.split("|")[1:3])
        for entry in filter(None, cell.split("<br>")):
            rule, _, devices = entry.partition(": ")
            if device in devices.split(", "):
                found[op.strip("`")] = rule.strip("`")
    wanted = {op.removesuffix(".default"): rule for op, rule in OpPolicy.default(device)}
    assert found == wanted


REPORTS = {path.stem: json.loads(path.read_text()) for path in sorted((DOCS / "reports").glob("*.json"))}


@pytest.mark.parametrize("device", REPORTS)
def test_reports_are_of_the_present_kit(device: str, pictures: ModuleType) -> None:
    """The table of capabilities would hide that a device was not checked by all that the kit checks now."""
    from amp_core.testing.suite import BackendConformance

    report = REPORTS[device]
    names = {name.removeprefix("test_") for name in dir(BackendConformance) if name.startswith("test_")}
    asked = {result["check"] for result in report["results"]}
    assert report["ok"]
    assert asked <= names
    if device in ("cpu", "npy"):  # whose code is in this repository
        assert asked == names
    cell = pictures.capabilities().splitlines()[-2].split("|")[2 + list(REPORTS).index(device)]
    assert (f"{len(names - asked)} newer than the report" in cell) == (asked != names)
