"""The optimization levels, as documented by apex."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

LossScale = float | Literal["dynamic"]


@dataclass(frozen=True)
class Properties:
    """The settings of a level; `initialize` can override each.

    Attributes:
        cast_model_type: the dtype that the model's parameters, buffers and inputs are cast to.
        patch_torch_functions: run ops in mixed precision (amp_core's autocast).
        keep_batchnorm_fp32: leave batch norms out of the cast.
        master_weights: let the optimizer update float32 copies of the parameters.
        loss_scale: a number, or ``"dynamic"``.
    """

    cast_model_type: torch.dtype | None = None
    patch_torch_functions: bool = False
    keep_batchnorm_fp32: bool | None = None
    master_weights: bool | None = None
    loss_scale: LossScale = 1.0


LEVELS = {
    "O0": Properties(cast_model_type=torch.float32, master_weights=False),
    "O1": Properties(patch_torch_functions=True, loss_scale="dynamic"),
    "O2": Properties(torch.float16, keep_batchnorm_fp32=True, master_weights=True, loss_scale="dynamic"),
    "O3": Properties(torch.float16, keep_batchnorm_fp32=False, master_weights=False),
}


def properties(opt_level: str, **overrides: Any) -> Properties:
    """Return the settings of `opt_level`, updated with the `overrides` that are not None.

    Raises:
        RuntimeError: the level is unknown, or the settings contradict each other.
    """
    if opt_level not in LEVELS:
        raise RuntimeError(
            f"Unexpected optimization level {opt_level}. Options are 'O0', 'O1', 'O2', 'O3': "
            "the letter O, not zero."
        )
    given = {name: _parsed(name, value) for name, value in overrides.items() if value is not None}
    chosen = replace(LEVELS[opt_level], **given)
    if chosen.patch_torch_functions:
        _check_patching(chosen)
    return chosen


def _check_patching(chosen: Properties) -> None:
    for name in ("cast_model_type", "keep_batchnorm_fp32", "master_weights"):
        if getattr(chosen, name):
            raise RuntimeError(
                f"O1 runs ops in mixed precision and leaves weights in float32: {name} does not apply; "
                "omit it or use O2."
            )


def _parsed(name: str, value: Any) -> Any:
    """Convert command-line strings such as "True" and "128.0"."""
    if name == "keep_batchnorm_fp32" and isinstance(value, str):
        if value not in {"True", "False"}:
            raise RuntimeError(f"keep_batchnorm_fp32 is True, False, 'True' or 'False', not {value!r}.")
        return value == "True"
    if name == "loss_scale" and value != "dynamic":
        return float(value)
    return value
