"""The page of environment variables and the module that reads them."""

from __future__ import annotations

import re
from pathlib import Path

from amp_core.common import environment as _env

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "environment.md"


def test_every_variable_is_documented() -> None:
    """A variable is read that no page names, or the page names one that is not read."""
    read = {value for value in vars(_env).values() if isinstance(value, str) and value.startswith("AMP_")}
    named = {line.split("`")[1] for line in PAGE.read_text().splitlines() if line.startswith("| `AMP_")}
    assert read == named


def test_variables_are_read_in_one_place() -> None:
    """A variable that a module reads itself is missing on the page and in `amp env`."""
    root = PAGE.parents[2]
    reading = {
        str(path.relative_to(root))
        for folder in ("amp_core", "backends", "compat")
        for path in (root / folder).rglob("*.py")
        if re.search(r"os\.environ|os\.getenv", path.read_text())
    }
    shown = "amp_core/cli/env.py"  # prints them all
    kit = {path for path in reading if path.startswith("amp_core/testing/")}  # compares them
    assert reading - kit - {shown} == {"amp_core/common/environment.py"}
