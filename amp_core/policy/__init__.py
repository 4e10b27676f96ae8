"""Which op runs in which dtype, as data. `amp_core.dispatch` applies it."""

from __future__ import annotations

from amp_core.policy.explanations import Explanation, Explanations, PolicyDiff
from amp_core.policy.op_policy import OpPolicy
from amp_core.policy.rules import RULES

__all__ = ["RULES", "Explanation", "Explanations", "OpPolicy", "PolicyDiff"]
