"""Calls of ``apex.amp``: their arguments, and what these become in torch.amp."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import libcst as cst

_ORDERS = {
    "initialize": (
        "models",
        "optimizers",
        "enabled",
        "opt_level",
        "cast_model_type",
        "patch_torch_functions",
    ),
    "scale_loss": ("loss", "optimizers", "loss_id", "model", "delay_unscale"),
    "master_params": ("optimizer",),
    "state_dict": (),
    "load_state_dict": ("state_dict",),
}
_WITHOUT_EFFECT = frozenset({"verbosity", "keep_batchnorm_fp32", "master_weights"})
_LIMITS = frozenset({"min_loss_scale", "max_loss_scale"})


class CannotFollowError(Exception):
    """Something at `node` keeps the file from being rewritten; the text says what."""

    def __init__(self, node: cst.CSTNode, reason: str) -> None:
        super().__init__(reason)
        self.node = node


def arguments(name: str, call: cst.Call) -> dict[str, cst.BaseExpression]:
    """Return what is passed to ``amp.name``, by parameter.

    Raises:
        CannotFollowError: `name` is not rewritten, or the call unpacks something.
    """
    if name not in _ORDERS:
        raise CannotFollowError(call, f"torch.amp has nothing like amp.{name}")
    given: dict[str, cst.BaseExpression] = {}
    for position, arg in enumerate(call.args):
        if arg.star or (arg.keyword is None and position >= len(_ORDERS[name])):
            raise CannotFollowError(call, f"what amp.{name} is passed here is known only at run time")
        given[arg.keyword.value if arg.keyword is not None else _ORDERS[name][position]] = arg.value
    return given


@dataclass
class Initialize:
    """``model, optimizer = amp.initialize(model, optimizer, ...)``.

    Attributes:
        line: the statement.
        model: the code of the model.
        optimizer: the code of the optimizer; "" where there is none.
        enabled: the code of what switches mixed precision on; "" for always, "False" for never.
        init_scale: the code of a fixed first scale, or "".
        notes: what the rewritten program does otherwise.
    """

    line: cst.SimpleStatementLine
    model: str
    optimizer: str = ""
    enabled: str = ""
    init_scale: str = ""
    notes: list[str] = field(default_factory=list)


def read_initialize(
    call: cst.Call, parents: Mapping[cst.CSTNode, cst.CSTNode], module: cst.Module
) -> Initialize:
    """Read the one call of ``amp.initialize``.

    Raises:
        CannotFollowError: it does what has no like in torch.amp.
    """
    given = arguments("initialize", call)
    assign = parents[call]
    line = parents[assign] if isinstance(assign, cst.Assign) else None
    if not (
        isinstance(assign, cst.Assign) and isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1
    ):
        raise CannotFollowError(
            call, "the result of amp.initialize is not assigned in a statement of its own"
        )
    passed = [module.code_for_node(given[key]) for key in ("models", "optimizers") if key in given]
    if len(assign.targets) != 1 or _names(assign.targets[0].target, module) != passed:
        raise CannotFollowError(call, "amp.initialize is not assigned to the names that it is passed")
    if any(isinstance(given.get(key), (cst.List, cst.Tuple)) for key in ("models", "optimizers")):
        raise CannotFollowError(call, "amp.initialize is passed several models or optimizers")
    result = Initialize(line, passed[0], passed[1] if len(passed) > 1 else "")
    _switch(result, call, given, module)
    _scale(result, given, module)
    rest = (
        given.keys()
        - {"models", "optimizers", "enabled", "opt_level", "loss_scale"}
        - _WITHOUT_EFFECT
        - _LIMITS
    )
    if rest:
        raise CannotFollowError(call, f"torch.amp has nothing like amp.initialize({min(rest)}=...)")
    return result


def _names(target: cst.BaseExpression, module: cst.Module) -> list[str]:
    elements = [e.value for e in target.elements] if isinstance(target, cst.Tuple) else [target]
    return [module.code_for_node(element) for element in elements]


def _switch(
    result: Initialize, call: cst.Call, given: Mapping[str, cst.BaseExpression], module: cst.Module
) -> None:
    level, enabled = given.get("opt_level"), given.get("enabled")
    terms = [f"({module.code_for_node(enabled)})"] if enabled is not None else []
    if level is not None and not isinstance(level, cst.SimpleString):
        code = module.code_for_node(level)
        terms.append(f'{code} != "O0"')
        result.notes.append(f"{code} only tells O0 from the rest now: O2 and O3 run as O1 does")
    elif level is not None and level.evaluated_value == "O0":
        terms = ["False"]
    elif level is not None and level.evaluated_value == "O2":
        result.notes.append(
            "O2 kept float16 weights beside float32 ones; now each use casts the float32 weight"
        )
    elif level is not None and level.evaluated_value != "O1":
        raise CannotFollowError(call, "O3 is no mixed precision: write model.half(), and no scaler")
    result.enabled = terms[0].strip("()") if len(terms) == 1 else " and ".join(terms)


def _scale(result: Initialize, given: Mapping[str, cst.BaseExpression], module: cst.Module) -> None:
    scale = given.get("loss_scale")
    code = module.code_for_node(scale).strip("\"'") if scale is not None else "dynamic"
    if isinstance(scale, (cst.Float, cst.Integer)):
        result.init_scale = code
        result.notes.append(f"the loss scale begins at {code} and moves: torch's scaler knows no fixed one")
    elif code not in {"dynamic", "None"}:
        result.notes.append(f"the loss scale is dynamic now: {code} is not read")
    if given.keys() & _LIMITS:
        result.notes.append(
            "torch's scaler has no lowest and highest scale (amp_core's LossScaleSchedule has)"
        )
