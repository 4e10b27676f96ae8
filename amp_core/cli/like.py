"""``amp policy DEVICE --missing --like OTHER``: the rules of another device that a device lacks."""

from __future__ import annotations

import json

from amp_core.cli.tables import wrapped
from amp_core.policy import OpPolicy
from amp_core.policy.rules import UNCHANGED


def report(policy: OpPolicy, other: OpPolicy, *, as_json: bool) -> str:
    """Return the ops that have a rule in `other` alone, by that rule, and the line that takes them over."""
    ops = {op: rule for op, rule in sorted(other) if policy.rule(op) == UNCHANGED}
    if as_json:
        return json.dumps(ops, indent=2)
    rows: list[str] = []
    for rule in sorted(set(ops.values())):
        names = [op.removeprefix("aten::").removesuffix(".default") for op in ops if ops[op] == rule]
        rows += [f"{rule} ({len(names)})", *wrapped(names), ""]
    mine, theirs = policy.device_type, other.device_type
    rows.append(f"{len(ops)} ops have a rule on {theirs} and none on {mine}")
    if ops:
        rows.append(
            f'op_policy() with all rules of {theirs}: OpPolicy("{mine}", OpPolicy.default("{theirs}").rules)'
        )
    return "\n".join(rows)
