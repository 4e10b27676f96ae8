"""`OpPolicy`: which op runs in which dtype, as data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property, lru_cache
from os import PathLike
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from amp_core._torch.dispatcher import value_for_dynamo
from amp_core._torch.tracing import untraced
from amp_core.common.call_site import place_outside
from amp_core.common.op_lists import op_lists
from amp_core.common.text import counted
from amp_core.errors import PolicyError
from amp_core.policy import names, tables, toml
from amp_core.policy import rules as r
from amp_core.policy.changes import OpName, check_device_type, resolve
from amp_core.policy.explanations import Explanation, Explanations, PolicyDiff
from amp_core.policy.native_rules import added_rules, has_own_kernel, known_ops, native_rules_of

if TYPE_CHECKING:
    from amp_core.formats import Recipe


@value_for_dynamo
class OpPolicy:
    """An immutable mapping from op to rule, for one device type.

    An op without a rule runs in the dtypes of its inputs. Two policies are equal if they have the same
    effect on the same device type, wherever their rules came from.

    Args:
        device_type: a device type, such as ``"cuda"``.
        rules: op name to rule, or to a `Recipe`. A full name (``"aten::softmax.int"``,
            ``"aten::mm.default"``) selects one overload; ``"softmax"`` or ``"aten::softmax"`` selects every
            overload autocast can see; a glob those of all ops that neither write to an argument nor return
            a view of one. ``"mylib::op"`` and ``"package.module:Class"`` (an autograd function) need not be
            imported yet.
        origins: full op name to the place where its rule was set; defaults to the caller's file and line.

    Raises:
        PolicyError: `device_type` is no device type, an op or rule is unknown, or the rule cannot apply to
            the op.

    Example:
        >>> import amp_core
        >>> policy = amp_core.OpPolicy("cpu", {"mm": "lower_precision_fp"})
        >>> policy.rule("mm")
        'lower_precision_fp'
        >>> policy.rule("softmax")
        'unchanged'
    """

    device_type: str
    rules: Mapping[str, str]
    origins: Mapping[str, str]

    # Not a frozen dataclass: before torch 2.13, Dynamo cannot keep one in a graph.
    def __init__(
        self,
        device_type: str,
        rules: Mapping[OpName, str | Recipe] = MappingProxyType({}),
        origins: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        check_device_type(device_type)
        if not isinstance(origins, Mapping):
            raise PolicyError(f"Origins must be a mapping from op to text, not {type(origins).__name__}.")
        where = place_outside()
        resolved = resolve(rules)
        vars(self).update(
            device_type=device_type,
            rules=MappingProxyType(resolved),
            origins=MappingProxyType({op: origins.get(op, where) for op in resolved}),
        )

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(
            f"An OpPolicy is immutable: {name!r} cannot be set. Call override() to get a changed copy."
        )

    def __delattr__(self, name: str) -> None:
        raise AttributeError(
            f"An OpPolicy is immutable: {name!r} cannot be deleted. Call override() to get a changed copy."
        )

    # Constructors.

    @classmethod
    @untraced
    def default(cls, device_type: str) -> OpPolicy:
        """Return the rules compiled into torch, or into the device's own C++, for `device_type`.

        amp-core adds a rule for ``_grouped_mm``, which torch leaves in float32.

        A device without compiled-in rules gets `uniform`, which amp-core installs from Python.

        Args:
            device_type: a device type, such as ``"cuda"``.

        Returns:
            The policy of a region that passes none.

        Raises:
            BackendNotFoundError: no backend serves the device type, so that its rules are not known.
            PolicyError: `device_type` is no device type.

        Example:
            >>> import amp_core
            >>> amp_core.OpPolicy.default("cpu").rule("mm")
            'lower_precision_fp'
        """
        check_device_type(device_type)
        return cls.from_lists(device_type, op_lists(device_type))

    @classmethod
    @untraced
    def from_lists(cls, device_type: str, lists: tables.Lists) -> OpPolicy:
        """Return the policy of `device_type`'s native autocast kernels, given the rules they implement.

        An op that has a native kernel but appears in no list gets the rule ``native``. An op that this torch
        does not have is left out, as lists serve several versions. A device without native kernels gets
        `uniform`.

        Args:
            device_type: a device type, such as ``"cuda"``.
            lists: rule to op names, separated by whitespace.

        Raises:
            PolicyError: `device_type` is no device type, or a rule is unknown.
        """
        check_device_type(device_type)
        if not isinstance(lists, Mapping):
            raise PolicyError(f"Op lists must be a mapping from rule to ops, not {type(lists).__name__}.")
        for rule, ops in lists.items():
            if not isinstance(ops, str):
                raise PolicyError(f"The ops of rule {rule!r} must be a text of names, not {ops!r}.")
        return _from_lists(device_type, tuple(lists.items()))

    @classmethod
    @untraced
    def uniform(cls, device_type: str) -> OpPolicy:
        """Return the policy that treats each op the same way on every device.

        It is the list that torch's accelerators share, with changes: it adds ops that only the CPU list runs
        in float32, and runs recurrent layers in low precision as a whole. It promotes by
        `torch.promote_types`, also in ``cat`` and ``stack``, casts the inputs of index and scatter ops to the
        dtype of their destination, and gives a hint where torch bans ``binary_cross_entropy``.

        Args:
            device_type: a device type, such as ``"cuda"``.

        Raises:
            PolicyError: `device_type` is no device type.
        """
        check_device_type(device_type)
        return _uniform(device_type)

    @classmethod
    @untraced
    def float32(cls, device_type: str) -> OpPolicy:
        """Return the policy that runs in float32 every op with a rule in `default` or `uniform`.

        Args:
            device_type: a device type, such as ``"cuda"``.

        Raises:
            PolicyError: `device_type` is no device type.
            BackendNotFoundError: no backend serves it.

        Example:
            >>> import amp_core
            >>> amp_core.OpPolicy.float32("cpu").rule("mm")
            'fp32'
        """
        known = {**cls.default(device_type).rules, **cls.uniform(device_type).rules}
        kept = (r.FP32_SET_OPT_DTYPE, r.FP32_APPEND_DTYPE, r.MATCH_DESTINATION)
        rules = {op: rule if rule in kept else r.FP32 for op, rule in known.items()}
        rules |= {op: r.UNCHANGED for op, rule in known.items() if rule == r.NATIVE}
        return cls._from_full_names(device_type, rules, "OpPolicy.float32")

    @classmethod
    @untraced
    def from_toml(cls, source: str | PathLike[str], device_type: str | None = None) -> OpPolicy:
        """Read a policy from TOML (docs/reference/op-policy.md describes the format).

        Args:
            source: a path, or the TOML text itself (any string that contains a line break).
            device_type: the device type to use if the file does not name one.

        Raises:
            PolicyError: the text is not TOML, or has unknown keys, ops or rules; the message gives file and
                line. Or `device_type` is no device type, or another than the file's.
            OSError: the file cannot be read.
            TypeError: `source` is no path or string.
        """
        return toml.policy_of(cls, *toml.parsed(source), device_type)

    @classmethod
    def _from_full_names(cls, device_type: str, rules: Mapping[str, str], origin: str) -> OpPolicy:
        """Return a policy of valid full op names whose rules all have the same origin."""
        return cls(device_type, rules, dict.fromkeys(rules, origin))

    # Changed copies and TOML.

    @untraced
    def override(self, changes: Mapping[OpName, str | Recipe], *, origin: str | None = None) -> OpPolicy:
        """Return a copy of this policy with different rules for some ops.

        Args:
            changes: op to rule, as for the class. Later entries take precedence. A rule may also be a
                `Recipe`, for ops that are one matrix product.
            origin: the origin that `explain` reports for these rules; defaults to the caller's file and line.

        Returns:
            The new policy; this one does not change.

        Raises:
            PolicyError: an op or rule is unknown, or the rule cannot apply to the op.
            TypeError: `origin` is no string.

        Example:
            >>> import amp_core
            >>> policy = amp_core.OpPolicy.default("cpu").override({"mm": "fp32"})
            >>> policy.rule("mm")
            'fp32'
        """
        if not isinstance(origin, str | None):
            raise TypeError(f"origin= must be a text, not {origin!r}.")
        where = origin or f"override at {place_outside()}"
        new = resolve(changes)
        changed = OpPolicy(self.device_type)
        vars(changed).update(  # without checking the rules of this one again, which takes 10 ms
            rules=MappingProxyType({**self.rules, **new}),
            origins=MappingProxyType({**self.origins, **dict.fromkeys(new, where)}),
        )
        return changed

    @untraced
    def to_toml(self) -> str:
        """Return the policy as TOML: its differences from the device's default.

        Returns:
            Text that `from_toml` reads; TOML files are UTF-8 on every system.

        Raises:
            PolicyError: a recipe has an element format of your own, which a file cannot hold.

        Example::

            text = OpPolicy("cpu").override({"linear": "fp32"}).to_toml()
            path.write_text(text, encoding="utf-8")
            policy = OpPolicy.from_toml(path)
        """
        return toml.write(self)

    # Queries.

    def rule(self, op: OpName) -> str:
        """Return the rule of one op.

        Args:
            op: an op name or op object, as for the class.

        Returns:
            The rule; ``"unchanged"`` if the op has none.

        Raises:
            PolicyError: the op is unknown, or its overloads have different rules.
        """
        rules = {self._explain(name).rule for name in names.full_names(op)}
        explicit = rules - {r.UNCHANGED} or rules
        if len(explicit) > 1:
            raise PolicyError(f"The overloads of {op!r} have different rules; name one:\n{self.explain(op)}")
        return explicit.pop()

    @untraced
    def explain(self, op: OpName) -> Explanations:
        """Return the rule of every overload that `op` selects, and where that rule was set.

        Args:
            op: an op name or op object, as for the class.

        Returns:
            One `Explanation` per overload.

        Raises:
            PolicyError: the op is unknown; the message suggests similar names.

        Example:
            >>> import amp_core
            >>> policy = amp_core.OpPolicy("cpu").override({"mm": "fp32"}, origin="experiment 3")
            >>> policy.explain("aten::mm.default")
            aten::mm.default: fp32 (experiment 3); cast eligible arguments to float32
        """
        return Explanations(map(self._explain, names.full_names(op)))

    def _explain(self, op: str) -> Explanation:
        if op not in self.rules and has_own_kernel(op, self.device_type):
            return Explanation(op, r.unstated(op), "by the package of the op")
        if op not in self.rules:
            return Explanation(op, r.UNCHANGED, f"{self.device_type} has no rule for it")
        return Explanation(op, self.rules[op], self.origins[op])

    @untraced
    def diff(self, other: OpPolicy) -> PolicyDiff:
        """Compare this policy with another.

        Args:
            other: the policy to compare with.

        Returns:
            Each op whose rule differs, mapped to (rule here, rule in `other`), sorted by name.

        Raises:
            TypeError: `other` is no policy.

        Example:
            >>> import amp_core
            >>> default = amp_core.OpPolicy.default("cpu")
            >>> default.diff(default.override({"aten::mm.default": "fp32"}))
            aten::mm.default: lower_precision_fp -> fp32
        """
        if not isinstance(other, OpPolicy):
            raise TypeError(f"diff() compares with another OpPolicy, not with {other!r}.")
        ops = sorted({*self.rules, *other.rules})
        pairs = ((op, self.rules.get(op, r.unstated(op)), other.rules.get(op, r.unstated(op))) for op in ops)
        return PolicyDiff({op: (mine, theirs) for op, mine, theirs in pairs if mine != theirs})

    # Mapping, equality, pickling.

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

    @cached_property
    def _origins(self) -> frozenset[tuple[str, str]]:
        """The origins as a value that keeps its hash, unlike a mapping."""
        return frozenset(self.origins.items())

    def _ruled(self) -> dict[str, str]:
        """Return the ops with a rule; one that says what holds without it equals none."""
        return {op: rule for op, rule in self.rules.items() if rule != r.unstated(op)}

    def __repr__(self) -> str:
        return f"<OpPolicy for {self.device_type!r}: {counted(len(self.rules), 'rule')}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (self.device_type, dict(self.rules), dict(self.origins))


def _unpickled(device_type: str, rules: Mapping[str, str], origins: Mapping[str, str]) -> OpPolicy:
    return OpPolicy(device_type, names.without_lost(rules), origins)


@lru_cache(maxsize=32)
def _from_lists(device_type: str, lists: tuple[tuple[str, str], ...]) -> OpPolicy:
    native = native_rules_of(device_type, lists)
    if not native:
        return _uniform(device_type)
    origin = f"default of {device_type} in torch {torch.__version__}"
    added = added_rules(device_type)
    origins = {**dict.fromkeys(native, origin), **dict.fromkeys(added, "amp-core: torch has no rule for it")}
    return OpPolicy(device_type, {**native, **added}, origins)


@lru_cache(maxsize=32)
def _uniform(device_type: str) -> OpPolicy:
    return OpPolicy._from_full_names(device_type, known_ops(tables.UNIFORM), "OpPolicy.uniform")
