"""Delayed-scaling state of TransformerEngine's modules, converted for `AmaxHistory`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from amp_core.common.text import counted
from amp_core.formats.elements import ElementFormat
from amp_core.formats.quantization import Delayed
from amp_core.formats.recipe import Recipe

_ROLES = {"input": ("fwd", 3, 0), "weight": ("fwd", 3, 1), "grad_output": ("bwd", 2, 0)}
"""Role -> the suffix of its entries, how many columns a matrix product has there, and which is its own."""

_ENTRIES = ("scale_fwd", "scale_bwd", "amax_history_fwd", "amax_history_bwd")


def from_transformer_engine(
    state: Mapping[str, Tensor], recipe: Recipe
) -> list[dict[str, dict[str, Tensor]]]:
    """Convert the extra state of one TransformerEngine module that ran with ``DelayedScaling``.

    The next scales are TransformerEngine's. It drops the oldest magnitude before the scale that follows
    from it is used; that magnitude is found again from the scale.

    Args:
        state: with the entries ``scale_fwd``, ``scale_bwd``, of shape ``(columns,)``, and
            ``amax_history_fwd``, ``amax_history_bwd``, of shape ``(history, columns)``; as
            ``module.get_extra_state()`` holds them, once loaded.
        recipe: with the delayed quantisations of the roles, such as `Recipe.fp8_delayed`.

    Returns:
        For each matrix product of the module, the states of its roles, which
        `AmaxHistory.load_state_dict` takes.

    Raises:
        KeyError: an entry is missing.
        ValueError: a role of `recipe` is not delayed, or its history has another length.
    """
    missing = [name for name in _ENTRIES if name not in state]
    if missing:
        raise KeyError(
            f"The state has no {', '.join(missing)}. Pass the loaded extra state of one module that ran with "
            f"DelayedScaling, from a buffer: torch.load of what module.get_extra_state() holds."
        )
    count = state["scale_fwd"].numel() // _ROLES["input"][1]
    return [
        {role: _convert(state, recipe, role, number) for role in _ROLES if getattr(recipe, role)}
        for number in range(count)
    ]


def _convert(state: Mapping[str, Tensor], recipe: Recipe, role: str, number: int) -> dict[str, Tensor]:
    quantization = getattr(recipe, role)
    if not isinstance(quantization.found, Delayed):
        raise ValueError(f"The role {role} of the recipe {recipe.name!r} has no delayed scale.")
    suffix, columns, offset = _ROLES[role]
    column = number * columns + offset
    history = state[f"amax_history_{suffix}"][:, column].float()
    if len(history) != quantization.found.history:
        raise ValueError(
            f"TransformerEngine's history has {counted(len(history), 'step')}, the recipe "
            f"{quantization.found.history}: use Recipe.fp8_delayed(history={len(history)})."
        )
    # The first row collects the step that runs; the others follow from the oldest to the newest.
    seen = history.clone()
    scale = state[f"scale_{suffix}"][column].float()
    seen[0] = _dropped(scale, seen[1:], quantization.element, quantization.found)
    return {"seen": seen, "current": history[0].clone()}


def _dropped(scale: Tensor, kept: Tensor, element: ElementFormat, delayed: Delayed) -> Tensor:
    """Return the magnitude that `scale` follows from if none of `kept` is as large, else 0."""
    largest = torch.full_like(scale, element.max * 2.0**-delayed.margin)
    near = largest / scale
    candidates = torch.stack(
        [near, *(torch.nextafter(near, torch.full_like(near, to)) for to in (0.0, torch.inf))]
    )
    exact = candidates[(largest / candidates == scale).to(torch.int32).argmax()]
    beyond = exact > kept.amax() if kept.numel() else torch.ones_like(exact, dtype=torch.bool)
    return torch.where(beyond, exact, 0.0)
