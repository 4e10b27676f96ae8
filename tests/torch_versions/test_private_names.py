"""Every private torch name hidden from amp-core, and changed, one at a time, in a process of its own."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from amp_core._torch.features import FEATURES, statuses

SCRIPT = Path(__file__).parent / "data" / "hide.py"
ROOT = Path(__file__).parents[2]
PACKAGES = [ROOT / "amp_core", ROOT / "backends", ROOT / "compat"]
ALWAYS = ("listing", "regions", "scaler")
OWNERS = {n: status.feature for status in statuses() for n in status.names if n.startswith("torch.")}


def run(mode: str, *paths: str) -> list[dict[str, Any]]:
    command = [sys.executable, str(SCRIPT), mode, *paths]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert [report["path"] for report in reports] == [*paths], done.stderr
    return reports


def faults(report: dict[str, Any], *, hidden: bool) -> list[str]:
    """Return what is wrong with how amp-core did without one name."""
    owner = OWNERS[report["path"]]
    names = [report["path"]] if hidden else [name for name, feature in OWNERS.items() if feature == owner]
    found = [f"{s}: {r}" for s, r in report["results"].items() if s in ALWAYS and r != "right"]
    found += [f"{s}: {r}" for s, r in report["results"].items() if r != "right" and r[:8] != "refused:"]
    for text in [*report["results"].values(), *(text for _, text, _ in report["warnings"])]:
        if text != "right" and not (torch.__version__ in text and any(name in text for name in names)):
            found.append(f"names no version or no name: {text}")
    kinds = [kind for kind, _, _ in report["warnings"]]
    if len(kinds) > 1 or {*kinds} - {"TorchFeatureWarning"}:
        found.append(f"warnings: {report['warnings']}")
    if hidden and report["off"] != [owner]:
        found.append(f"off: {report['off']}, not {owner}")
    return [f"{report['path']}: {text}" for text in found]


def test_a_policy_without_the_dispatcher() -> None:
    """A torch without a dispatcher call breaks regions, or drops a policy in silence."""
    (report,) = run("hide", "torch._C._dispatch_get_registrations_for_dispatch_key")
    assert faults(report, hidden=True) == []
    assert report["results"]["policy"].startswith("refused:")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_probes_do_not_depend_on_where_they_run() -> None:
    """A feature is off for the whole process since its first use was under no_grad, or a default device."""
    command = [sys.executable, str(SCRIPT.with_name("ambient.py"))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(reports) == 21, done.stderr
    assert [report for report in reports if report[1]] == []


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("mode", ["hide", "change"])
def test_every_private_name(mode: str) -> None:
    """One private name that torch drops, or gives other arguments, breaks more than its own feature."""
    reports = run(mode, *OWNERS)
    assert [text for report in reports for text in faults(report, hidden=mode == "hide")] == []


def test_an_unknown_name_of_torch_would_show() -> None:
    """The test's own notion of a fault is too weak to see one."""
    path = "torch._C._dispatch_library"
    good = {"path": path, "results": dict.fromkeys(ALWAYS, "right"), "warnings": [], "off": ["policies"]}
    assert faults(good, hidden=True) == []
    for bad in (
        {"results": {"regions": "AttributeError: _dispatch_library"}},
        {"results": {"policy": f"TypeError: torch {torch.__version__} {path}"}},
        {"results": {"policy": f"refused: {path}"}},
        {"warnings": [["UserWarning", f"{torch.__version__} {path}", ""]]},
        {"off": []},
    ):
        assert faults({**good, **bad}, hidden=True), bad


FOREIGN = {
    "_after_closure": "Lightning's",
    "_asdict": "of named tuples",
    "_fields": "of named tuples",
    "_at_fork_reinit": "CPython's",
    "_current_frames": "CPython's",
    "_exit": "of os, documented",
    "_getframe": "CPython's",
    "_is_owned": "CPython's",
    # A pickled module has these names in its state, so torch cannot change them.
    "_buffers": "of modules",
    "_parameters": "of modules",
}
DECLARED = {part for status in statuses() for name in status.names for part in name.split(".")}
TREES = {path: ast.parse(path.read_text()) for top in PACKAGES for path in sorted(top.rglob("*.py"))}


def is_private(name: object) -> bool:
    return isinstance(name, str) and name.startswith("_") and not name.endswith("__")


def own_attributes() -> set[str]:
    """Return the private attributes that amp-core itself defines or sets."""
    own = set()
    for node in (node for tree in TREES.values() for node in ast.walk(tree)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            own.add(node.attr)
        for part in node.body if isinstance(node, ast.ClassDef) else ():
            targets = [part.target] if isinstance(part, ast.AnnAssign) else getattr(part, "targets", [])
            own |= {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
            own |= {part.name} if isinstance(part, ast.FunctionDef) else set()
            if any(isinstance(target, ast.Name) and target.id == "__slots__" for target in targets):
                own |= {slot.value for slot in ast.walk(part) if isinstance(slot, ast.Constant)}
    return own


def private_reads(tree: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Yield each private name that code reads from an object or imports from torch."""
    typing_only = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and ast.unparse(branch.test) == "TYPE_CHECKING"
        for part in branch.body
        for node in ast.walk(part)
    }
    for node in ast.walk(tree):
        names: list[Any] = []
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            names = [node.attr]
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            origin = getattr(node, "module", None) or ""
            paths = [f"{origin}.{alias.name}".lstrip(".").split(".") for alias in node.names]
            # Below a private module every name is private.
            names = [
                part for path in paths if path[0] == "torch" and any(map(is_private, path)) for part in path
            ]
            names = [name if is_private(name) else f"_{name}" for name in names if name not in DECLARED]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1:
            reads = node.func.id in ("getattr", "hasattr") and isinstance(node.args[1], ast.Constant)
            names = [node.args[1].value] if reads else []
        yield from ((node, name) for name in names if is_private(name) and id(node) not in typing_only)


def test_every_private_name_belongs_to_a_feature() -> None:
    """A private torch name is used without a probe, so that a torch that lacks it breaks everything."""
    own, probed = own_attributes() - DECLARED, ROOT / "amp_core" / "_torch"
    undeclared = [
        f"{path}:{node.lineno}: {name} in {ast.unparse(node)}"
        for path, tree in TREES.items()
        for node, name in private_reads(tree)
        if name not in own | FOREIGN.keys() and not (path.parent == probed and name in DECLARED)
    ]
    assert undeclared == []


def test_a_private_name_without_a_feature_would_show() -> None:
    """The scan of the source is blind to a way of reading a private name."""
    for source in (
        "tensor._cdata2",
        "getattr(optimizer, '_some_flag', False)",
        "hasattr(x, '_some_flag')",
        "torch._C._something",
        "from torch._inductor import config",
        "from torch.fx import _lazy_graph_module",
        "import torch._lazy.config",
    ):
        assert [name for _, name in private_reads(ast.parse(source))], source
    assert not list(private_reads(ast.parse("from torch.nn import Module; x.public; x.__dict__")))


def test_attributes_without_a_path_are_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A feature lists an attribute of objects, but says that it works in a torch without it."""
    for feature in FEATURES:
        assert not feature.probed or feature._probe is not None, feature.name
    monkeypatch.setattr(torch.optim, "SGD", lambda *_args, **_options: object())
    with pytest.raises(RuntimeError, match="do not say"):
        next(f for f in FEATURES if f.name == "fused_steps")._probe()


def test_the_documentation_lists_every_feature() -> None:
    """A user reads of a feature in a warning and finds it nowhere."""
    page = (ROOT / "docs" / "reference" / "versions.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", page, re.M)
    assert rows == sorted((feature.name, feature.lost) for feature in FEATURES)
