"""What the tests of casts share."""

from __future__ import annotations

import pytest

from amp_core.casts import accumulating


@pytest.fixture(autouse=True)
def small_weights_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `master_weights` take the weights of tests for large ones: small ones are cast by torch itself."""
    monkeypatch.setattr(accumulating, "is_small_on_host", lambda weight: False)
