"""Policies under ``torch.compile`` and ``torch.export``: in graphs, guards and torch's caches."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Hashable

import torch

from amp_core._torch.context_manager import ContextManager, Step
from amp_core._torch.dynamo import (
    compile_under,
    guard_on,
    trace_as_context_manager,
    when_loaded,
)
from amp_core.dispatch.activate import Activation, RuleOverrides, pushed, restore, rule_in_force
from amp_core.dispatch.engine import policies_in_force


class OverridesInForce:
    """Context manager that keeps `RuleOverrides` in force."""

    def __init__(self, changes: RuleOverrides) -> None:
        self.changes = changes

    def __enter__(self) -> None:
        self.changes.push()

    def __exit__(self, *_: object) -> None:
        restore(pushed() - 1)


# Graphs refer to what they push by its index in this list, which keeps it alive.
_in_graphs: list[Activation | RuleOverrides] = []
_numbers: dict[Hashable, int] = {}
_graph_lock = threading.Lock()


def number_in_graphs(item: Activation | RuleOverrides) -> int:
    """Return the number that graphs use for `item` and its equals, and keep the first of them alive."""
    with _graph_lock:
        number = _numbers.setdefault(item.identity, len(_in_graphs))
        if number == len(_in_graphs):
            _in_graphs.append(item)
        return number


def push_number(number: int) -> None:
    """Push the item with this number; graphs contain this call."""
    _in_graphs[number].push()


def item_of_number(number: int) -> Activation | RuleOverrides:
    """Return the item to which `number_in_graphs` gave this number."""
    return _in_graphs[number]


def pop_number(_number: int) -> None:
    """Undo the last push of this thread; graphs contain this call."""
    restore(pushed() - 1)


def graph_step(number: int) -> Step:
    """Return the graph step that keeps the policy or changes with this number in force."""
    return Step(push_number, (number,), pop_number)


def overrides_by_number(number: int) -> OverridesInForce:
    """Return the `OverridesInForce` that code compiled after a graph break re-enters."""
    item = item_of_number(number)
    assert isinstance(item, RuleOverrides)
    return OverridesInForce(item)


def cache_tag() -> str:
    """Return a cache key for code compiled under this thread's policies; empty if there are none."""
    if not policies_in_force():
        return ""
    rules = [(device, sorted(active.policy.rules.items())) for device, active in policies_in_force()]
    return f"amp_core-{hashlib.sha256(repr(rules).encode()).hexdigest()}"


def _register_with_dynamo() -> None:
    guard_on(policies_in_force, "amp_core policy")
    # A constant as long as that guard holds.
    torch.compiler.assume_constant_result(rule_in_force)  # type: ignore[no-untyped-call]
    compile_under(cache_tag)
    how = ContextManager(
        lambda block: (number_in_graphs(block.changes),),
        lambda number: (graph_step(number),),
        overrides_by_number,
    )
    trace_as_context_manager([OverridesInForce], how)


when_loaded(_register_with_dynamo)
