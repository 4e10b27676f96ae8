"""From a policy to something that a region can push and pop."""

from __future__ import annotations

import threading
import warnings
from functools import lru_cache

import torch

from amp_core import _env
from amp_core._torch_dispatch import (
    autocast_key,
    constant_for_dynamo,
    has_dispatch_key,
    mark_graph_functions,
)
from amp_core.dispatch.casting import Runner, make_runner
from amp_core.dispatch.engine import Table, engine
from amp_core.errors import AmpWarning, PolicyError
from amp_core.plugin.interface import Backend
from amp_core.policy import OpPolicy, names
from amp_core.policy import rules as r
from amp_core.policy.op_policy import native_rules


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
        if torch.compiler.is_dynamo_compiling():
            _admit_to_graphs()
        push_policy(self.handle)

    def pop(self) -> None:
        """Take it off again; never raises."""
        if torch.compiler.is_dynamo_compiling():
            _admit_to_graphs()
        pop_policy(self.handle)

    def __reduce__(self) -> tuple[object, ...]:
        return _prepared, (self.policy, self.by_default)

    def __repr__(self) -> str:
        return f"<Activation of {self.policy!r}, {len(self.table)} ops differ from native>"


_activations: list[Activation] = []
_lock = threading.Lock()


def push_policy(handle: int) -> None:
    """Push the activation number `handle`; a plain function of an int, so that a graph can hold the call."""
    active = _activations[handle]
    if torch.compiler.is_exporting():
        raise PolicyError(_NO_EXPORT.format(policy=active.policy))
    here = engine(active.policy.device_type)
    # A region that names no policy keeps that of the region around it, as it keeps its dtype.
    here.push(here.table if active.by_default and here.depth else active.table)


def pop_policy(handle: int) -> None:
    """Pop what `push_policy` pushed."""
    engine(_activations[handle].policy.device_type).pop()


@constant_for_dynamo
def _admit_to_graphs() -> None:
    mark_graph_functions((push_policy, pop_policy))


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


@lru_cache(maxsize=64)
def _default_activation(backend: Backend, path: str | None) -> Activation | None:
    from amp_core.policy.toml import read_changes

    policy = backend.op_policy()
    if path is not None:
        policy = read_changes(path, policy)
    found = _prepared(policy, True)
    return found if found.table else None


@lru_cache(maxsize=256)
def _warn_no_rules(device_type: str) -> None:
    warnings.warn(
        f"Neither torch nor the backend of {device_type!r} has a cast rule for any op: autocast on it "
        f"changes nothing. Pass policy=OpPolicy.uniform({device_type!r}), or let the backend's op_policy() "
        f"return one.",
        AmpWarning,
        stacklevel=5,
    )


@lru_cache(maxsize=256)
def _prepared(policy: OpPolicy, by_default: bool) -> Activation:
    table = _table(policy)
    with _lock:
        made = Activation(policy, table, len(_activations), by_default=by_default)
        _activations.append(made)
    return made


def _table(policy: OpPolicy) -> Table:
    if not has_dispatch_key(autocast_key(policy.device_type)):
        raise PolicyError(f"torch has no autocast for device type {policy.device_type!r}.")
    native = native_rules(policy.device_type)
    ops = {*native, *policy.rules}
    pairs = {op: policy.rules.get(op, r.UNCHANGED) for op in sorted(ops)}
    changed = {op: rule for op, rule in pairs.items() if rule != native.get(op, r.UNCHANGED)}
    return {op: _runner(op, rule, policy.device_type) for op, rule in changed.items() if rule != r.NATIVE}


def _runner(op: str, rule: str, device_type: str) -> Runner:
    overload = names.find(op)
    if overload is None:
        raise PolicyError(f"torch {torch.__version__} has no op {op!r} any more.")
    return make_runner(overload, rule, device_type)
