"""The contract's page and its code say the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from amp_core.kernels import Kernels
from amp_core.plugin import Backend
from amp_core.testing import BackendFixtures

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "backend-contract.md"


def _public(cls):
    own = {**vars(cls), **getattr(cls, "__annotations__", {})}
    return {n for n in own if not n.startswith("_") and n not in {"AREA", "requires", "dtypes"}}


@pytest.mark.parametrize(
    ("heading", "cls"), [("Backend", Backend), ("Kernels", Kernels), ("Fixtures", BackendFixtures)]
)
def test_the_contract_page_names_every_member(heading, cls):
    """A hook or capability could be added, or renamed, without a word on what it promises."""
    section = PAGE.read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    missing = {n for n in _public(cls) if f"`{n}`" not in section and f"`{n}(" not in section}
    assert not missing


def test_the_contract_page_names_nothing_else():
    """The page would promise hooks that nobody calls."""
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    named = {row[3:].partition("(")[0] for row in rows}
    assert named == {n for c in (Backend, Kernels) for n in _public(c) if callable(getattr(c, n, None))}
