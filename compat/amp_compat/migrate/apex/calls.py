"""Parse the arguments of ``apex.amp`` calls and map them to torch.amp."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import libcst as cst

from amp_compat.migrate.model import Level
from amp_compat.migrate.tree import Parents

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


ApexFinding = tuple[cst.CSTNode, Level, str, str]
"""A node, and the rest of its `Finding`."""


class CannotFollowError(Exception):
    """The code at `node` prevents the rewrite; the message says why."""

    def __init__(self, node: cst.CSTNode, reason: str) -> None:
        super().__init__(reason)
        self.node = node


def arguments(name: str, call: cst.Call) -> dict[str, cst.BaseExpression]:
    """Return the arguments of a call to ``amp.name``, keyed by parameter.

    Raises:
        CannotFollowError: `name` is not supported, or the call unpacks arguments.
    """
    if name not in _ORDERS:
        raise CannotFollowError(call, f"torch.amp has no equivalent of amp.{name}")
    given: dict[str, cst.BaseExpression] = {}
    for position, arg in enumerate(call.args):
        if arg.star or (arg.keyword is None and position >= len(_ORDERS[name])):
            raise CannotFollowError(call, f"the arguments of this amp.{name} call are known only at run time")
        given[arg.keyword.value if arg.keyword is not None else _ORDERS[name][position]] = arg.value
    return given


@dataclass
class Initialize:
    """``model, optimizer = amp.initialize(model, optimizer, ...)``.

    Attributes:
        line: the statement.
        model: source code of the model argument.
        optimizer: source code of the optimizer argument; "" if there is none.
        enabled: source code of the condition that enables mixed precision; "" for always, "False" for never.
        init_scale: source code of a fixed loss scale, or "".
        notes: differences in behavior after the rewrite.
    """

    line: cst.SimpleStatementLine
    model: str
    optimizer: str = ""
    enabled: str = ""
    init_scale: str = ""
    notes: list[str] = field(default_factory=list)


def read_initialize(call: cst.Call, parents: Parents, module: cst.Module) -> Initialize:
    """Parse the only ``amp.initialize`` call.

    Raises:
        CannotFollowError: torch.amp has no equivalent of the call.
    """
    given = arguments("initialize", call)
    assign = parents[call]
    line = parents[assign] if isinstance(assign, cst.Assign) else None
    if not (
        isinstance(assign, cst.Assign) and isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1
    ):
        raise CannotFollowError(call, "the result of amp.initialize must be assigned in a separate statement")
    passed = [module.code_for_node(given[key]) for key in ("models", "optimizers") if key in given]
    if len(assign.targets) != 1 or _names(assign.targets[0].target, module) != passed:
        raise CannotFollowError(call, "amp.initialize must be assigned to the same names as its arguments")
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
        raise CannotFollowError(call, f"torch.amp has no equivalent of amp.initialize({min(rest)}=...)")
    return result


def _names(target: cst.BaseExpression, module: cst.Module) -> list[str]:
    elements = [e.value for e in target.elements] if isinstance(target, cst.Tuple) else [target]
    return [module.code_for_node(element) for element in elements]


def _switch(
    result: Initialize, call: cst.Call, given: Mapping[str, cst.BaseExpression], module: cst.Module
) -> None:
    level, enabled = given.get("opt_level"), given.get("enabled")
    result.enabled = module.code_for_node(enabled) if enabled is not None else ""
    if level is not None and not isinstance(level, cst.SimpleString):
        code = module.code_for_node(level)
        on = f'{_operand(level, module)} != "O0"'
        result.enabled = on if enabled is None else f"{_operand(enabled, module)} and {on}"
        result.notes.append(f"{code} now only selects O0 or not: O2 and O3 run as O1")
    elif level is not None and level.evaluated_value == "O0":
        result.enabled = "False"
    elif level is not None and level.evaluated_value == "O2":
        result.notes.append(
            "O2 kept float16 weights beside float32 ones; now each use casts the float32 weight"
        )
    elif level is not None and level.evaluated_value != "O1":
        raise CannotFollowError(call, "O3 is not mixed precision: use model.half() without a scaler")


def _operand(node: cst.BaseExpression, module: cst.Module) -> str:
    """Return the source code of `node` as part of a larger expression."""
    code = module.code_for_node(node)
    is_atom = isinstance(node, (cst.Name, cst.Attribute, cst.Call, cst.Subscript)) or node.lpar
    return code if is_atom else f"({code})"


def _scale(result: Initialize, given: Mapping[str, cst.BaseExpression], module: cst.Module) -> None:
    scale = given.get("loss_scale")
    code = module.code_for_node(scale).strip("\"'") if scale is not None else "dynamic"
    if isinstance(scale, (cst.Float, cst.Integer)):
        result.init_scale = code
        result.notes.append(f"the loss scale starts at {code} and then changes: torch has no fixed scale")
    elif code not in {"dynamic", "None"}:
        result.notes.append(f"the loss scale is now dynamic: {code} is ignored")
    if given.keys() & _LIMITS:
        result.notes.append(
            "torch's scaler has no minimum or maximum scale (amp_core's LossScaleSchedule does)"
        )
