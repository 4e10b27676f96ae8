"""What the tests of casts share."""

from __future__ import annotations

import pytest

from amp_core.casts import bulk


@pytest.fixture(autouse=True)
def small_weights_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cast the weights of tests by kernels and in one call, as large ones; torch casts small ones alone."""
    monkeypatch.setattr(bulk, "_SMALL_ON_HOST", 0)
