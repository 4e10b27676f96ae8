"""`OpPolicy`: which op runs in which dtype, as data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from os import PathLike
from types import MappingProxyType
from typing import Any

import torch

from amp_core._torch.dispatcher import autocast_key, has_dispatch_key, registered, value_for_dynamo
from amp_core.common.call_site import place_outside
from amp_core.common.op_lists import op_lists
from amp_core.errors import PolicyError
from amp_core.policy import names, tables, toml
from amp_core.policy import rules as r

OpName = Any
"""A string, or an op object: see `amp_core.policy.names.overloads`."""


@dataclass(frozen=True)
class Explanation:
    """Why one op runs as it does.

    Attributes:
        op: the full name of the overload.
        rule: a key of `amp_core.policy.RULES`.
        origin: who said so: the device's default, an override with its file and line, a file.
    """

    op: str
    rule: str
    origin: str

    def __str__(self) -> str:
        return f"{self.op}: {self.rule} ({self.origin}); {r.RULES[self.rule]}"


class Explanations(tuple[Explanation, ...]):
    """What `OpPolicy.explain` returns, one entry per overload; prints as lines."""

    __slots__ = ()

    def __str__(self) -> str:
        return "\n".join(map(str, self))

    __repr__ = __str__


class PolicyDiff(dict[str, tuple[str, str]]):
    """Full op name to (rule in the one, rule in the other); prints as lines."""

    def __str__(self) -> str:
        return "\n".join(f"{op}: {mine} -> {theirs}" for op, (mine, theirs) in self.items())

    __repr__ = __str__


@value_for_dynamo
class OpPolicy:
    """An immutable map from op to rule, for one device type.

    An op without a rule runs in the dtypes that it is given. Policies are equal if they
    do the same on the same device type; where the rules came from does not count.

    Args:
        device_type: such as ``"cuda"``.
        rules: op name to rule. A full name (``"aten::softmax.int"``, ``"aten::mm.default"``) means that
            overload; ``"softmax"``, ``"aten::softmax"`` or a glob mean all that autocast can see.
        origins: full op name to where its rule comes from; by default the caller's file and line.

    Raises:
        PolicyError: an op or rule is unknown, or the rule cannot apply to the op.
    """

    device_type: str
    rules: Mapping[str, str]
    origins: Mapping[str, str]

    # No frozen dataclass: Dynamo before torch 2.13 cannot hold one in a graph.
    def __init__(
        self,
        device_type: str,
        rules: Mapping[OpName, str] = MappingProxyType({}),
        origins: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        where = place_outside()
        resolved = _resolve(rules) if rules else {}
        told = {op: origins.get(op, where) for op in resolved}
        vars(self).update(
            device_type=device_type, rules=MappingProxyType(resolved), origins=MappingProxyType(told)
        )

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"An OpPolicy cannot be changed (you set {name!r}); make another: override().")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(
            f"An OpPolicy cannot be changed (you delete {name!r}); make another: override()."
        )

    # How to make one.

    @classmethod
    def default(cls, device_type: str) -> OpPolicy:
        """Return the rules that torch, or the device's own C++, compiled in for `device_type`.

        A device that has none gets `uniform`, which amp-core then installs from Python.
        """
        return cls.from_lists(device_type, op_lists(device_type))

    @classmethod
    def from_lists(cls, device_type: str, lists: tables.Lists) -> OpPolicy:
        """Return the policy of the native autocast kernels of `device_type`, whose rules `lists` names.

        An op that has a kernel but is in no list has the rule ``native``. A device without native kernels
        gets `uniform`.

        Args:
            device_type: such as ``"cuda"``.
            lists: rule to op names, separated by white space.
        """
        return _from_lists(device_type, tuple(lists.items()))

    @classmethod
    def uniform(cls, device_type: str) -> OpPolicy:
        """Return the policy that gives an op the same treatment on every device.

        It is torch's CUDA list, with what only the CPU list has in float32, promotion by
        `torch.promote_types`, index and scatter ops that match their destination, and a hint where torch
        bans ``binary_cross_entropy``.
        """
        return _uniform(device_type)

    @classmethod
    def float32(cls, device_type: str) -> OpPolicy:
        """Return the policy by which every op that `default` or `uniform` has a rule for runs in float32."""
        known = {**cls.default(device_type).rules, **cls.uniform(device_type).rules}
        kept = (r.FP32_SET_OPT_DTYPE, r.FP32_APPEND_DTYPE, r.MATCH_DESTINATION)
        rules = {op: rule if rule in kept else r.FP32 for op, rule in known.items() if rule != r.NATIVE}
        return cls._made(device_type, rules, "OpPolicy.float32")

    @classmethod
    def from_toml(cls, source: str | PathLike[str], device_type: str | None = None) -> OpPolicy:
        """Read what `to_toml` wrote, or a file written by hand (docs/reference/op-policy.md has the format).

        Args:
            source: a path, or the text itself (anything with a line break in it).
            device_type: for a file that names none.

        Raises:
            PolicyError: with file and line, for what is not TOML, unknown keys, ops or rules.
            OSError: the file cannot be read.
        """
        return toml.read(cls, source, device_type)

    @classmethod
    def _made(cls, device_type: str, rules: Mapping[str, str], origin: str) -> OpPolicy:
        """Make one from full names that are known to be right."""
        return cls(device_type, rules, dict.fromkeys(rules, origin))

    # How to change one.

    def override(self, changes: Mapping[OpName, str], *, origin: str | None = None) -> OpPolicy:
        """Return this policy with other rules for some ops.

        Args:
            changes: op to rule, as for the class. Later entries win over earlier ones.
            origin: what `explain` says of them; by default the caller's file and line.

        Raises:
            PolicyError: an op or rule is unknown, or the rule cannot apply to the op.
        """
        where = origin or f"override at {place_outside()}"
        new = _resolve(changes)
        return OpPolicy(
            self.device_type, {**self.rules, **new}, {**self.origins, **dict.fromkeys(new, where)}
        )

    def to_toml(self) -> str:
        """Return the policy as TOML: its difference from the device's default."""
        return toml.write(self)

    # What one says.

    def rule(self, op: OpName) -> str:
        """Return the rule of one op; `UNCHANGED` if it has none.

        Raises:
            PolicyError: the op is unknown, or its overloads have different rules.
        """
        found = {self.rules.get(names.full_name(o), r.UNCHANGED) for o in names.overloads(op)}
        ruled = found - {r.UNCHANGED} or found
        if len(ruled) > 1:
            raise PolicyError(f"The overloads of {op!r} have different rules; name one:\n{self.explain(op)}")
        return ruled.pop()

    def explain(self, op: OpName) -> Explanations:
        """Return the rule and its origin for every overload that `op` means.

        Raises:
            PolicyError: the op is unknown; the message offers near names.
        """
        return Explanations(self._explain(names.full_name(o)) for o in names.overloads(op))

    def _explain(self, op: str) -> Explanation:
        if op not in self.rules:
            return Explanation(op, r.UNCHANGED, f"{self.device_type} has no rule for it")
        return Explanation(op, self.rules[op], self.origins[op])

    def diff(self, other: OpPolicy) -> PolicyDiff:
        """Return the ops whose rule differs, as (rule here, rule there), sorted by name."""
        ops = sorted({*self.rules, *other.rules})
        pairs = ((op, self.rules.get(op, r.UNCHANGED), other.rules.get(op, r.UNCHANGED)) for op in ops)
        return PolicyDiff({op: (mine, theirs) for op, mine, theirs in pairs if mine != theirs})

    # As a value.

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(self.rules.items())

    def __len__(self) -> int:
        return len(self.rules)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, OpPolicy):
            return NotImplemented
        return self.device_type == other.device_type and self._ruled() == other._ruled()

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.device_type, frozenset(self._ruled().items())))

    def _ruled(self) -> dict[str, str]:
        """The ops that have a rule: to be told of `UNCHANGED` or of nothing is the same."""
        return {op: rule for op, rule in self.rules.items() if rule != r.UNCHANGED}

    def __repr__(self) -> str:
        return f"<OpPolicy for {self.device_type!r}: {len(self.rules)} rules>"

    def __reduce__(self) -> tuple[Any, ...]:
        return OpPolicy, (self.device_type, dict(self.rules), dict(self.origins))


@lru_cache(maxsize=32)
def _from_lists(device_type: str, lists: tuple[tuple[str, str], ...]) -> OpPolicy:
    native = _native_rules(device_type, lists)
    if not native:
        return _uniform(device_type)
    return OpPolicy._made(device_type, native, f"default of {device_type} in torch {torch.__version__}")


@lru_cache(maxsize=32)
def _uniform(device_type: str) -> OpPolicy:
    rules = {op: rule for op, rule in tables.flatten(tables.UNIFORM).items() if names.find(op) is not None}
    return OpPolicy._made(device_type, rules, "OpPolicy.uniform")


def native_rules(device_type: str) -> Mapping[str, str]:
    """Return full op name to rule for every op with a native kernel on the Autocast key of `device_type`.

    The rule is that of the device's op lists; for an op that they do not name (a newer torch, a device's own
    C++), `NATIVE`.
    """
    return _native_rules(device_type, tuple(op_lists(device_type).items()))


@lru_cache(maxsize=32)
def _native_rules(device_type: str, lists: tuple[tuple[str, str], ...]) -> Mapping[str, str]:
    key = autocast_key(device_type)
    if not has_dispatch_key(key):
        return {}
    known = tables.flatten(dict(lists))
    full = [n if "." in n.rpartition("::")[2] else f"{n}.default" for n in registered(key)]
    return {op: known.get(op, r.NATIVE) for op in sorted(full)}


def _resolve(changes: Mapping[OpName, str]) -> dict[str, str]:
    if not isinstance(changes, Mapping):
        raise PolicyError(f"Rules are a mapping from op to rule, not {type(changes).__name__}.")
    found: dict[str, str] = {}
    for op, rule in changes.items():
        found.update(dict.fromkeys(_applicable(op, rule), rule))
    return found


def _applicable(op: OpName, rule: str) -> list[str]:
    _check_rule(op, rule)
    overloads = names.overloads(op)
    reasons = {names.full_name(o): r.refusal(rule, o) for o in overloads}
    usable = [name for name, reason in reasons.items() if reason is None]
    if not usable:
        name, reason = next(iter(reasons.items()))
        raise PolicyError(f"The rule {rule!r} cannot apply to {name}: {reason}.")
    return usable


def _check_rule(op: OpName, rule: object) -> None:
    if rule in r.RULES:
        return
    import difflib

    near = difflib.get_close_matches(str(rule), r.RULES, n=2, cutoff=0.5)
    hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    raise PolicyError(f"Unknown rule {rule!r} for {op!r}: {hint}the rules are {', '.join(r.RULES)}.")
