"""Turn a policy into a table of what runs in place of torch's own kernels."""

from __future__ import annotations

import warnings

import torch

from amp_core._torch.autocast import is_device_type
from amp_core._torch.dispatcher import autocast_key
from amp_core._torch.op_kernels import has_dispatch_key
from amp_core.common.call_site import level_outside
from amp_core.dispatch.casting import Runner, make_runner, once_defined
from amp_core.dispatch.engine import Table
from amp_core.errors import EmulationWarning, PolicyError
from amp_core.plugin import get_backend
from amp_core.plugin.status import unknown_to_torch
from amp_core.policy import OpPolicy, names
from amp_core.policy import rules as r
from amp_core.policy.native_rules import added_rules, native_rules
from amp_core.policy.recipes import BATCHED, OPS, recipe_of


def table_of(policy: OpPolicy) -> Table:
    """Return what runs for each op that `policy` treats differently from torch.

    Raises:
        PolicyError: torch does not support autocast for the device type, or no longer has an op.
    """
    _require_autocast(policy.device_type)
    changes = {op: rule for op, rule in _changes(policy).items() if not names.is_function(op)}
    return {**{op: _runner(op, rule, policy.device_type) for op, rule in changes.items()}, **_guards(policy)}


_CONVOLUTION = "aten::convolution.default"


def _guards(policy: OpPolicy) -> Table:
    """Return, if `policy` has recipes, runners for the other matrix products that refuse ``torch.func``.

    It turns ``linear`` into ``addmm``, and ``conv2d`` into ``convolution``, so that a rule for the former
    alone would have no effect.
    """
    quantised = {op for op, rule in policy.rules.items() if recipe_of(rule) is not None}
    if not quantised:
        return {}
    from amp_core.dispatch.scaled_products import guarded

    _warn_of_emulation(policy)
    others = {*OPS, *([_CONVOLUTION] if any("::conv" in op for op in quantised) else [])} - quantised
    own = {op: _runner(op, policy.rules.get(op, r.UNCHANGED), policy.device_type) for op in sorted(others)}
    return {op: guarded(run) for op, run in own.items() if run is not None}


def _changes(policy: OpPolicy) -> dict[str, str]:
    """Return the ops that `policy` treats differently from torch, with their rules."""
    native = {**native_rules(policy.device_type), **added_rules(policy.device_type)}
    wanted = {op: policy.rules.get(op, r.unstated(op)) for op in sorted({*native, *policy.rules})}
    return {op: rule for op, rule in wanted.items() if rule != native.get(op, r.unstated(op))}


def _warn_of_emulation(policy: OpPolicy) -> None:
    """Say which recipes the device emulates, and why; once for each reason."""
    from amp_core.kernels.scaled import emulated

    products = get_backend(policy.device_type).scaled_products()
    for op, rule in policy.rules.items():
        recipe = recipe_of(rule)
        if recipe is not None:
            reasons = emulated(products, recipe, batched=op in BATCHED)
            for reason in dict.fromkeys(reasons.values()):
                _warn_once(policy.device_type, reason, rule)


_warned = set[tuple[str, str]]()


def _warn_once(device_type: str, reason: str, rule: str) -> None:
    if (device_type, reason) in _warned:
        return
    _warned.add((device_type, reason))
    warnings.warn(
        f"Recipes are emulated on {device_type!r}, {rule.removeprefix('recipe ')} at least in part: {reason}."
        f" Operands are quantised, dequantised and multiplied in the recipe's accumulate dtype. The results "
        f"are those of the format; time and memory are not. `amp backends` lists what each device has.",
        EmulationWarning,
        stacklevel=level_outside(),
    )


def _require_autocast(device_type: str) -> None:
    if has_dispatch_key(autocast_key(device_type)):
        return
    if is_device_type(device_type):
        raise PolicyError(f"torch does not support autocast for device type {device_type!r}.")
    raise PolicyError(unknown_to_torch(get_backend(device_type)))


def _runner(op: str, rule: str, device_type: str) -> Runner | None:
    if rule == r.NATIVE:
        return None
    if names.find(op) is None and op.startswith("aten::"):
        raise PolicyError(f"torch {torch.__version__} no longer has the op {op!r}.")
    return once_defined(op, lambda overload: make_runner(overload, rule, device_type))
