"""The rules an op can have, and which rules each op accepts.

The first six are torch's and keep torch's names (``CastPolicy`` in ``ATen/autocast_mode.h``, 2.13). An
*eligible* tensor is a floating-point tensor on the region's device that is not float64.
"""

from __future__ import annotations

import functools
import re
from typing import Any

from amp_core._torch.dispatcher import Overload, arguments, dispatcher_name, overloads_of
from amp_core.policy import recipes

LOWER_PRECISION_FP = "lower_precision_fp"
FP32 = "fp32"
FP32_SET_OPT_DTYPE = "fp32_set_opt_dtype"
FP32_APPEND_DTYPE = "fp32_append_dtype"
PROMOTE = "promote"
BANNED = "banned"
UNCHANGED = "unchanged"
NATIVE = "native"
PROMOTE_TYPES = "promote_types"
MATCH_DESTINATION = "match_destination"
FP32_IF_MIXED = "fp32_if_mixed"
FP32_WITH_HINT = "fp32_with_hint"
LOW_IN_FP32_OUT = "low_in_fp32_out"

RULES = {
    LOWER_PRECISION_FP: "cast eligible arguments to the dtype of the region",
    FP32: "cast eligible arguments to float32",
    FP32_SET_OPT_DTYPE: "pass dtype=float32, unless the caller passed a dtype or the first argument is not "
    "eligible",
    FP32_APPEND_DTYPE: "call the overload that takes a dtype, with float32",
    PROMOTE: "cast eligible arguments to float32 if one of them is float32, else to the dtype of the region; "
    "any third dtype is an error",
    BANNED: "raise an error",
    UNCHANGED: "keep the dtypes of the arguments; the ops that it is made of have their own rules",
    NATIVE: "whatever kernel torch or the device's own C++ has",
    PROMOTE_TYPES: "cast eligible arguments to the dtype that torch.promote_types gives for all of them",
    MATCH_DESTINATION: "cast the other eligible arguments to the dtype of the first one, which is left alone",
    FP32_IF_MIXED: "cast eligible arguments to float32 if their dtypes differ, else leave them alone",
    FP32_WITH_HINT: "as fp32, and name once the more stable op to use instead",
    LOW_IN_FP32_OUT: "round eligible arguments to the dtype of the region, compute and return float32",
}
"""Every rule and what it does. The first six are torch's; the others are amp-core's own.

``"lower_precision_fp above 8 MFLOP"`` is `LOWER_PRECISION_FP` for calls with more work than that, estimated
from their shapes, and `FP32` for smaller ones. The units are FLOP, kFLOP, MFLOP, GFLOP and TFLOP.

``"recipe mxfp8"`` quantises the operands of a matrix product (`amp_core.policy.recipes.RecipeRule`); small
calls run under `LOWER_PRECISION_FP` if it has a threshold.
"""


def unstated(op: str) -> str:
    """Return the rule of an op that a policy does not name, by its full name.

    Another package may give its op an autocast kernel at any time, which then stays.
    """
    return NATIVE if "::" in op and not op.startswith("aten::") else UNCHANGED


_THRESHOLD = re.compile(rf"(?:{LOWER_PRECISION_FP}|recipe \S+) above ([0-9]+(?:\.[0-9]+)?) ([kMGT]?)FLOP")
_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


@functools.cache
def threshold(rule: str) -> float | None:
    """Return the work above which ``"lower_precision_fp above 8 MFLOP"`` or a recipe applies; else None."""
    match = _THRESHOLD.fullmatch(rule)
    return None if match is None else float(match[1]) * _UNITS[match[2]]


def above(flop: float) -> str:
    """Return the rule that casts calls with more work than `flop` to the dtype of the region."""
    return f"{LOWER_PRECISION_FP} above {as_work(flop)}"


def as_work(flop: float) -> str:
    """Format a number of floating-point operations: ``8.4 MFLOP``."""
    unit = next((u for u in "TGMk" if flop >= _UNITS[u]), "")
    number = flop / _UNITS[unit]
    return f"{number:{'.0f' if number > 9999 else '.4g'}} {unit}FLOP"  # rules have no exponents


def is_known(rule: object) -> bool:
    """Return whether `rule` is a key of `RULES`, one with a threshold, or that of a recipe."""
    if isinstance(rule, recipes.RecipeRule):
        return not rule.size or threshold(rule) is not None
    return isinstance(rule, str) and (rule in RULES or threshold(rule) is not None)


def lowers(rule: str | None) -> bool:
    """Return whether an op with `rule` runs in the region's dtype or lower, if only above a threshold."""
    if rule is None:
        return False
    return rule == LOWER_PRECISION_FP or threshold(rule) is not None or recipes.recipe_of(rule) is not None


def describe(rule: str) -> str:
    """Say what a rule does."""
    low, size = RULES[LOWER_PRECISION_FP], rule.partition(" above ")[2]
    recipe = recipes.recipe_of(rule)
    if recipe is not None:
        limit = f"; calls with at most {size} of work are not quantised" if size else ""
        return f"{low}, then quantise the operands of all three products: {recipes.describe(recipe)}{limit}"
    if threshold(rule) is None:
        return RULES[rule]
    return f"{low} if the call has more work than {size}, else to float32"


def dtype_argument(op: Overload) -> tuple[int, str, bool] | None:
    """Return the position, name and keyword-only flag of the ``ScalarType? dtype`` argument, if any."""
    for index, argument in enumerate(arguments(op)):
        if str(argument.real_type) == "Optional[ScalarType]":
            return index, argument.name, argument.kwarg_only
    return None


def dtype_overload(op: Overload) -> Overload | None:
    """Return the overload that takes `op`'s arguments followed by a dtype, if there is one.

    ``norm.Scalar(self, p)`` has ``norm.ScalarOpt_dtype(self, p, *, dtype)``, where ``p`` is optional too.
    """
    wanted = [*map(_required, arguments(op))]
    for other in overloads_of(op.overloadpacket).values():
        *head, last = arguments(other) or [None]
        takes_dtype = last is not None and str(last.real_type) == "ScalarType"
        if takes_dtype and wanted == [*map(_required, head)]:
            return other
    return None


def _required(argument: Any) -> tuple[str, str]:
    """Return the name of an argument, and its type when it is given."""
    return argument.name, re.sub(r"^Optional\[(.*)\]$", r"\1", str(argument.real_type))


FOR_FUNCTIONS = (LOWER_PRECISION_FP, FP32, LOW_IN_FP32_OUT, UNCHANGED)
"""The rules that a ``torch.autograd.Function`` can have."""


def refusal(rule: str, op: Overload) -> str | None:
    """Return why `op` cannot have `rule`; ``None`` if it can."""
    kinds = [str(a.real_type) for a in arguments(op)]
    if not any("Tensor" in kind for kind in kinds):
        return "it takes no tensor"
    if dispatcher_name(op) == "aten::detach":
        return "torch calls it to make tensors of another class, which a kernel in Python would break"
    if rule == FP32_SET_OPT_DTYPE and (dtype_argument(op) is None or kinds[0] != "Tensor"):
        return "it has no optional dtype argument after a first tensor"
    if rule == FP32_APPEND_DTYPE and (kinds[0] != "Tensor" or dtype_overload(op) is None):
        return "it has no overload that also takes a dtype"
    if rule == MATCH_DESTINATION and (kinds[0] != "Tensor" or sum("Tensor" in k for k in kinds) < 2):
        return "its first argument is not a tensor, or no other argument is"
    return None
