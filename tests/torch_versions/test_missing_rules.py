"""The heavy ops that no rule covers, release by release of torch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from amp_core import OpPolicy
from amp_core.policy.coverage import missing

DATA = Path(__file__).parent / "data"


def test_the_missing_rules_of_this_torch_are_known(capsys: pytest.CaptureFixture[str]) -> None:
    """A release brings a product or a reduction that autocast leaves alone, and nobody sees it.

    For a release without a file, this prints the difference from the newest one that has one; CI shows it.
    """
    # Ops of other packages depend on what the tests imported.
    now = {
        device: {op: kind for op, kind in missing(OpPolicy.default(device)).items() if op.startswith("aten")}
        for device in ("cpu", "cuda")
    }
    of_release = {
        file.stem.split("_")[-1]: json.loads(file.read_text()) for file in sorted(DATA.glob("missing_ops_*"))
    }
    release = ".".join(torch.__version__.split(".")[:2])
    known = of_release.get(release, of_release[next(reversed(of_release))])
    lines = [
        f"{sign} {device} {op}"
        for device in now
        for sign, a, b in (("+", now, known), ("-", known, now))
        for op in a[device].keys() - b[device].keys()
    ]
    report = f"torch {release}, heavy ops without a rule: " + (", ".join(sorted(lines)) or "as before")
    if release in of_release:
        assert not lines, report
    else:
        with capsys.disabled():
            print(f"\n{report}")  # noqa: T201


def test_ops_that_can_have_no_rule_are_not_missing_one() -> None:
    """An op of another package that takes no tensor is named, although a policy refuses each rule for it."""
    library = torch.library.Library("amp_core_tests_missing", "DEF")
    library.define("made(int size) -> Tensor")
    library.define("used(Tensor x) -> Tensor")
    found = {op for op in missing(OpPolicy.default("cpu")) if op.startswith("amp_core_tests_missing")}
    assert found == {"amp_core_tests_missing::used.default"}
