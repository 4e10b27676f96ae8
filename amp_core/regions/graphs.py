"""Regions under ``torch.compile`` and ``torch.export``: what Dynamo adds to a graph for them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

from amp_core._torch.context_manager import Constants, ContextManager, Step
from amp_core._torch.dynamo import (
    autocast_step,
    before_export,
    trace_as_context_manager,
    when_loaded,
)
from amp_core.common.call_site import level_outside
from amp_core.dispatch.activate import Activation, activation, default_policy, in_float32
from amp_core.dispatch.graphs import graph_step, item_of_number, number_in_graphs
from amp_core.errors import AmpWarning
from amp_core.plugin.default_manager import get_backend
from amp_core.regions.region import autocast
from amp_core.states.region_stack import thread


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
    if enabled and dtype is torch.float32:
        # Graphs contain torch's own regions, which reject float32; an equivalent policy replaces the dtype.
        backend = get_backend(device)
        dtype = backend.default_dtype()
        item = None if number is None else item_of_number(number)
        policy = item.policy if isinstance(item, Activation) else default_policy(backend)
        active = activation(backend, in_float32(policy))
        number = None if active is None else number_in_graphs(active)
    region = autocast_step(device, dtype, enabled, keeps_casts)
    return [region] if number is None else [graph_step(number), region]


def _warn_of_regions() -> None:
    around = [frame.region for frame in thread.regions if frame.region._enabled]
    if around:
        warnings.warn(
            f"torch.export does not keep {around[-1]!r}, inside which it was called: the exported program "
            f"runs by the regions around its own calls. Enter the region in the forward of the model.",
            AmpWarning,
            stacklevel=level_outside(("torch",)),
        )


_how = ContextManager(_describe, _steps, region_of_constants)
autocast._traced_as = _how  # for subclasses
when_loaded(lambda: trace_as_context_manager([autocast], _how))
before_export(_warn_of_regions)
