"""Names of ``amp_core`` load on first use: which, and from where."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import amp_core


def test_importing_the_package_imports_no_torch() -> None:
    """The command line waits seconds for torch before it prints its help."""
    code = "import amp_core, json, sys; print(json.dumps(['torch' in sys.modules, amp_core.__version__]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [False, metadata.version("amp-core")]


def test_what_type_checkers_see_is_what_loads() -> None:
    """A name has another home for type checkers than at run time, or is missing from `__all__`."""
    tree = ast.parse(Path(amp_core.__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.asname or alias.name: (node.module, alias.name)
        for node in block.body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("amp_core.")
        for alias in node.names
    }
    assert seen == amp_core._HOMES
    assert {*seen, *amp_core.errors.__all__, "__version__"} == set(amp_core.__all__)


@pytest.mark.parametrize("name", amp_core.__all__)
def test_every_public_name_loads(name: str) -> None:
    """`from amp_core import *` fails, or gives another object than the name's own module."""
    value = getattr(amp_core, name)
    if name in amp_core._HOMES:
        module, attribute = amp_core._HOMES[name]
        assert value is getattr(importlib.import_module(module), attribute)


def test_unknown_names_are_attribute_errors() -> None:
    """`hasattr` raises, or a mistyped name is an ImportError of some module."""
    assert not hasattr(amp_core, "autocats")
    assert {"autocast", "plugin", "testing"} <= set(dir(amp_core))
