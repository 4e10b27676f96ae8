"""`checkpoint_contexts`: let ``torch.utils.checkpoint`` repeat a forward pass in its regions."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from amp_core._torch.autocast import autocast_devices_enabled
from amp_core._torch.op_kernels import POLICIES
from amp_core._torch.tracing import has_proxies
from amp_core.dispatch.activate import default_policy
from amp_core.dispatch.engine import engine, policies_in_force
from amp_core.plugin import get_backend
from amp_core.regions.region import autocast


def checkpoint_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the ``context_fn`` contexts with which ``torch.utils.checkpoint`` keeps policies.

    ``torch.utils.checkpoint`` repeats a forward pass during the backward pass. By itself it restores the
    dtype of the region there, but not its policy, nor a region of float32 or of a third device.

    Returns:
        A context for the forward pass, which changes nothing, and one for its repetitions, which enters
        regions as those that are in force now, on every device.

    Example:
        >>> import torch, amp_core
        >>> from torch.utils.checkpoint import checkpoint
        >>> exact = amp_core.OpPolicy.default("cpu").override({"tanh": "fp32"})
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
        >>> with amp_core.autocast("cpu", policy=exact):
        ...     loss = checkpoint(
        ...         model, torch.ones(2, 4), use_reentrant=False, context_fn=amp_core.checkpoint_contexts
        ...     ).sum()
        >>> loss.backward()
    """
    if has_proxies():  # the graph has the casts; torch takes contexts of selective checkpoints alone
        return create_selective_checkpoint_contexts([])  # type: ignore[no-any-return,no-untyped-call]
    devices = dict.fromkeys([*autocast_devices_enabled(), *(device for device, _ in policies_in_force())])
    return nullcontext(), _Regions([*map(_region_now, devices)])


def _region_now(device_type: str) -> autocast:
    policy = engine(device_type).policy
    if policy is None and POLICIES.works():  # a region without a policy would keep that around the backward
        policy = default_policy(get_backend(device_type))
    return autocast(
        device_type,
        dtype=torch.get_autocast_dtype(device_type),
        enabled=torch.is_autocast_enabled(device_type),
        cache_enabled=torch.is_autocast_cache_enabled(),
        policy=policy,
    )


class _Regions:
    """Enters several regions; reentrant, as each backward pass over a graph repeats the forward pass."""

    def __init__(self, regions: Sequence[autocast]) -> None:
        self._regions = regions

    def __enter__(self) -> None:
        with ExitStack() as entered:
            for region in self._regions:
                entered.enter_context(region)
            entered.pop_all()

    def __exit__(self, *exc: Any) -> None:
        for region in reversed(self._regions):
            region.__exit__(*exc)
