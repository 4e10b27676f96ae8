"""Policies under ``torch.compile`` and ``torch.export``: in graphs, in their guards, in torch's caches."""

from __future__ import annotations

import hashlib
import threading

from amp_core._torch.dynamo import (
    ContextManager,
    Step,
    guard_on,
    tag_caches,
    trace_as_context_manager,
    when_loaded,
)
from amp_core.dispatch.activate import Activation, Changes, policies_in_force, pushed, restore


class InForce:
    """Keep `Changes` in force for a block."""

    def __init__(self, changes: Changes) -> None:
        self.changes = changes

    def __enter__(self) -> None:
        self.changes.push()

    def __exit__(self, *_: object) -> None:
        restore(pushed() - 1)


# A graph names what it pushes by a number, its place in this list, and keeps it alive.
_in_graphs: list[Activation | Changes] = []
_graph_lock = threading.Lock()


def number_in_graphs(item: Activation | Changes) -> int:
    """Return the number by which graphs push `item`; from now on it is kept alive."""
    with _graph_lock:
        for number, known in enumerate(_in_graphs):
            if known is item:
                return number
        _in_graphs.append(item)
        return len(_in_graphs) - 1


def push_number(number: int) -> None:
    """Push what `number_in_graphs` gave the number to; a graph holds this call."""
    _in_graphs[number].push()


def item_of_number(number: int) -> Activation | Changes:
    """Return what `number_in_graphs` gave the number to."""
    return _in_graphs[number]


def pop_number(_number: int) -> None:
    """Take back the last push of this thread; a graph holds this call."""
    restore(pushed() - 1)


def graph_step(number: int) -> Step:
    """Return what a graph does to keep the policy or changes of that number in force for a while."""
    return Step(push_number, (number,), pop_number)


def in_force_by_number(number: int) -> InForce:
    """Return the `InForce` that code compiled after a graph break enters again."""
    item = item_of_number(number)
    assert isinstance(item, Changes)
    return InForce(item)


def cache_tag() -> str:
    """Return what sets code compiled under the policies of this thread apart in caches; mostly nothing."""
    if not policies_in_force():
        return ""
    rules = [(device, sorted(active.policy.rules.items())) for device, active in policies_in_force()]
    return f"amp_core-{hashlib.sha256(repr(rules).encode()).hexdigest()}"


def _tell_dynamo() -> None:
    guard_on(policies_in_force, "amp_core policy")
    tag_caches(cache_tag)
    how = ContextManager(
        lambda block: (number_in_graphs(block.changes),),
        lambda number: (graph_step(number),),
        in_force_by_number,
    )
    trace_as_context_manager([InForce], how)


when_loaded(_tell_dynamo)
