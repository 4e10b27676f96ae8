"""Saved states and files in which anything is missing or something else: read whole, or refused in words."""

from __future__ import annotations

import copy
import json
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import amp_core
from amp_core import GradScaler, OpPolicy, Recording, autocast, convert_scaler_state
from amp_core.debugging.watching import Watch

from ..drawn import TIMES, chance

pytestmark = pytest.mark.filterwarnings("ignore::amp_core.EmulationWarning")

OURS = str(Path(amp_core.__file__).parent)
WRONG: list[Any] = [
    None, True, 0, 1, -1, 2**70, 0.5, float("inf"), float("nan"), "", "fp32", b"x", [], [1], [[]], {},
    {"a": 1}, (1, 2), object, torch.ones(2), torch.tensor(1), torch.tensor(float("nan")), torch.float16,
    1j, range(3),
]  # fmt: skip
MISSING = object()


def paths(tree: Any, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the way to each entry of nested mappings and lists."""
    yield here
    entries = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in entries:
        yield from paths(value, (*here, key))


def changed(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    """Return `tree` with `value` at `path`, or without that entry."""
    if not path:
        return {} if value is MISSING else value
    whole = copy.copy(tree)
    if len(path) == 1 and value is MISSING:
        del whole[path[0]]
    else:
        whole[path[0]] = changed(tree[path[0]], path[1:], value)
    return whole


def damaged(state: Any, seed: int, count: int = 150) -> Iterator[Any]:
    """Yield copies of `state` in which one or two entries are missing or something else; each one in turn."""
    draw = chance(seed)
    for path in paths(state):
        for value in (MISSING, *WRONG):
            yield changed(copy.deepcopy(state), path, value)
    for _ in range(int(count * TIMES)):
        whole = copy.deepcopy(state)
        for _ in range(draw.choice([1, 1, 2])):
            whole = changed(whole, draw.choice([*paths(whole)]), draw.choice([MISSING, *WRONG]))
        yield whole


def error_of(call: Callable[[Any], Any], state: Any) -> Exception | None:
    """Return what `call` raises."""
    try:
        call(state)
    except Exception as error:
        return error
    return None


def refused_in_words(error: Exception) -> bool:
    """Whether our own code raised `error`, rather than Python or torch in the middle of reading."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return last.filename.startswith(OURS) and (last.line or "").startswith("raise ")


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Mapping):
        return isinstance(b, Mapping) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b)


def trained() -> GradScaler:
    scaler, model = GradScaler("cpu", init_scale=8.0), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for key in (None, "second", None):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(1, 2)).sum(), key=key).backward()
        scaler.step(optimizer, key=key)
        scaler.update()
    return scaler


def delayed() -> Any:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    policy = OpPolicy.default("cpu").override({"linear": "recipe fp8_delayed"})
    with amp_core.delayed_scales(model) as scales, autocast("cpu", policy=policy):
        model(torch.ones(2, 16)).sum().backward()
    return scales


@pytest.mark.filterwarnings("ignore:.*so their histories start anew")
@pytest.mark.parametrize("make", [trained, delayed])
def test_a_damaged_state_changes_nothing(make: Callable[[], Any]) -> None:
    """Half of a state is loaded before the other half is refused, or a raw error names no entry."""
    whole = make()
    before = whole.state_dict()
    for state in damaged(before, seed=1):
        error = error_of(whole.load_state_dict, state)
        if error is None:
            whole.load_state_dict(before)
            continue
        missing = isinstance(error, KeyError) and isinstance(whole, GradScaler)  # as torch's
        assert missing or refused_in_words(error), (state, error)
        assert same(whole.state_dict(), before), (state, error)


@pytest.mark.parametrize("system", ["amp_core", "torch", "deepspeed", "megatron", "apex", "paddle"])
def test_a_damaged_scaler_state_is_not_converted(system: str) -> None:
    """A raw error names neither the entry nor what it has to be."""
    for state in damaged(convert_scaler_state(trained().state_dict(), to=system, lossy=True), seed=2):
        error = error_of(lambda state: convert_scaler_state(state, to="torch", lossy=True), state)
        assert error is None or refused_in_words(error), (state, error)


def recording(path: Path) -> Callable[[Path], Any]:
    model = nn.Linear(4, 4)
    with amp_core.record(model) as recorded, autocast("cpu"):
        model(torch.ones(1, 4)).sum().backward()
    recorded.save(path)
    return Recording.load


def watch(path: Path) -> Callable[[Path], Any]:
    model = nn.Linear(4, 4)
    with amp_core.watch(model) as watched:
        model(torch.ones(1, 4)).sum().backward()
    watched.save(path)
    return Watch.load


@pytest.mark.parametrize("kind", [recording, watch])
def test_a_damaged_file_is_refused(kind: Callable[[Path], Callable[[Path], Any]], tmp_path: Path) -> None:
    """A raw error does not name the file."""
    load = kind(tmp_path / "whole.json")
    for number, data in enumerate(damaged(json.loads((tmp_path / "whole.json").read_text()), seed=3)):
        file = tmp_path / f"{number}.json"
        try:
            file.write_text(json.dumps(data))
        except TypeError:
            continue  # what JSON cannot hold
        error = error_of(load, file)
        assert error is None or (isinstance(error, amp_core.AmpError) and str(file) in str(error)), data
