"""Deliberately wrong backends, one plausible bug each: the kit must name the right check.

They stand in ``wrong/``, by what is wrong: add a class with `fails`, the checks that must fail.
"""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from amp_core.kernels import PORTABLE
from amp_core.testing import BackendFixtures, Loopback, check

FILES = {
    path.stem: runpy.run_path(str(path)) for path in sorted(Path(__file__).with_name("wrong").glob("*.py"))
}
WRONG = {name: cls for names in FILES.values() for name, cls in names.items() if hasattr(cls, "fails")}
UNDO = [names["UNDO"] for names in FILES.values() if "UNDO" in names]


def areas_of(checks):
    """Return the areas that define `checks`: pytest takes as long to collect the others as to run one."""
    from amp_core.testing.suite import AREAS

    return [area for area, cls in AREAS.items() if any(f"test_{name}" in vars(cls) for name in checks)]


def make(cls):
    return cls() if issubclass(cls, Loopback) else Loopback(kernels=cls())


class Host(BackendFixtures):
    device_type = "cpu"


@pytest.fixture(autouse=True)
def _process_as_it_was():
    from amp_core.testing.suite.settings import settings

    before = [(setting, setting.read()) for setting in settings(Host())]
    yield
    for steps in UNDO:  # first, as the end of inference mode restores autocast
        while steps:
            steps.pop()()
    for setting, value in before:
        setting.write(value)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_backend_fails_the_right_check(name):
    """A maker of a device would be told that a wrong backend is right."""
    cls = WRONG[name]
    fixtures = getattr(cls, "fixtures", None)
    areas, keyword = areas_of(cls.fails), " or ".join(cls.fails)
    report = check(make(cls), areas=areas, keyword=keyword, fixtures=fixtures)
    assert not report.ok
    assert set(cls.fails) <= set(report.failed), [(r.check, r.outcome, r.message) for r in report.results]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("CastBroadcastsIntoOut", r"cast of shapes .* into out= of .* is accepted: raise ValueError"),
        ("CastAsksForVersions", r"cast of \d+ tensors, first torch.* raises RuntimeError: Inference tensors"),
        ("MeasureWritesTheSameBack", r"grad_stats of \d+ tensors?, first torch.*moved a version counter"),
        ("NothingIsFlagged", r"found_inf of multiply_ by 0.5, which was 0.0: 0.0 instead of 1.0"),
        ("QuantizeRoundsTiesAway", r"quantize of torch.float32 of shape .* values has .* instead of "),
        ("UpdateGrowsOneStepLate", r"update_scale_ from ScaleState.*, found_inf=.*, must give ScaleState"),
        ("MakesKernelsAnew", r"kernels\(\) makes a new object each time: make it once"),
    ],
)
def test_a_message_says_what_was_called_and_what_came(name, words):
    """A maker would see in the report that something is wrong, but not of which kernel, or of what."""
    cls = WRONG[name]
    report = check(make(cls), areas=areas_of(cls.fails), keyword=" or ".join(cls.fails))
    messages = [result.message for result in report.results if result.outcome == "failed"]
    assert any(re.search(words, message) for message in messages), messages


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(WRONG)[::90])  # each takes as long as `amp check cpu`
def test_the_whole_kit_fails_a_wrong_backend(name):
    """The right check could be hidden by another one's effects."""
    cls = WRONG[name]
    report = check(make(cls), fixtures=getattr(cls, "fixtures", None))
    assert set(cls.fails) <= set(report.failed)


def test_there_are_enough_wrong_backends_over_all_areas():
    """The kit is only as good as what it has caught."""
    assert len(WRONG) >= 40
    areas = {cls.fails[0].partition("_")[0] for cls in WRONG.values()}
    assert areas >= {"cast", "grad", "multiply", "add", "kernels", "update", "hooks"}


def test_a_right_backend_passes():
    """A kit that fails everything would pass the tests above."""
    report = check(Loopback(kernels=PORTABLE))
    assert report.ok, report.to_markdown()
    assert report.count("passed") > 90
