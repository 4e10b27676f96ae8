"""What the tests of casts share."""

from __future__ import annotations

import pytest

from amp_core.casts import accumulating, bulk


@pytest.fixture(autouse=True)
def small_weights_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cast the weights of tests from the first region on, by kernels and in one call, as large ones."""
    monkeypatch.setattr(bulk, "SMALL_ON_HOST", 0)
    monkeypatch.setattr(accumulating, "_BY_AUTOGRAD", 0)
