"""The rules of a device without any policy: those of torch's kernels, and those that amp-core adds."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from amp_core._torch.dispatcher import autocast_key
from amp_core._torch.op_kernels import has_dispatch_key, has_kernel, registered
from amp_core.common.op_lists import op_lists
from amp_core.policy import names, tables
from amp_core.policy import rules as r


def known_ops(lists: tables.Lists) -> dict[str, str]:
    """Return those entries of op lists whose ops the installed torch has."""
    return {op: rule for op, rule in tables.flatten(lists).items() if names.find(op) is not None}


def native_rules(device_type: str) -> Mapping[str, str]:
    """Map the full name of every op with a native kernel on `device_type`'s Autocast key to its rule.

    The rules come from the device's op lists. An op in none of them (from a newer torch, or a device's own
    C++) gets `NATIVE`.
    """
    return native_rules_of(device_type, tuple(op_lists(device_type).items()))


@lru_cache(maxsize=32)
def added_rules(device_type: str) -> Mapping[str, str]:
    """Map the ops that amp-core adds to the native rules of `device_type` to their rules.

    An op for which torch, or the device, has a kernel of its own is not added, and a device without native
    rules gets none.
    """
    key = autocast_key(device_type)
    if not has_dispatch_key(key) or not registered(key):
        return {}
    rules = known_ops(tables.WITHOUT_NATIVE)
    return {op: rule for op, rule in rules.items() if not has_kernel(op.removesuffix(".default"), key)}


@lru_cache(maxsize=32)
def native_rules_of(device_type: str, lists: tuple[tuple[str, str], ...]) -> Mapping[str, str]:
    """Return what `native_rules` returns for a device with these op lists."""
    key = autocast_key(device_type)
    if not has_dispatch_key(key):
        return {}
    known = tables.flatten(dict(lists))
    full = set(map(names.in_full, registered(key)))
    return {op: known.get(op, r.NATIVE) for op in sorted(full - added_rules(device_type).keys())}


def has_own_kernel(op: str, device_type: str) -> bool:
    """Return whether another package has given its `op`, a full name, an autocast kernel of its own."""
    key = autocast_key(device_type)
    if r.unstated(op) != r.NATIVE or not has_dispatch_key(key):
        return False
    return op in map(names.in_full, registered(key))
