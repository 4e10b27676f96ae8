"""``amp policy``: which op runs in which dtype, and why."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from amp_core.cli import UsageError
from amp_core.cli.tables import terminal_width, wrapped
from amp_core.common.text import counted

if TYPE_CHECKING:
    from amp_core.policy import Explanation, OpPolicy


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "policy", nargs="?", help="a device type, auto, or a policy file (.toml); default: cpu"
    )
    show = parser.add_mutually_exclusive_group()
    show.add_argument("--op", metavar="OP", help="show only this op: its rule and the rule's origin")
    show.add_argument(
        "--diff",
        nargs=2,
        metavar=("A", "B"),
        help="show the ops on which two policies (device types or files) differ",
    )
    parser.add_argument(
        "--uniform", action="store_true", help="use OpPolicy.uniform instead of the device's policy"
    )
    show.add_argument("--long", action="store_true", help="one line per op, with the origin of its rule")
    show.add_argument(
        "--missing", action="store_true", help="list the matrix products and reductions without a rule"
    )
    parser.add_argument(
        "--like",
        metavar="OTHER",
        help="with --missing: list the ops that only OTHER, a device or file, has rules for",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print the rules, one op, or a difference."""
    from amp_core import AmpError

    try:
        answer = _answer(args)
    except AmpError as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        raise UsageError(f"{error.filename} cannot be read: {error.strerror}.") from error
    print(answer)
    return 0


def _answer(args: argparse.Namespace) -> str:
    if args.like is not None and not args.missing:
        raise UsageError("--like OTHER needs --missing.")
    given = [name for name in (args.policy, args.like, *(args.diff or ())) if name is not None]
    if args.uniform and given and all(name.endswith(".toml") for name in given):
        raise UsageError("--uniform replaces the policy of a device type, and only files are given.")
    if args.diff is not None:
        if args.policy is not None:
            raise UsageError("--diff A B cannot be combined with another policy.")
        return _diff(*args.diff, uniform=args.uniform, as_json=args.json)
    name = "cpu" if args.policy is None else args.policy
    policy = _policy(name, args.uniform)
    if args.op is not None:
        answer = policy.explain(args.op)
        return _dump(map(_entry, answer)) if args.json else str(answer)
    if args.missing:
        if args.like is None:
            return _missing(policy, as_json=args.json)
        other = _policy(args.like, args.uniform)
        return _missing_beside(policy, name, other, args.like, uniform=args.uniform, as_json=args.json)
    lines = [policy.explain(op)[0] for op, _ in sorted(policy, key=lambda item: (item[1], item[0]))]
    if args.json:
        return _dump(map(_entry, lines))
    rows = _long(lines) if args.long else _by_rule(lines)
    return "\n".join(
        [*rows, f"{counted(len(lines), 'rule')}; an op without a rule runs in the dtypes that it is given"]
    )


def _policy(name: str, uniform: bool) -> OpPolicy:
    """Return the policy of a file, or of a device's backend with AMP_POLICY applied."""
    from amp_core import OpPolicy, get_backend
    from amp_core.common.arguments import device_type_of
    from amp_core.dispatch.activate import default_policy

    if name.endswith(".toml"):
        return OpPolicy.from_toml(name)
    backend = get_backend(device_type_of(name))
    return OpPolicy.uniform(backend.device_type) if uniform else default_policy(backend)


def _long(lines: list[Explanation]) -> list[str]:
    width = max((len(line.op) for line in lines), default=0)
    return [f"{line.op:{width}}  {line.rule:20}  {line.origin}" for line in lines]


def _by_rule(lines: list[Explanation]) -> list[str]:
    """Group the ops by rule and origin, in paragraphs that fit the terminal."""
    from amp_core.policy.names import short
    from amp_core.policy.rules import describe

    ops = defaultdict(list)
    for line in lines:
        ops[line.rule, line.origin].append(short(line.op))
    rows = []
    for (rule, origin), names in ops.items():
        title = f"{rule}: {describe(rule)} ({len(names)}; {origin})"
        rows += [*textwrap.wrap(title, terminal_width()), *wrapped(names), ""]
    return rows


def _missing(policy: OpPolicy, *, as_json: bool) -> str:
    """Return the heavy ops without a rule in `policy`, by kind."""
    import torch

    from amp_core.policy.coverage import missing

    kinds = missing(policy)
    heavy = counted(len(kinds), "heavy op has", "heavy ops have")
    summary = f"{heavy} no rule for {policy.device_type} in torch {torch.__version__}"
    return _grouped(kinds, summary, as_json=as_json)


def _missing_beside(
    policy: OpPolicy, name: str, other: OpPolicy, other_name: str, *, uniform: bool, as_json: bool
) -> str:
    """Return the ops that only `other` has a rule for, by rule."""
    from amp_core.policy.rules import UNCHANGED

    rules = {op: rule for op, rule in sorted(other) if policy.rule(op) == UNCHANGED}
    have = counted(len(rules), "op has", "ops have")
    summary = f"{have} a rule {_where(other, other_name)} and none {_where(policy, name)}"
    if rules:
        whole = f'OpPolicy("{policy.device_type}", {_in_python(other, other_name, uniform)}.rules)'
        summary += f"\nop_policy() with all rules {_where(other, other_name)}: {whole}"
    return _grouped(rules, summary, as_json=as_json)


def _in_python(policy: OpPolicy, name: str, uniform: bool) -> str:
    if name.endswith(".toml"):
        return f"OpPolicy.from_toml({name!r})"
    return f'OpPolicy.{"uniform" if uniform else "default"}("{policy.device_type}")'


def _where(policy: OpPolicy, name: str) -> str:
    return f"in {name}" if name.endswith(".toml") else f"on {policy.device_type}"


def _grouped(groups: Mapping[str, str], summary: str, *, as_json: bool) -> str:
    if as_json:
        return json.dumps(groups, indent=2)
    from amp_core.policy.names import short

    rows: list[str] = []
    for group in sorted(set(groups.values())):
        names = [short(op) for op in groups if groups[op] == group]
        rows += [f"{group} ({len(names)})", *wrapped(names), ""]
    return "\n".join([*rows, summary])


def _diff(a: str, b: str, *, uniform: bool, as_json: bool) -> str:
    differences = _policy(a, uniform).diff(_policy(b, uniform))
    if as_json:
        return _dump({"op": op, a: mine, b: theirs} for op, (mine, theirs) in differences.items())
    width = max((len(op) for op in differences), default=0)
    rows = [f"{op:{width}}  {mine:20}  {theirs}" for op, (mine, theirs) in differences.items()]
    return "\n".join([f"{'op':{width}}  {a:20}  {b}", *rows, counted(len(rows), "op differs", "ops differ")])


def _entry(line: Explanation) -> dict[str, str]:
    return {"op": line.op, "rule": line.rule, "origin": line.origin}


def _dump(entries: Iterable[dict[str, str]]) -> str:
    return json.dumps(list(entries), indent=2)
