"""Every private torch name hidden from amp-core, and changed, one at a time, in a process of its own."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import amp_core._torch
from amp_core._torch.features import statuses

SCRIPT = Path(__file__).parent / "data" / "hide.py"
ALWAYS = ("listing", "regions", "scaler")
OWNERS = {name: status.feature for status in statuses() for name in status.names}


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


def test_every_private_name_belongs_to_a_feature() -> None:
    """A private torch name is used without a probe, so that a torch that lacks it breaks everything."""
    declared = {part for name in OWNERS for part in name.split(".")}
    undeclared = []
    for path in Path(amp_core._torch.__path__[0]).glob("*.py"):
        tree = ast.parse(path.read_text())
        typing_only = {
            id(node)
            for branch in ast.walk(tree)
            if isinstance(branch, ast.If) and ast.unparse(branch.test) == "TYPE_CHECKING"
            for part in branch.body
            for node in ast.walk(part)
        }
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Load)
                and id(node) not in typing_only
            ):
                private = node.attr.startswith("_") and not node.attr.endswith("__")
                ours = ast.unparse(node.value) == "self"
                if private and not ours and node.attr not in declared:
                    undeclared.append(f"{path.name}:{node.lineno}: {ast.unparse(node)}")
    assert undeclared == []
