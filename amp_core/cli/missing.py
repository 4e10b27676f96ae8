"""``amp policy --missing``: the heavy ops that no rule covers."""

from __future__ import annotations

import json
from itertools import groupby

import torch

from amp_core.cli.tables import wrapped
from amp_core.policy import OpPolicy
from amp_core.policy.coverage import missing


def report(policy: OpPolicy, *, as_json: bool) -> str:
    """Return the ops by kind; as JSON, op to kind."""
    kinds = missing(policy)
    if as_json:
        return json.dumps(kinds, indent=2)
    rows: list[str] = []
    for kind, ops in groupby(kinds, key=kinds.__getitem__):
        names = [op.removeprefix("aten::").removesuffix(".default") for op in ops]
        rows += [f"{kind} ({len(names)})", *wrapped(names), ""]
    where = f"{policy.device_type} in torch {torch.__version__}"
    return "\n".join([*rows, f"{len(kinds)} heavy ops have no rule for {where}"])
