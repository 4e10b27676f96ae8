"""What the tests of regions share: torch's op lists, and a check that no test leaves a region on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give slow tests, which share two cores, three times the limit of the others."""
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(autouse=True)
def clean_autocast_state() -> Iterator[None]:
    """Fail the test that leaves autocast on, a dtype changed, or the nesting count above zero."""
    before = _state()
    yield
    assert _state() == before
    depth = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    assert depth == 1


def _state() -> tuple[object, ...]:
    devices = ("cpu", "cuda", "xpu")
    on = tuple(torch.is_autocast_enabled(d) for d in devices)
    return on, tuple(torch.get_autocast_dtype(d) for d in devices), torch.is_autocast_cache_enabled()
