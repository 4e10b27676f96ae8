"""Check the rules that `OpPolicy` is given, and resolve their ops to full names."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import TYPE_CHECKING, Any

from amp_core.errors import PolicyError
from amp_core.policy import names, recipes
from amp_core.policy import rules as r

if TYPE_CHECKING:
    from amp_core.formats import Recipe


OpName = Any
"""A string, or an op object: see `amp_core.policy.names.overloads`."""


def check_device_type(value: object) -> None:
    """Raise PolicyError unless a device type can have this name."""
    if not (isinstance(value, str) and value.isidentifier()) or value == "auto":
        raise PolicyError(
            f"A policy is for one type of device, such as 'cuda' without an index, not for {value!r}."
        )


def how_to_make_policy(value: object) -> str:
    """Return how to make a policy of `value`, as the end of a message; empty if that is unknown."""
    from amp_core.formats import Recipe

    if hasattr(value, "policy"):  # advice, a plan
        return " Pass its `policy`."
    if isinstance(value, Recipe):
        return " Make it a rule: OpPolicy.default(device_type).override({'linear': recipe})."
    if isinstance(value, Mapping):
        return " Change the device's policy: OpPolicy.default(device_type).override({'softmax': 'fp32'})."
    if isinstance(value, (str, PathLike)):
        return " OpPolicy.from_toml(path) reads a file; OpPolicy.float32(device_type) is all in float32."
    return ""


def resolve(changes: Mapping[OpName, str | Recipe]) -> dict[str, str]:
    """Return full op names with their rules.

    Raises:
        PolicyError: an op or a rule is unknown, or the rule cannot apply to the op.
    """
    if not isinstance(changes, Mapping):
        raise PolicyError(f"Rules must be a mapping from op to rule, not {type(changes).__name__}.")
    rules: dict[str, str] = {}
    for op, given in changes.items():
        rule = recipes.as_rule(given)
        rules.update(dict.fromkeys(_applicable(op, rule), rule))
    return rules


def resolve_of_module(selector: object, what: object) -> dict[str, str] | None:
    """Return full op names with the rules of a module; None for ``"fp32"``.

    Raises:
        PolicyError: as for `resolve`, or it is another text; the message names the selector.
    """
    if what == r.FP32:
        return None
    if isinstance(what, str):
        raise PolicyError(f"{selector!r}: {what!r} is not a rule for a module; use {r.FP32!r} or op rules.")
    try:
        return resolve(what)  # type: ignore[arg-type]  # it raises for others
    except PolicyError as error:
        raise PolicyError(f"{selector!r}: {error}") from error


def _applicable(op: OpName, rule: str) -> list[str]:
    _check_rule(op, rule)
    reasons = {name: _refusal(rule, name) for name in names.full_names(op)}
    usable = [name for name, reason in reasons.items() if reason is None]
    if not usable:
        name, reason = next(iter(reasons.items()))
        raise PolicyError(f"The rule {rule!r} cannot apply to {name}: {reason}.")
    return usable


def _refusal(rule: str, name: str) -> str | None:
    if names.is_function(name):
        kept = ", ".join(r.FOR_FUNCTIONS)
        return None if rule in r.FOR_FUNCTIONS else f"an autograd function can have only {kept}"
    recipe = recipes.recipe_of(rule)
    if recipe is not None:
        return recipes.refusal(name, recipe)
    overload = names.find(name)
    return None if overload is None else r.refusal(rule, overload)


def _check_rule(op: OpName, rule: object) -> None:
    if r.is_known(rule):
        return
    wanted = recipes.meant(rule)
    if wanted is not None:
        raise PolicyError(f"Unknown rule {rule!r} for {op!r}: {wanted}")
    raise PolicyError(
        f"Unknown rule {rule!r} for {op!r}: {_hint(str(rule))}the rules are {', '.join(r.RULES)}, and "
        f"{r.above(8e6)!r} for calls above some work; matrix products also take a Recipe, or its name as in "
        f"'recipe mxfp8'."
    )


def _hint(rule: str) -> str:
    name, threshold, size = rule.partition(" above ")
    if threshold and name == r.LOWER_PRECISION_FP:
        return f"{size!r} is no amount of work; "
    if threshold and name in r.RULES:
        return f"{name} takes no threshold; "
    import difflib

    near = difflib.get_close_matches(rule, r.RULES, n=2, cutoff=0.5)
    return f"did you mean {' or '.join(map(repr, near))}? " if near else ""
