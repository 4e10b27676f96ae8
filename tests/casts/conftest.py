"""What the tests of casts share."""

from __future__ import annotations

import pytest

from amp_core.casts import accumulating, bulk, reuse


@pytest.fixture(autouse=True)
def small_weights_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cast the weights of tests from the first region on, by kernels and in one call, as large ones."""
    monkeypatch.setattr(bulk, "_SMALL_ON_HOST", 0)
    monkeypatch.setattr(accumulating, "_SMALL_ON_HOST", 0)
    monkeypatch.setattr(reuse, "_SMALL", 0)
