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
        lambda overrides: (number_in_graphs(overrides),),
        lambda number: (graph_step(number),),
        item_of_number,
    )
    trace_as_context_manager([RuleOverrides], how)


when_loaded(_register_with_dynamo)
