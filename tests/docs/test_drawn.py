"""What the documentation draws from the code's tables when it is built."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from amp_core import OpPolicy

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [page for page in DOCS.rglob("*.md") if "<!-- draw:" in page.read_text()]


@pytest.fixture(scope="module")
def pictures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_pictures", DOCS / "_pictures.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_mark_is_drawn(page: Path, pictures: ModuleType) -> None:
    """A page asks for a picture that is not there: the build fails."""
    assert "<!-- draw:" not in pictures.on_page_markdown(page.read_text())


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


@pytest.mark.parametrize("path", sorted((DOCS / "reports").glob("*.json")), ids=lambda path: path.stem)
def test_reports_are_of_the_present_kit(path):
    """The table of capabilities would show devices that were never checked by what the kit checks now."""
    from amp_core.testing.suite import BackendConformance

    report = json.loads(path.read_text())
    names = {name.removeprefix("test_") for name in dir(BackendConformance) if name.startswith("test_")}
    assert {result["check"] for result in report["results"]} == names
    assert report["ok"]
