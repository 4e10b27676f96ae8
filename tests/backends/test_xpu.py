"""What only a real Intel GPU shows; elsewhere all is skipped."""

from __future__ import annotations

import pytest
import torch

from amp_core.testing import check

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.xpu.is_available(), reason="needs an Intel GPU; there is none here"),
]


def test_the_kit() -> None:
    """Any fault that the conformance kit knows: kernels, regions, scaler, availability."""
    report = check("xpu")
    assert report.ok, [(r.check, r.message) for r in report.results if r.outcome == "failed"]
