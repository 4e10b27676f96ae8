"""The rules an op can have, and which rules each op accepts.

The first six are torch's and keep torch's names (``CastPolicy`` in ``ATen/autocast_mode.h``, 2.13). An
*eligible* tensor is a floating-point tensor on the region's device that is not float64.
"""

from __future__ import annotations

from amp_core._torch.dispatcher import Overload, arguments, overloads_of

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

RULES = {
    LOWER_PRECISION_FP: "cast eligible arguments to the dtype of the region",
    FP32: "cast eligible arguments to float32",
    FP32_SET_OPT_DTYPE: "pass dtype=float32, unless the caller passed a dtype or the first argument is not "
    "eligible",
    FP32_APPEND_DTYPE: "call the overload that takes a dtype, with float32",
    PROMOTE: "cast eligible arguments to float32 if one of them is float32, else to the dtype of the region; "
    "any third dtype is an error",
    BANNED: "raise an error",
    UNCHANGED: "no rule: the op runs in the dtypes that it is given, the ops that it is made of by theirs",
    NATIVE: "whatever kernel torch or the device's own C++ has",
    PROMOTE_TYPES: "cast eligible arguments to the dtype that torch.promote_types gives for all of them",
    MATCH_DESTINATION: "cast the other eligible arguments to the dtype of the first one, which is left alone",
    FP32_IF_MIXED: "cast eligible arguments to float32 if their dtypes differ, else leave them alone",
    FP32_WITH_HINT: "as fp32, and name once the more stable op to use instead",
}
"""Every rule and what it does. The first six are torch's; the others are amp-core's own."""


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
    wanted = [(a.name, _required(str(a.real_type))) for a in arguments(op)]
    for other in overloads_of(op.overloadpacket).values():
        *head, last = arguments(other) or [None]
        takes_dtype = last is not None and str(last.real_type) == "ScalarType"
        if takes_dtype and wanted == [(a.name, _required(str(a.real_type))) for a in head]:
            return other
    return None


def _required(type_name: str) -> str:
    if type_name.startswith("Optional["):
        return type_name[len("Optional[") : -1]
    return type_name


def refusal(rule: str, op: Overload) -> str | None:
    """Return why `op` cannot have `rule`; ``None`` if it can."""
    kinds = [str(a.real_type) for a in arguments(op)]
    if not any("Tensor" in kind for kind in kinds):
        return "it takes no tensor"
    if rule == FP32_SET_OPT_DTYPE and (dtype_argument(op) is None or kinds[0] != "Tensor"):
        return "it has no optional dtype argument after a first tensor"
    if rule == FP32_APPEND_DTYPE and (kinds[0] != "Tensor" or dtype_overload(op) is None):
        return "it has no overload that also takes a dtype"
    if rule == MATCH_DESTINATION and (kinds[0] != "Tensor" or sum("Tensor" in k for k in kinds) < 2):
        return "its first argument is not a tensor, or no other argument is"
    return None
