"""A recipe as a rule: its text in a policy, and the ops that take one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from amp_core.common import toml
from amp_core.common.text import digest
from amp_core.errors import PolicyError

if TYPE_CHECKING:  # the import takes 10 ms, and few programs have recipes
    from amp_core.formats import Quantization, Recipe

OPS = tuple(f"aten::{op}.default" for op in ("addmm", "baddbmm", "bmm", "linear", "matmul", "mm"))
"""The ops that take a recipe: those that are one product of two matrices, or of batches of them."""

BILINEAR = (
    "aten::_grouped_mm.default",
    *(f"aten::conv{n}d.{overload}" for n in (1, 2, 3) for overload in ("default", "padding")),
    *("aten::conv_transpose1d.default", "aten::conv_transpose2d.input", "aten::conv_transpose3d.input"),
)
"""Those that take a recipe with one scale per tensor."""

BATCHED = tuple(f"aten::{op}.default" for op in ("baddbmm", "bmm"))
"""Those that are products of batches."""

ROLES = ("input", "weight", "grad_output")
"""The roles of a recipe."""

_WORD = "recipe"
_TEXT = re.compile(rf"{_WORD} (\S+)(?: above (.+))?")


class RecipeRule(str):
    """The rule of an op whose operands a recipe quantises: ``recipe mxfp8``, perhaps ``above 8 MFLOP``.

    Equal rules have equal recipes: the text of a recipe that is not one of `Recipe.names` ends in a digest of
    its contents.

    Attributes:
        recipe: the recipe.
        size: the work above which it applies, such as ``"8 MFLOP"``; empty if it always does.
    """

    __slots__ = ("recipe", "size")
    recipe: Recipe
    size: str

    def __new__(cls, recipe: Recipe, size: str = "") -> RecipeRule:
        """Return the rule of `recipe` for calls with more work than `size`."""
        rule = super().__new__(cls, f"{_WORD} {_name(recipe)}" + (f" above {size}" if size else ""))
        rule.recipe, rule.size = recipe, size
        return rule

    def __reduce__(self) -> tuple[Any, ...]:
        return RecipeRule, (self.recipe, self.size)


def _name(recipe: Recipe) -> str:
    from amp_core.formats import Recipe

    if recipe.name in Recipe.names() and Recipe.named(recipe.name) == recipe:
        return recipe.name
    words = re.sub(r"[^\w.-]+", "-", recipe.name) or "own"
    return f"{words}:{digest(recipe)[:8]}"


def as_rule(rule: Any, own: Mapping[str, Recipe] | None = None) -> Any:
    """Return the `RecipeRule` that a `Recipe` or a text such as ``"recipe mxfp8"`` means; others unchanged.

    Args:
        rule: what a user gave as the rule of an op.
        own: the recipes of the same file, by name; they take precedence.

    Raises:
        PolicyError: there is no recipe of that name.
    """
    if isinstance(rule, str) and not rule.startswith(_WORD):
        return rule
    from amp_core.formats import Recipe

    if isinstance(rule, Recipe):
        return RecipeRule(rule)
    match = _TEXT.fullmatch(rule) if isinstance(rule, str) and not isinstance(rule, RecipeRule) else None
    if match is None:
        return rule
    known: dict[str, Recipe | None] = {**dict.fromkeys(Recipe.names()), **(own or {})}
    if match[1] not in known:
        raise PolicyError(
            f"There is no recipe {match[1]!r}; the recipes are {', '.join(known)}. A file defines another in "
            f"a table [recipes.NAME]; in Python, pass the Recipe itself."
        )
    return RecipeRule(known[match[1]] or Recipe.named(match[1]), match[2] or "")


def meant(rule: object) -> str | None:
    """Say what to write for a rule that is unknown and looks like a recipe; None if it does not."""
    from amp_core.formats import Quantization, Recipe

    if isinstance(rule, Quantization):
        return "it says how one role is quantised. Pass a Recipe, which has three roles."
    if getattr(rule, "__self__", None) is Recipe:
        return "it is a method. Call it, as in Recipe.mxfp8()."
    if rule in Recipe.names():
        return f"write '{_WORD} {rule}', or pass Recipe.named({rule!r})."
    match = _TEXT.fullmatch(rule) if isinstance(rule, str) else None
    if match is not None:
        return f"{match[2]!r} is no amount of work, such as '8 MFLOP'."
    return None


def recipe_of(rule: object) -> Recipe | None:
    """Return the recipe of a rule; None if it is not the rule of one."""
    return rule.recipe if isinstance(rule, RecipeRule) else None


def describe(recipe: Recipe) -> str:
    """Say how each operand is quantised: ``input e4m3 per block of 32, ...``."""
    roles = {role: getattr(recipe, role) for role in ROLES}
    return ", ".join(f"{role} {short(each) if each else 'as it is'}" for role, each in roles.items())


def short(quantization: Quantization) -> str:
    """Say what is rounded to what: ``e4m3 per block of 32``."""
    shared = quantization.granularity
    if isinstance(shared, tuple):
        return f"{quantization.element.name} per tile of {shared[0]} by {shared[1]}"
    return f"{quantization.element.name} per {f'block of {shared}' if isinstance(shared, int) else shared}"


def refusal(op: str, recipe: Recipe) -> str | None:
    """Return why the op with the full name `op` cannot have `recipe`; None if it can."""
    if op in BILINEAR:
        wrong = next(filter(None, (_finer(getattr(recipe, role), role) for role in ROLES)), None)
        return wrong and f"it takes one scale per tensor, as fp8_tensorwise has; {wrong}. {_why_tensors(op)}"
    if op not in OPS:
        ops = (name.removeprefix("aten::").rpartition(".")[0] for name in (*OPS, *BILINEAR))
        return f"only these ops take a recipe: {', '.join(dict.fromkeys(ops))}"
    return None


def _finer(how: Quantization | None, role: str) -> str | None:
    """Say what in `how` is finer than one scale per tensor; None if nothing is."""
    if how is None or (how.granularity == "tensor" and how.hadamard is None):
        return None
    transformed = "" if how.hadamard is None else f" after a Hadamard transform of {how.hadamard}"
    return f"the {role} of this recipe is {short(how)}{transformed}"


def _why_tensors(op: str) -> str:
    if op.startswith("aten::_grouped"):
        return (
            "The gradient of its weights sums over the tokens of a group, and only the device knows where "
            "groups end: no row or block of that sum is known"
        )
    return (
        "It sums over unfolded patches: there, an element of the input has a copy in each patch that covers "
        "it, and a finer scale would differ between the copies"
    )


# In files.


def to_toml(rules: Iterable[str]) -> str:
    """Return the tables that define those recipes among `rules` that are not named ones."""
    own = {_name(rule.recipe): rule.recipe for rule in rules if isinstance(rule, RecipeRule)}
    return "".join(_table(name, recipe) for name, recipe in own.items() if ":" in name)  # a digest


def _table(name: str, recipe: Recipe) -> str:
    head = f"recipes.{toml.quoted(name)}"
    return f"\n[{head}]\n" + re.sub(r"(?m)^\[(\w+)\]$", rf"[{head}.\1]", recipe.to_toml())


def from_toml(tables: Any, file: toml.Document) -> dict[str, Recipe]:
    """Return the recipes that the table ``recipes`` of `file` defines, by name.

    Raises:
        PolicyError: a table is not a recipe, or has the name of a published one; the message names the line.
    """
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        place = file.place("recipes")
        raise PolicyError(f"{place}: recipes must be tables, such as [recipes.mine.input].")
    if not tables:
        return {}
    from amp_core.formats import Recipe
    from amp_core.formats.recipe_toml import fields_of

    for name in tables:
        if not re.fullmatch(r"\S+", name):
            place = file.place(name, "recipes")
            raise PolicyError(f"{place}: {name!r} is not one word, so no rule {_WORD!r} NAME can mean it.")
        if name in Recipe.names():
            place = file.place(name, "recipes")
            raise PolicyError(f"{place}: {name!r} is a published recipe; give yours another name.")
    return {
        name: Recipe(**fields_of({"name": name, **table}, file, f"recipes.{name}"))
        for name, table in tables.items()
    }
