"""``amp policy``: which op runs in which dtype, and why."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from typing import TYPE_CHECKING

from amp_core.cli import UsageError

if TYPE_CHECKING:
    from amp_core.policy import Explanation, OpPolicy

HELP = "show which op runs in which dtype on a device, and why"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("policy", nargs="?", help="a device type, or a policy file (.toml); default: cpu")
    parser.add_argument("--op", metavar="OP", help="one op only: its rule and where the rule comes from")
    parser.add_argument(
        "--diff",
        nargs=2,
        metavar=("A", "B"),
        help="the ops that two policies (device types or files) differ in",
    )
    parser.add_argument("--uniform", action="store_true", help="OpPolicy.uniform instead of the device's own")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print what was asked for."""
    from amp_core import AmpError

    try:
        print(_answer(args))
    except (AmpError, OSError) as error:
        raise UsageError(str(error)) from error
    return 0


def _answer(args: argparse.Namespace) -> str:
    if args.diff is not None:
        if args.policy is not None or args.op is not None:
            raise UsageError("--diff A B takes no other policy and no --op.")
        return _diff(*args.diff, uniform=args.uniform, as_json=args.json)
    policy = _policy(args.policy or "cpu", args.uniform)
    if args.op is not None:
        lines = policy.explain(args.op)
        return _dump(map(_entry, lines)) if args.json else str(lines)
    return _table(policy, as_json=args.json)


def _policy(name: str, uniform: bool) -> OpPolicy:
    """The policy that `name` means: that of a device's backend, changed by AMP_POLICY, or that of a file."""
    from amp_core import OpPolicy, get_backend
    from amp_core.dispatch.activate import default_policy

    if name.endswith(".toml"):
        return OpPolicy.from_toml(name)
    backend = get_backend(name)
    return OpPolicy.uniform(backend.device_type) if uniform else default_policy(backend)


def _table(policy: OpPolicy, *, as_json: bool) -> str:
    lines = [policy.explain(op)[0] for op, _ in sorted(policy, key=lambda item: (item[1], item[0]))]
    if as_json:
        return _dump(map(_entry, lines))
    width = max((len(line.op) for line in lines), default=0)
    rows = [f"{line.op:{width}}  {line.rule:20}  {line.origin}" for line in lines]
    return "\n".join([*rows, f"{len(rows)} rules; an op without a rule runs in the dtypes that it is given"])


def _diff(a: str, b: str, *, uniform: bool, as_json: bool) -> str:
    found = _policy(a, uniform).diff(_policy(b, uniform))
    if as_json:
        return _dump({"op": op, a: mine, b: theirs} for op, (mine, theirs) in found.items())
    width = max((len(op) for op in found), default=0)
    rows = [f"{op:{width}}  {mine:20}  {theirs}" for op, (mine, theirs) in found.items()]
    return "\n".join([f"{'op':{width}}  {a:20}  {b}", *rows, f"{len(rows)} ops differ"])


def _entry(line: Explanation) -> dict[str, str]:
    return {"op": line.op, "rule": line.rule, "origin": line.origin}


def _dump(entries: Iterable[dict[str, str]]) -> str:
    return json.dumps(list(entries), indent=2)
