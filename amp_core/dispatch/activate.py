"""From a policy to something that a region can push and pop."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Mapping
from functools import lru_cache

import torch

from amp_core._torch.dispatcher import (
    autocast_key,
    constant_for_dynamo,
    has_dispatch_key,
    mark_graph_functions,
)
from amp_core.common import environment as _env
from amp_core.dispatch.casting import Runner, make_runner
from amp_core.dispatch.engine import Table, engine
from amp_core.errors import AmpWarning, PolicyError
from amp_core.plugin import get_backend
from amp_core.plugin.interface import Backend
from amp_core.policy import OpPolicy, names
from amp_core.policy import rules as r
from amp_core.policy.op_policy import native_rules


class Changes:
    """Changes to whatever policy is in force when they are pushed: what a module glob puts on.

    Args:
        device_type: whose ops they are for.
        rules: full op name to rule.
        origin: what `OpPolicy.explain` says of them.
    """

    def __init__(self, device_type: str, rules: Mapping[str, str], origin: str) -> None:
        self.device_type = device_type
        self.rules = rules
        self.origin = origin
        # By the identity of a policy, which the entry keeps alive: equal ones differ in their origins.
        self._made: dict[int, tuple[OpPolicy | None, Activation]] = {}
        with _lock:
            self.handle = len(_changes_made)
            _changes_made.append(self)

    def on(self, policy: OpPolicy) -> OpPolicy:
        """Return `policy` with the changes."""
        return policy.override(self.rules, origin=self.origin)

    def activated(self, policy: OpPolicy | None) -> Activation:
        """Return `policy`, or the device's default, with the changes and made ready."""
        if id(policy) not in self._made:
            under = default_policy(get_backend(self.device_type)) if policy is None else policy
            self._made[id(policy)] = policy, _prepared(self.on(under), False)
        return self._made[id(policy)][1]

    def __reduce__(self) -> tuple[object, ...]:  # the handle means something in this process only
        return Changes, (self.device_type, dict(self.rules), self.origin)


class InForce:
    """Keep `Changes` in force for a block. To be made where it is entered: Dynamo traces no other."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __enter__(self) -> None:
        if torch.compiler.is_dynamo_compiling():
            _admit_to_graphs()
        push_changes(self.handle)

    def __exit__(self, *_: object) -> None:
        if torch.compiler.is_dynamo_compiling():
            _admit_to_graphs()
        pop_changes(self.handle)


class Activation:
    """A policy made ready for one device type; a region pushes and pops it, in pairs, per thread.

    Both calls trace under ``torch.compile(fullgraph=True)``: Dynamo guards on `handle`, so that another
    policy compiles anew and the same one does not.
    """

    def __init__(self, policy: OpPolicy, table: Table, handle: int, *, by_default: bool) -> None:
        self.policy = policy
        self.table = table
        self.handle = handle
        self.by_default = by_default

    def push(self) -> None:
        """Put the policy in force for this thread.

        Raises:
            PolicyError: `torch.export` is tracing; an exported program could not keep the policy.
        """
        push(self.handle)

    def pop(self) -> None:
        """Take it off again; never raises."""
        pop(self.handle)

    def __reduce__(self) -> tuple[object, ...]:
        return _prepared, (self.policy, self.by_default)

    def __repr__(self) -> str:
        return f"<Activation of {self.policy!r}, {len(self.table)} ops differ from native>"


def push(handle: int) -> None:
    """Do what `Activation.push` does, for Dynamo, which knows no object that was made while it traces."""
    if torch.compiler.is_dynamo_compiling():
        _admit_to_graphs()
    push_policy(handle)


def pop(handle: int) -> None:
    """Do what `Activation.pop` does."""
    if torch.compiler.is_dynamo_compiling():
        _admit_to_graphs()
    pop_policy(handle)


_activations: list[Activation] = []
_changes_made: list[Changes] = []
_lock = threading.Lock()


def push_policy(handle: int) -> None:
    """Push the activation number `handle`; a plain function of an int, so that a graph can hold the call."""
    active = _activations[handle]
    if torch.compiler.is_exporting():
        raise PolicyError(_NO_EXPORT.format(policy=active.policy))
    here = engine(active.policy.device_type)
    # A region that names no policy keeps that of the region around it, as it keeps its dtype.
    if active.by_default and here.depth:
        here.push_again()
    else:
        here.push(active.table, active.policy)


def pop_policy(handle: int) -> None:
    """Pop what `push_policy` pushed."""
    engine(_activations[handle].policy.device_type).pop()


def push_changes(handle: int) -> None:
    """Push the `Changes` number `handle` on top of what is in force in this thread."""
    changes = _changes_made[handle]
    here = engine(changes.device_type)
    changed = changes.activated(here.policy)
    if torch.compiler.is_exporting():
        raise PolicyError(_NO_EXPORT.format(policy=changed.policy))
    here.push(changed.table, changed.policy)


def pop_changes(handle: int) -> None:
    """Pop what `push_changes` pushed."""
    engine(_changes_made[handle].device_type).pop()


@constant_for_dynamo
def _admit_to_graphs() -> None:
    mark_graph_functions((push_policy, pop_policy, push_changes, pop_changes))


_NO_EXPORT = (
    "torch.export cannot keep {policy!r}: the exported program would compute by torch's own rules. Export "
    "without policy=, or write the casts into the model (x.float() before the op)."
)


def activation(backend: Backend, policy: OpPolicy | None) -> Activation | None:
    """Prepare `policy` for regions on `backend`.

    Args:
        backend: serves the region's device type.
        policy: for that device type; None for the default: what ``AMP_POLICY`` names, else the backend's own.

    Returns:
        What the region pushes and pops; None where a region that names no policy runs by the rules that
        torch compiled in, which then costs nothing.

    Raises:
        PolicyError: `policy` is no OpPolicy or for another device type, or ``AMP_POLICY`` is wrong.
    """
    if policy is None:
        return _of_default(backend, _env.policy_path())
    if not isinstance(policy, OpPolicy):
        raise PolicyError(f"policy= takes an OpPolicy, not {type(policy).__name__}.")
    if policy.device_type != backend.device_type:
        raise PolicyError(
            f"{policy!r} cannot apply to a region on {backend.device_type!r}; start from "
            f"OpPolicy.default({backend.device_type!r})."
        )
    return _prepared(policy, False)


def _of_default(backend: Backend, path: str | None) -> Activation | None:
    found = _default_activation(backend, path)
    if found is None and not native_rules(backend.device_type):
        _warn_no_rules(backend.device_type)
    return found


def default_policy(backend: Backend) -> OpPolicy:
    """Return the policy of regions that name none: the backend's, as the file of ``AMP_POLICY`` changes it.

    Raises:
        PolicyError: the file cannot be read or is wrong.
    """
    return _default_policy(backend, _env.policy_path())


def _default_policy(backend: Backend, path: str | None) -> OpPolicy:
    from amp_core.policy.toml import read_changes

    policy = backend.op_policy()
    if path is None:
        return policy
    try:
        return read_changes(path, policy)
    except (OSError, PolicyError) as error:
        raise PolicyError(f"{_env.POLICY}: {error}") from error


@lru_cache(maxsize=64)
def _default_activation(backend: Backend, path: str | None) -> Activation | None:
    found = _prepared(_default_policy(backend, path), True)
    return found if found.table else None


@lru_cache(maxsize=256)
def _warn_no_rules(device_type: str) -> None:
    warnings.warn(
        f"Neither torch nor the backend of {device_type!r} has a cast rule for any op: autocast on it "
        f"changes nothing. Pass policy=OpPolicy.uniform({device_type!r}), or let the backend's op_policy() "
        f"return one.",
        AmpWarning,
        stacklevel=7,  # the line that builds the region
    )


@lru_cache(maxsize=64)
def in_float32(policy: OpPolicy) -> OpPolicy:
    """Return `policy` as it is in a region whose dtype is float32."""
    low = [op for op, rule in policy.rules.items() if rule == r.LOWER_PRECISION_FP]
    return policy.override(dict.fromkeys(low, r.FP32), origin="dtype=torch.float32")


def emulation(policy: OpPolicy) -> Activation:
    """Return an activation that runs every rule of `policy` from Python, those that torch has too.

    For holding the engine against torch's native kernels: `amp_core.testing` and the tests do.
    """
    _require_autocast(policy.device_type)
    ops = {**dict.fromkeys(native_rules(policy.device_type), r.UNCHANGED), **policy.rules}
    return _numbered(policy, _runners(ops, policy.device_type), by_default=False)


def _prepared(policy: OpPolicy, by_default: bool) -> Activation:
    return _prepared_once(policy, tuple(policy.origins.items()), by_default)


@lru_cache(maxsize=256)
def _prepared_once(
    policy: OpPolicy,
    origins: tuple[tuple[str, str], ...],  # noqa: ARG001  # keeps equal policies apart: `record()` names places
    by_default: bool,
) -> Activation:
    return _numbered(policy, _runners(_changes(policy), policy.device_type), by_default=by_default)


def _numbered(policy: OpPolicy, table: Table, *, by_default: bool) -> Activation:
    with _lock:
        made = Activation(policy, table, len(_activations), by_default=by_default)
        _activations.append(made)
    return made


def _changes(policy: OpPolicy) -> dict[str, str]:
    """The ops that `policy` treats otherwise than torch, with their rules."""
    _require_autocast(policy.device_type)
    native = native_rules(policy.device_type)
    wanted = {op: policy.rules.get(op, r.UNCHANGED) for op in sorted({*native, *policy.rules})}
    return {op: rule for op, rule in wanted.items() if rule != native.get(op, r.UNCHANGED)}


def _require_autocast(device_type: str) -> None:
    if not has_dispatch_key(autocast_key(device_type)):
        raise PolicyError(f"torch has no autocast for device type {device_type!r}.")


def _runners(rules: Mapping[str, str], device_type: str) -> Table:
    return {op: _runner(op, rule, device_type) for op, rule in rules.items()}


def _runner(op: str, rule: str, device_type: str) -> Runner | None:
    if rule == r.NATIVE:
        return None
    overload = names.find(op)
    if overload is None:
        raise PolicyError(f"torch {torch.__version__} has no op {op!r} any more.")
    return make_runner(overload, rule, device_type)
