"""``amp policy --missing``: the heavy ops that no rule covers, or those that another device has rules for."""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch

from amp_core.cli.tables import wrapped
from amp_core.policy import OpPolicy
from amp_core.policy.coverage import missing
from amp_core.policy.names import short
from amp_core.policy.rules import UNCHANGED


def report(policy: OpPolicy, other: OpPolicy | None, *, as_json: bool) -> str:
    """Return the heavy ops without a rule in `policy`, by kind; or those that only `other` rules, by rule."""
    if other is None:
        kinds = missing(policy)
        summary = f"{len(kinds)} heavy ops have no rule for {policy.device_type} in torch {torch.__version__}"
        return _grouped(kinds, summary, as_json=as_json)
    rules = {op: rule for op, rule in sorted(other) if policy.rule(op) == UNCHANGED}
    mine, theirs = policy.device_type, other.device_type
    summary = f"{len(rules)} ops have a rule on {theirs} and none on {mine}"
    if rules:
        whole = f'OpPolicy("{mine}", OpPolicy.default("{theirs}").rules)'
        summary += f"\nop_policy() with all rules of {theirs}: {whole}"
    return _grouped(rules, summary, as_json=as_json)


def _grouped(groups: Mapping[str, str], summary: str, *, as_json: bool) -> str:
    if as_json:
        return json.dumps(groups, indent=2)
    rows: list[str] = []
    for group in sorted(set(groups.values())):
        names = [short(op) for op in groups if groups[op] == group]
        rows += [f"{group} ({len(names)})", *wrapped(names), ""]
    return "\n".join([*rows, summary])
