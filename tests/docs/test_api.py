"""The built API reference: every public name with its public members."""

from __future__ import annotations

import ast
import importlib
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import amp_core

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "docs" / "reference"
PAGE = runpy.run_path(str(Path(__file__).with_name("page.py")))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
MODULES = ("amp_core", *(f"amp_core.{name}" for name in sorted(amp_core._SUBMODULES)), "amp_compat")
# Constants, and what is torch's: the reference explains them in its text.
IN_PROSE = {"OptState", "__version__", "API_VERSION", "ENTRY_POINT_GROUP", "NAME", "hookimpl"}
IN_PROSE |= {"COUNTS", "E2M1", "E2M3", "E3M2", "E4M3", "E5M2", "ELEMENTS", "SCALES"}
IN_PROSE |= {"EMULATED", "PORTABLE", "RULES"}


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site, warnings being errors; `AMP_TEST_SITE` names one that is built already."""
    pytest.importorskip("mkdocs")
    built = os.environ.get("AMP_TEST_SITE")
    if built:
        return Path(built)
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="session")
def anchors(site: Path) -> set[str]:
    files = [*(site / "reference").glob("*.html"), site / "how-to" / "trainers.html"]
    pages = "".join(page.read_text(encoding="utf-8") for page in files)
    return set(re.findall(r'id="(amp_[\w.]+)"', pages))


def public_names() -> list[str]:
    """Return the dotted names: a module's `__all__`, or what it defines."""
    names = []
    for path in MODULES:
        module = importlib.import_module(path)
        own = [k for k, v in vars(module).items() if getattr(v, "__module__", "") == path and k[0] != "_"]
        names += [f"{path}.{name}" for name in getattr(module, "__all__", own) if name not in IN_PROSE]
    return [name for name in names if not name.rpartition(".")[2].startswith("_")]


def members(value: object) -> list[str]:
    """Return the public members of a class that amp-core defines, inherited ones too."""
    if not isinstance(value, type):
        return []
    ours = [base for base in value.__mro__ if base.__module__.startswith("amp_")]
    names = {name for base in ours for name, member in vars(base).items() if _is_member(member)}
    return sorted(name for name in names if not name.startswith(("_", "test_")))


def fields(value: object) -> list[str]:
    """Return the public fields of a dataclass or named tuple of amp-core's."""
    if not isinstance(value, type) or not value.__module__.startswith("amp_"):
        return []
    names = getattr(value, "__dataclass_fields__", getattr(value, "_fields", ()))
    return [name for name in names if not name.startswith("_")]


def _is_member(member: object) -> bool:
    return isinstance(member, (property, classmethod, staticmethod)) or callable(member)


def resolved(name: str) -> object:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def paths(name: str) -> set[str]:
    """Return every path that a page may show the object under."""
    value = resolved(name)
    attribute = getattr(value, "__name__", name.rpartition(".")[2])
    modules = {getattr(value, "__module__", ""), "amp_core.errors", *MODULES}
    same = {m for m in modules if getattr(sys.modules.get(m), attribute, None) is value}
    return {name, *(f"{module}.{attribute}" for module in same)}


def is_rendered(member: str, name: str, anchors: set[str]) -> bool:
    """Whether the class has the member, or a public base class has it."""
    bases = [base for base in resolved(name).__mro__ if base.__module__.startswith("amp_")]
    public = {path for other in public_names() if resolved(other) in bases for path in paths(other)}
    return any(f"{path}.{member}" in anchors for path in public)


@pytest.mark.slow
@pytest.mark.parametrize("name", public_names())
def test_the_reference_renders_every_public_name(name: str, anchors: set[str]) -> None:
    """A user finds a name in code that the reference does not explain, or only in part."""
    assert paths(name) & anchors, f"{name} is rendered on no page of docs/reference"
    missing = [m for m in members(resolved(name)) if not is_rendered(m, name, anchors)]
    assert not missing, f"{name} is rendered without {missing}"


@pytest.mark.parametrize("name", [name for name in public_names() if fields(resolved(name))])
def test_docstrings_explain_every_field(name: str) -> None:
    """A user finds a field of a result that no page explains."""
    kind = resolved(name)
    text = "".join(base.__doc__ or "" for base in kind.__mro__ if base.__module__.startswith("amp_"))
    explained = ", ".join(re.findall(r"^ +([a-z][a-z_0-9, ]*):", text, re.MULTILINE)).split(", ")
    missing = [field for field in fields(kind) if field not in explained]
    assert not missing, f"{name} has fields that its docstring does not explain: {missing}"


def prose() -> str:
    return "".join(page.read_text(encoding="utf-8") for page in sorted(REFERENCE.rglob("*.md")))


@pytest.mark.parametrize("name", sorted(IN_PROSE))
def test_the_reference_explains_constants(name: str) -> None:
    """A constant is public, and no page says what it is."""
    assert re.search(rf"`(amp_core\.)?([a-z]+\.)?{name}`", prose())


def imported() -> list[str]:
    """Return what the examples of all pages import from `amp_core`, as dotted names."""
    names = set()
    for page in PAGES:
        trees = [ast.parse(str(block.lexemes["source"])) for block in PAGE["blocks"](page)]
        for node in (node for tree in trees for node in ast.walk(tree)):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("amp_core"):
                names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return sorted(names)


@pytest.mark.slow
@pytest.mark.parametrize("name", imported())
def test_examples_import_public_names(name: str, anchors: set[str]) -> None:
    """An example shows a name that the reference calls private by leaving it out."""
    if name in anchors or f"`{name}" in prose() or name.rpartition(".")[2] in IN_PROSE:
        return
    assert isinstance(resolved(name), ModuleType) or paths(name) & anchors


@pytest.mark.slow
def test_search_works_from_disk(site: Path) -> None:
    """Opened as a file, the built site cannot load its search index."""
    assert (site / "search" / "search_index.js").exists()


@pytest.mark.slow
def test_long_signatures_are_wrapped(site: Path) -> None:
    """Without a formatter, the signature of GradScaler is one line that runs off the page."""
    page = (site / "reference" / "python-api.html").read_text(encoding="utf-8")
    start = page.index('id="amp_core.GradScaler"')
    signature = re.sub("<[^>]+>", "", page[start:][: page[start:].index("</pre>")])
    lines = signature.splitlines()
    assert len(lines) > 5
    assert max(map(len, lines)) < 120
