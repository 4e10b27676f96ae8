"""Which op runs in which dtype, as data. The engine that puts it into force is `amp_core.dispatch`."""

from __future__ import annotations

from amp_core.policy.modules import AppliedPolicy, apply_policy
from amp_core.policy.op_policy import Explanation, Explanations, OpPolicy, PolicyDiff
from amp_core.policy.rules import RULES

__all__ = ["RULES", "AppliedPolicy", "Explanation", "Explanations", "OpPolicy", "PolicyDiff", "apply_policy"]
