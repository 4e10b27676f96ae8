"""The page of environment variables and the module that reads them."""

from __future__ import annotations

from pathlib import Path

from amp_core.common import environment as _env

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "environment.md"


def test_every_variable_is_documented() -> None:
    """A variable is read that no page names, or the page names one that is not read."""
    read = {value for value in vars(_env).values() if isinstance(value, str) and value.startswith("AMP_")}
    named = {line.split("`")[1] for line in PAGE.read_text().splitlines() if line.startswith("| `AMP_")}
    assert read == named
