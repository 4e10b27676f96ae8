"""Turn a policy into an `Activation` that a region can push and pop."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Mapping
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

from amp_core._torch.op_kernels import POLICIES
from amp_core._torch.tracing import is_exporting
from amp_core.common import environment as _env
from amp_core.common.arguments import ANOTHER_COPY, is_of_another_copy
from amp_core.common.call_site import level_outside
from amp_core.common.locks import new_lock
from amp_core.common.text import counted, digest
from amp_core.dispatch import functions
from amp_core.dispatch.engine import Prepared, Table, ThreadState, engine
from amp_core.dispatch.runners import table_of
from amp_core.errors import AmpWarning, PolicyError
from amp_core.plugin import get_backend
from amp_core.plugin.interface import Backend
from amp_core.policy import OpPolicy, names
from amp_core.policy import rules as r
from amp_core.policy.changes import how_to_make_policy
from amp_core.policy.native_rules import native_rules
from amp_core.policy.recipes import OPS

if TYPE_CHECKING:
    from amp_core.formats import Recipe


class _Thread(threading.local):
    """For each push of this thread: the state that it changed, and what was in force there before."""

    def __init__(self) -> None:
        self.hidden: list[tuple[ThreadState, Prepared | None]] = []


_thread = _Thread()


class Activation:
    """A policy prepared for one device type. Each thread calls `push` and `pop` in pairs."""

    def __init__(self, policy: OpPolicy, table: Table, *, by_default: bool) -> None:
        self.policy = policy
        self.table = table
        wrapped = [*filter(names.is_function, policy.rules)]
        for name in wrapped:
            functions.wrap(name)
        self.has_functions = bool(wrapped)
        self.by_default = by_default
        self._engine = engine(policy.device_type)
        self._installed = False

    def push(self) -> None:
        """Put the policy in force in this thread.

        Raises:
            PolicyError: `torch.export` is tracing; the exported program could not keep the policy.
        """
        if is_exporting():
            raise PolicyError(_NO_EXPORT.format(policy=self.policy))
        if not self._installed:
            self._engine.keep(self.table)
            self._installed = True
        local = self._engine.local
        _thread.hidden.append((local, local.in_force))
        # A region without a policy keeps that of the surrounding region.
        if local.in_force is None or not self.by_default:
            local.in_force = self

    @cached_property
    def number(self) -> int:
        """Equal for activations that do the same, in every process; stands for them in compiled code."""
        rules = sorted(self.policy.rules.items())
        return _number(self.policy.device_type, rules, self.by_default, sorted(self.table))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Activation) and self.number == other.number

    def __hash__(self) -> int:
        return self.number

    def __reduce__(self) -> tuple[object, ...]:
        return _prepared, (self.policy, self.by_default)

    def __repr__(self) -> str:
        ops = counted(len(self.table), "op differs", "ops differ")
        return f"<Activation of {self.policy!r}, {ops} from native>"


def pushed() -> int:
    """Return how many policies this thread has pushed, for `restore`."""
    return len(_thread.hidden)


def restore(depth: int) -> None:
    """Pop this thread's policies until `depth` remain, even after an interrupted push or pop."""
    hidden = _thread.hidden
    while len(hidden) > max(depth, 0):
        local, before = hidden[-1]
        local.in_force = before
        hidden.pop()


def pop() -> None:
    """Undo the last push of this thread; never raises."""
    restore(pushed() - 1)


def take_out(depth: int) -> None:
    """Undo the push that found `depth` policies pushed before it; later ones stay in force."""
    hidden = _thread.hidden
    local, before = hidden.pop(depth)
    for index in range(depth, len(hidden)):
        if hidden[index][0] is local:
            hidden[index] = local, before
            return
    local.in_force = before


class RuleOverrides:
    """Context manager for rules that override whichever policy is in force then, as for a module glob.

    Args:
        device_type: the device type whose ops they apply to.
        rules: full op name to rule.
        origin: the origin that `OpPolicy.explain` reports for them.
    """

    def __init__(self, device_type: str, rules: Mapping[str, str], origin: str) -> None:
        self.device_type = device_type
        self.rules = rules
        self.origin = origin
        # Keyed by identity: equal policies can differ in their origins. Each entry keeps its policy alive.
        self._activations: dict[int, tuple[OpPolicy | None, Activation]] = {}
        self._lock = new_lock()

    def on(self, policy: OpPolicy) -> OpPolicy:
        """Return `policy` with the changes applied."""
        return policy.override(self.rules, origin=self.origin)

    def activated(self, policy: OpPolicy | None) -> Activation:
        """Return the activation of `policy`, or of the device's default, with the changes applied."""
        entry = self._activations.get(id(policy))
        if entry is None:
            under = default_policy(get_backend(self.device_type)) if policy is None else policy
            entry = policy, _prepared(self.on(under), False)
            with self._lock:
                self._activations[id(policy)] = entry
                if len(self._activations) > _POLICIES_PER_CHANGE:
                    self._activations.pop(next(iter(self._activations)), None)
        return entry[1]

    def push(self) -> None:
        """Put the changed policy in force in this thread."""
        self.activated(engine(self.device_type).policy).push()

    def __enter__(self) -> None:
        self.push()

    def __exit__(self, *_: object) -> None:
        pop()

    @cached_property
    def number(self) -> int:
        """Equal for overrides that do the same, in every process; stands for them in compiled code."""
        return _number(self.device_type, sorted(self.rules.items()))

    def __reduce__(self) -> tuple[object, ...]:
        return _unpickled, (self.device_type, dict(self.rules), self.origin)


def _unpickled(device_type: str, rules: Mapping[str, str], origin: str) -> RuleOverrides:
    return RuleOverrides(device_type, names.without_lost(rules), origin)


_POLICIES_PER_CHANGE = 16


def _number(*content: object) -> int:
    return int(digest(content)[:15], 16)


_NO_EXPORT = (
    "torch.export cannot keep {policy!r}: the exported program would compute by torch's own rules. Export "
    "what amp_core.materialize(model, args, policy=...) returns, which keeps one policy for the whole model, "
    "but no recipes: no exported program quantises. Remove those within the model first: policy= of a "
    "region, and op rules of modules, by remove() of what apply_policy returned."
)


def activation(backend: Backend, policy: OpPolicy | None) -> Activation | None:
    """Prepare `policy` for regions on `backend`.

    Args:
        backend: the backend of the region's device type.
        policy: a policy for that device type; None for the default, which is the backend's own as changed by
            the file that ``AMP_POLICY`` names.

    Returns:
        The activation to push and pop; None if the default equals the rules compiled into torch, so that
        regions cost nothing extra.

    Raises:
        PolicyError: `policy` is not an OpPolicy or is for another device type, or the file that
            ``AMP_POLICY`` names is invalid.
        TorchFeatureError: the installed torch no longer supports policies.
    """
    if policy is None:
        return _of_default(backend, _env.policy_path())
    POLICIES.require()
    engine(backend.device_type).add_rules()
    check_policy(policy)
    if policy.device_type != backend.device_type:
        raise PolicyError(
            f"{policy!r} cannot apply to a region on {backend.device_type!r}; start from "
            f"OpPolicy.default({backend.device_type!r})."
        )
    return _prepared(policy, False)


def _of_default(backend: Backend, path: str | None) -> Activation | None:
    if path is None and not POLICIES.works():  # torch's own rules still work
        if type(backend).op_policy is not Backend.op_policy:
            POLICIES.warn()
        return None
    engine(backend.device_type).add_rules()
    default = _default_activation(backend, path)
    if default is None and not native_rules(backend.device_type):
        _warn_no_rules(backend.device_type)
    return default


def check_policy(policy: object) -> None:
    """Raise PolicyError unless `policy` is one."""
    if not isinstance(policy, OpPolicy):
        other = is_of_another_copy(policy, OpPolicy)
        found = f"that of {ANOTHER_COPY}" if other else type(policy).__name__
        advice = "" if other else how_to_make_policy(policy)
        raise PolicyError(f"policy= must be an OpPolicy, not {found}.{advice}")


def default_policy(backend: Backend) -> OpPolicy:
    """Return the policy of regions that pass none: the backend's, as changed by the ``AMP_POLICY`` file.

    Raises:
        PolicyError: the file cannot be read or is invalid.
    """
    return _default_policy(backend, _env.policy_path())


def _default_policy(backend: Backend, path: str | None) -> OpPolicy:
    from amp_core.policy.toml import read_changes

    policy = backend.op_policy()
    if path is None:
        return policy
    try:
        return read_changes(path, policy)
    except OSError as error:
        raise PolicyError(
            f"{_env.POLICY} names {path}, which cannot be read: {error.strerror}. Correct it, or unset it."
        ) from error
    except PolicyError as error:
        raise PolicyError(f"{_env.POLICY}: {error}") from error


@lru_cache(maxsize=64)
def _default_activation(backend: Backend, path: str | None) -> Activation | None:
    default = _prepared(_default_policy(backend, path), True)
    return default if default.table or default.has_functions else None


@lru_cache(maxsize=256)
def _warn_no_rules(device_type: str) -> None:
    warnings.warn(
        f"Neither torch nor the backend of {device_type!r} has a cast rule for any op, so autocast has no "
        f"effect on this device. Pass policy=OpPolicy.uniform({device_type!r}), or return a policy from the "
        f"backend's op_policy().",
        AmpWarning,
        stacklevel=level_outside(),  # the line that builds the region
    )


@lru_cache(maxsize=64)
def with_recipe(policy: OpPolicy, recipe: Recipe, origin: str) -> OpPolicy:
    """Return `policy` with `recipe` for those matrix products that it runs in the dtype of the region.

    Raises:
        PolicyError: it runs some in this dtype only above a threshold.
    """
    for op in OPS:
        rule, _, size = policy.rules.get(op, "").partition(" above ")
        if size and rule == r.LOWER_PRECISION_FP:
            raise PolicyError(
                f"{origin} cannot quantise {names.short(op)}, which has the rule '{rule} above {size}': no "
                f"rule has a recipe for large calls and float32 for small ones. Give it {rule!r}, or a rule "
                f"such as 'recipe mxfp8 above {size}', which runs small calls in low precision."
            )
    low = [op for op in OPS if policy.rules.get(op) == r.LOWER_PRECISION_FP]
    return policy.override(dict.fromkeys(low, recipe), origin=origin)


def _prepared(policy: OpPolicy, by_default: bool) -> Activation:
    return _prepared_once(policy, policy._origins, by_default)


@lru_cache(maxsize=256)
def _prepared_once(
    policy: OpPolicy,
    origins: frozenset[tuple[str, str]],  # noqa: ARG001  # keeps equal policies apart: `record()` names places
    by_default: bool,
) -> Activation:
    return Activation(policy, table_of(policy), by_default=by_default)
