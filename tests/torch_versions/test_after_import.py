"""What amp-core does after the import of modules such as Dynamo."""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import pytest

from amp_core._torch.dynamo import _after_import, _AfterImports


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two modules that can be imported."""
    names = ("amp_test_awaited", "amp_test_other")
    for name in names:
        (tmp_path / f"{name}.py").write_text("ready = True")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", sys.meta_path.copy())
    yield
    for name in names:
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("modules")
def test_the_module_is_ready_when_it_is_told_of() -> None:
    """A question whether the module exists uses up the call, or it comes too early or twice."""
    told: list[Any] = []
    _after_import("amp_test_awaited", lambda: told.append(sys.modules["amp_test_awaited"].ready))
    assert importlib.util.find_spec("amp_test_awaited") is not None
    assert told == []
    importlib.import_module("amp_test_awaited")
    assert told == [True]
    _after_import("amp_test_awaited", lambda: told.append(1))
    assert told == [True, 1]


@pytest.mark.usefixtures("modules")
def test_an_import_during_another() -> None:
    """The list of finders gets shorter while an import, perhaps another thread's, goes through it.

    That one skips a finder, and finds no module at all.
    """
    _after_import("amp_test_awaited", lambda: None)

    class Slow(importlib.abc.MetaPathFinder):
        def find_spec(self, name: str, path: object, target: object = None) -> None:
            if name == "amp_test_other":
                importlib.import_module("amp_test_awaited")

    sys.meta_path.insert(sys.meta_path.index(PathFinder), Slow())
    assert importlib.import_module("amp_test_other").ready


@pytest.mark.usefixtures("modules")
def test_two_copies_of_the_library() -> None:
    """A notebook that imports amp-core anew gets a RecursionError from its next import of Dynamo."""
    told: list[int] = []
    for number in range(2):
        _AfterImports().add("amp_test_awaited", functools.partial(told.append, number))
    assert importlib.import_module("amp_test_awaited").ready
    assert sorted(told) == [0, 1]
