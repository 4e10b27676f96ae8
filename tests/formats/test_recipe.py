"""Recipes as data: names, TOML, errors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from amp_core import OpPolicy, PolicyError, Quantization, Recipe
from amp_core.formats import E4M3, Delayed


@pytest.mark.parametrize("name", Recipe.names())
def test_a_recipe_survives_toml(name: str, tmp_path: Path) -> None:
    """A saved recipe comes back as another one."""
    recipe = Recipe.named(name)
    assert recipe.name == name
    assert recipe.source
    assert Recipe.from_toml(recipe.to_toml()) == recipe
    path = tmp_path / "recipe.toml"
    path.write_text(recipe.to_toml())
    assert Recipe.from_toml(path) == recipe
    partly = replace(recipe, grad_output=None, accumulate=torch.bfloat16)
    assert Recipe.from_toml(partly.to_toml()) == partly


BAD_FIELDS = {
    "granularity": (0, "tile", (1, 2, 3), (0, 1), True),
    "scale": ("float16",),
    "found": ("later",),
    "rounding": ("up",),
    "hadamard": (3, 1, 0),
}


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in BAD_FIELDS.items() for value in values]
)
def test_a_wrong_field_is_named(field: str, value: object) -> None:
    """A mistake in a recipe shows only as wrong numbers."""
    with pytest.raises(ValueError, match=field):
        Quantization(**{"element": E4M3, field: value})


def test_contradictions_are_refused() -> None:
    """A recipe that no kernel can follow is accepted."""
    with pytest.raises(ValueError, match="Delayed scales are per tensor"):
        Quantization(E4M3, 32, found=Delayed())
    with pytest.raises(ValueError, match="blocks or tiles"):
        Quantization(E4M3, "tensor", "e4m3")
    with pytest.raises(ValueError, match="quantises nothing"):
        Recipe(None, None, None)
    with pytest.raises(ValueError, match="mxfp6 has the elements e3m2 and e2m3, not e4m3"):
        Recipe.mxfp6(E4M3)
    with pytest.raises(ValueError, match="mxfp8 has the scales e8m0 and e8m0_up, not 'float32'"):
        Recipe.mxfp8(scale="float32")
    with pytest.raises(TypeError, match=r"E4M3, E5M2, .* not their names"):
        Quantization("e4m3")  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.int32])
def test_products_are_summed_in_dtypes_that_torch_multiplies(dtype: torch.dtype) -> None:
    """A layer fails in its first step, with an error of torch that does not name the recipe."""
    with pytest.raises(ValueError, match=rf"accumulate must be .* of 16 bits or more, .* got {dtype}"):
        replace(Recipe.mxfp8(), accumulate=dtype)


@pytest.mark.parametrize("field", ["name", "source"])
def test_texts_are_checked(field: str) -> None:
    """A recipe whose name is a number writes a file that nothing reads."""
    with pytest.raises(TypeError, match=f"{field} must be a string, got 3"):
        replace(Recipe.mxfp8(), **{field: 3})


@pytest.mark.parametrize("change", [{"max": 240.0}, {"name": "mine"}])
def test_a_file_refuses_formats_that_it_cannot_name(change: dict[str, object]) -> None:
    """A format of one's own is read from the file as the published one of that name, or not at all."""
    mine = replace(E4M3, **change)
    with pytest.raises(PolicyError, match="TOML holds only the names of element formats"):
        Recipe(None, Quantization(mine), None).to_toml()
    with pytest.raises(PolicyError, match="define the recipe in Python"):
        OpPolicy("cpu", {"mm": Recipe(None, Quantization(mine), None)}).to_toml()


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("\n[input]\nelement = 'e9m9'\n", 2, "element must be one of"),
        ("\n[input]\nelement = ['e4m3']\n", 2, "element must be one of"),
        ("\n[input]\ngranularity = 'row'\n", 2, "element is missing: one of e4m3"),
        ("\n[weight]\nelement = 'e4m3'\nscales = 'e8m0'\n", 2, "unknown key 'scales'"),
        ("\naccumulate = 'float33'\n", 2, "no floating-point dtype 'float33'"),
        ("\n\naccumulate = 'float8_e4m3fn'\n[input]\nelement = 'e4m3'\n", 3, "of 16 bits or more"),
        ("accumulate = 'int8'\n[input]\nelement = 'e4m3'\n", 1, "no floating-point dtype 'int8'"),
        ("\nroles = 1\n", 2, "unknown key 'roles'"),
        ("\n[input]\nelement = 'e4m3'\nmargin = 1\n", 2, "belongs to found"),
        ("name = 1\n", 1, "name must be a string"),
    ],
)
def test_bad_toml_names_the_line(text: str, line: int, message: str) -> None:
    """The error leaves the reader to search the file."""
    with pytest.raises(PolicyError, match=f"<toml>:{line}: .*{message}"):
        Recipe.from_toml(text)


def test_the_hadamard_transform_is_for_the_gradient_of_weights() -> None:
    """One operand of a product is transformed and the other is not."""
    recipe = Recipe.nvfp4()
    assert [q.hadamard for q in recipe.operands("grad_weight") if q] == [16, 16]
    for product in ("output", "grad_input"):
        assert [q.hadamard for q in recipe.operands(product) if q] == [None, None]  # type: ignore[arg-type]


def test_an_unknown_name_lists_the_known_ones() -> None:
    """The user has to search the documentation for the spelling."""
    with pytest.raises(ValueError, match=r"no recipe 'fp8'.*fp8_tensorwise"):
        Recipe.named("fp8")
    with pytest.raises(KeyError, match="no product 'dgrad'; the products are output, grad_input"):
        Recipe.mxfp8().operands("dgrad")  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match="quantises nothing"):
        Recipe.from_toml("")
