"""Regions and policies under ``torch.compile`` and ``torch.export``: in graphs, guards and torch's caches."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch.fx.node import has_side_effect

from amp_core._torch.context_manager import Constants, ContextManager, Step
from amp_core._torch.dynamo import (
    autocast_step,
    before_export,
    compile_under,
    guard_on,
    run_uncompiled,
    trace_as_context_manager,
    when_loaded,
)
from amp_core._torch.tracing import is_exporting
from amp_core.common.call_site import level_outside
from amp_core.common.text import digest
from amp_core.common.versions import installed_version
from amp_core.dispatch.activate import Activation, RuleOverrides, pop
from amp_core.dispatch.engine import policies_in_force
from amp_core.dispatch.functions import rule_in_force
from amp_core.errors import AmpWarning, PolicyError
from amp_core.plugin.default_manager import get_backend
from amp_core.regions.decorator import around_generator
from amp_core.regions.region import autocast
from amp_core.states.region_stack import thread

# Graphs refer to what they push by its number here, which keeps it alive.
_in_graphs: dict[int, Activation | RuleOverrides] = {}


def number_in_graphs(item: Activation | RuleOverrides) -> int:
    """Return the number that graphs use for `item` and its equals, and keep the first of them alive."""
    _in_graphs.setdefault(item.number, item)
    return item.number


@has_side_effect  # else backends that clean the graph drop the call: nothing uses its result
def push_number(number: int) -> None:
    """Push the item with this number; graphs contain this call."""
    _in_graphs[number].push()


def item_of_number(number: int) -> Activation | RuleOverrides:
    """Return the item to which `number_in_graphs` gave this number."""
    return _in_graphs[number]


@has_side_effect
def pop_number(_number: int) -> None:
    """Undo the last push of this thread; graphs contain this call."""
    pop()


@has_side_effect
def widen(device: str) -> None:
    """Let the region that was just entered compute in float32; graphs contain this call."""
    if is_exporting():
        raise PolicyError(_NO_FLOAT32.format(device=device))
    torch.set_autocast_dtype(device, torch.float32)


def restored_by_region(_device: str) -> None:
    """Do nothing: the end of the region restores the dtype that was before it."""


_NO_FLOAT32 = (
    "torch.export cannot keep the float32 region on {device!r}, because the exported program enters torch's "
    "own regions. Write the casts into the model (x.float() before the op)."
)


def graph_step(number: int) -> Step:
    """Return the graph step that keeps the policy or changes with this number in force."""
    return Step(push_number, (number,), pop_number)


def cache_tag() -> str:
    """Return a cache key for code compiled under this thread's policies; empty if there are none.

    Another version of amp-core or of a backend may compute the same rules otherwise.
    """
    in_force = [(get_backend(device), active.policy.rules) for device, active in policies_in_force()]
    if not in_force:
        return ""
    parts = [(each.device_type, each.origin, type(each), sorted(rules.items())) for each, rules in in_force]
    return f"amp_core-{digest((installed_version('amp-core'), parts))}"


def region_of_constants(
    device: str, dtype: torch.dtype, enabled: bool, keeps_casts: bool, number: int | None
) -> autocast:
    """Return the region that code compiled after a graph break re-enters."""
    if number is None:
        return autocast(device, dtype, enabled, keeps_casts)
    item = item_of_number(number)
    assert isinstance(item, Activation)
    region = autocast(device, dtype, enabled, keeps_casts, item.policy)
    region._activation = item
    return region


def _describe(region: autocast) -> Constants:
    active = region._activation
    number = None if active is None else number_in_graphs(active)
    return region.device, region.fast_dtype, region._enabled, region._keeps_casts, number


def _steps(
    device: str, dtype: torch.dtype, enabled: bool, keeps_casts: bool, number: int | None
) -> Sequence[Step]:
    wide = enabled and dtype is torch.float32
    if wide:  # graphs contain torch's own regions, which refuse float32 on most devices
        dtypes = get_backend(device).supported_dtypes()
        dtype = next((each for each in dtypes if each is not torch.float32), dtype)
    region = autocast_step(device, dtype, enabled, keeps_casts)
    steps = [region] if number is None else [graph_step(number), region]
    return [*steps, Step(widen, (device,), restored_by_region)] if wide else steps


def _warn_of_regions() -> None:
    around = [frame.region for frame in thread.regions if frame.region._enabled]
    if around:
        warnings.warn(
            f"torch.export does not keep {around[-1]!r}, inside which it was called: the exported program "
            f"runs by the regions around its own calls. Enter the region in the forward of the model.",
            AmpWarning,
            stacklevel=level_outside(("torch",)),
        )


_how = ContextManager(_describe, _steps, region_of_constants, around_generator)
autocast._traced_as = _how  # for subclasses


def _register_with_dynamo() -> None:
    guard_on(policies_in_force, "amp_core policy")
    # A constant as long as that guard holds.
    torch.compiler.assume_constant_result(rule_in_force)  # type: ignore[no-untyped-call]
    compile_under(cache_tag, push_number)
    # torch may run a graph op by op where Dynamo compiles, as the backward pass of an autograd function.
    run_uncompiled([push_number, pop_number, widen, restored_by_region])
    overrides = ContextManager(
        lambda changes: (number_in_graphs(changes),),
        lambda number: (graph_step(number),),
        item_of_number,
    )
    trace_as_context_manager([RuleOverrides], overrides)
    trace_as_context_manager([autocast], _how)


when_loaded(_register_with_dynamo)
before_export(_warn_of_regions)
