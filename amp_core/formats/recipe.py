"""Recipes: which element format, scales and rounding each operand of a matrix product has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from os import PathLike
from typing import Literal

import torch

from amp_core.formats import recipe_toml
from amp_core.formats.elements import E2M1, E2M3, E3M2, E4M3, E5M2, ElementFormat
from amp_core.formats.quantization import Delayed, Quantization

OPERANDS = {
    "output": ("input", "weight"),
    "grad_input": ("grad_output", "weight"),
    "grad_weight": ("input", "grad_output"),
}
"""The roles of the operands of each product."""


@dataclass(frozen=True)
class Recipe:
    """How the operands of matrix products are quantised, forward and backward.

    Attributes:
        input: the quantisation of the layer's input; None leaves it in the region's dtype.
        weight: that of its weight.
        grad_output: that of the gradient of its output.
        accumulate: the dtype in which products are summed.
        name: for reports.
        source: where the recipe was published.

    Raises:
        TypeError: a role is not a `Quantization`, `accumulate` not a dtype, or `name` or `source` no string.
        ValueError: no role is quantised, or `accumulate` is no floating-point dtype of 16 bits or more.

    Example::

        from dataclasses import replace

        recipe = Recipe.mxfp4()
        rounded = replace(recipe.grad_output, rounding="stochastic")
        recipe = replace(recipe, grad_output=rounded, name="mxfp4, stochastic gradients")
    """

    input: Quantization | None
    weight: Quantization | None
    grad_output: Quantization | None
    accumulate: torch.dtype = torch.float32
    name: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        roles = {"input": self.input, "weight": self.weight, "grad_output": self.grad_output}
        for role, quantization in roles.items():
            if quantization is not None and not isinstance(quantization, Quantization):
                raise TypeError(f"{role} must be a Quantization or None, got {quantization!r}.")
        if not any(roles.values()):
            raise ValueError(f"The recipe {self.name!r} quantises nothing: give it at least one role.")
        for field in ("name", "source"):
            if not isinstance(getattr(self, field), str):
                raise TypeError(f"{field} must be a string, got {getattr(self, field)!r}.")
        if not isinstance(self.accumulate, torch.dtype):
            raise TypeError(f"accumulate must be a torch.dtype, got {self.accumulate!r}.")
        recipe_toml.check_sums(self.accumulate)

    def operands(
        self, product: Literal["output", "grad_input", "grad_weight"]
    ) -> tuple[Quantization | None, Quantization | None]:
        """Return the quantisations of both operands of one product.

        The Hadamard transform is kept for the weight's gradient only. The products are: ``"output"`` of
        input and weight, ``"grad_input"`` of grad_output and weight, ``"grad_weight"`` of input and
        grad_output.

        Raises:
            KeyError: there is no such product.
        """
        if not isinstance(product, str) or product not in OPERANDS:
            raise KeyError(f"There is no product {product!r}; the products are {', '.join(OPERANDS)}.")
        first, second = (getattr(self, role) for role in OPERANDS[product])
        if product == "grad_weight" and first is not None and second is not None:
            return first, second
        return _without_hadamard(first), _without_hadamard(second)

    @classmethod
    def fp8_tensorwise(cls) -> Recipe:
        """Return fp8 with one current float32 scale per tensor, gradients in e5m2."""
        forward = Quantization(E4M3)
        return cls(
            forward,
            forward,
            Quantization(E5M2),
            name="fp8_tensorwise",
            source="Micikevicius et al., FP8 Formats for Deep Learning, arXiv 2209.05433",
        )

    @classmethod
    def fp8_rowwise(cls) -> Recipe:
        """Return e4m3 with one scale per row, a power of two in float32."""
        every = Quantization(E4M3, "row", "power_of_two")
        return cls(every, every, every, name="fp8_rowwise", source="torchao, float8 recipe 'rowwise'")

    @classmethod
    def fp8_delayed(cls, history: int = 1024, margin: int = 0) -> Recipe:
        """Return fp8 with scales from earlier steps, gradients in e5m2.

        Args:
            history: the number of steps that a scale looks back on.
            margin: powers of two by which scales stay below the largest that fits.

        Raises:
            ValueError: `history` is no number of steps above 0, or `margin` no whole number.
        """
        found = Delayed(history, margin)
        forward = Quantization(E4M3, found=found)
        return cls(
            forward,
            forward,
            Quantization(E5M2, found=found),
            name="fp8_delayed",
            source="TransformerEngine, DelayedScaling",
        )

    @classmethod
    def fp8_tiles(cls) -> Recipe:
        """Return e4m3 with float32 scales per 1x128 of inputs and gradients, and 128x128 of weights."""
        block = Quantization(E4M3, 128)
        return cls(
            block,
            Quantization(E4M3, (128, 128)),
            block,
            name="fp8_tiles",
            source="DeepSeek-V3 Technical Report, arXiv 2412.19437, section 3.3",
        )

    @classmethod
    def mxfp8(cls, element: ElementFormat = E4M3, scale: str = "e8m0") -> Recipe:
        """Return MXFP8: blocks of 32 under an e8m0 scale.

        Args:
            element: `E4M3` or `E5M2`.
            scale: ``"e8m0"`` rounds as the specification, ``"e8m0_up"`` so that nothing saturates.

        Raises:
            ValueError: MXFP8 has no such elements, or the MX formats no such scale.
        """
        return cls._mx("mxfp8", element, scale)

    @classmethod
    def mxfp6(cls, element: ElementFormat = E3M2, scale: str = "e8m0") -> Recipe:
        """Return MXFP6: blocks of 32 under an e8m0 scale; `element` is `E3M2` or `E2M3`.

        Raises:
            ValueError: as for `mxfp8`.
        """
        return cls._mx("mxfp6", element, scale)

    @classmethod
    def mxfp4(cls, scale: str = "e8m0") -> Recipe:
        """Return MXFP4: blocks of 32 of e2m1 under an e8m0 scale, rounded to nearest.

        Raises:
            ValueError: the MX formats have no such scale.
        """
        return cls._mx("mxfp4", E2M1, scale)

    @classmethod
    def nvfp4(cls) -> Recipe:
        """Return NVFP4 as published for pretraining.

        Blocks of 16 of e2m1 under an e4m3 scale under a float32 one; 16x16 tiles of weights; gradients
        rounded stochastically; a Hadamard transform of 16 before the product of the weight's gradient.
        """
        block = Quantization(E2M1, 16, "e4m3", hadamard=16)
        return cls(
            block,
            Quantization(E2M1, (16, 16), "e4m3"),
            replace(block, rounding="stochastic"),
            name="nvfp4",
            source="NVIDIA, Pretraining Large Language Models with NVFP4, arXiv 2509.25149",
        )

    @classmethod
    def _mx(cls, name: str, element: ElementFormat, scale: str) -> Recipe:
        if scale not in ("e8m0", "e8m0_up"):
            raise ValueError(f"{name} has the scales e8m0 and e8m0_up, not {scale!r}.")
        allowed = {"mxfp8": (E4M3, E5M2), "mxfp6": (E3M2, E2M3), "mxfp4": (E2M1,)}[name]
        if element not in allowed:
            names = " and ".join(a.name for a in allowed)
            given = element.name if isinstance(element, ElementFormat) else repr(element)
            raise ValueError(f"{name} has the elements {names}, not {given}.")
        every = Quantization(element, 32, scale)
        return cls(every, every, every, name=name, source="OCP Microscaling Formats (MX) v1.0, section 6.3")

    @classmethod
    def named(cls, name: str) -> Recipe:
        """Return a recipe with its default settings by name: ``Recipe.named("mxfp8")``.

        Raises:
            ValueError: no recipe has this name.
        """
        makers = cls._makers()
        if not isinstance(name, str) or name not in makers:
            raise ValueError(f"There is no recipe {name!r}; the recipes are {', '.join(makers)}.")
        return makers[name]()

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the names of all recipes that `named` returns."""
        return tuple(cls._makers())

    @classmethod
    def _makers(cls) -> dict[str, Callable[[], Recipe]]:
        makers = (
            cls.fp8_tensorwise,
            cls.fp8_rowwise,
            cls.fp8_delayed,
            cls.fp8_tiles,
            cls.mxfp8,
            cls.mxfp6,
            cls.mxfp4,
            cls.nvfp4,
        )
        return {make.__name__: make for make in makers}

    def to_toml(self) -> str:
        """Return the recipe as TOML, one table per role; `from_toml` reads it.

        Raises:
            PolicyError: it has an element format of your own, which a file cannot hold.

        Example::

            text = Recipe.nvfp4().to_toml()
            assert Recipe.from_toml(text) == Recipe.nvfp4()
        """
        return recipe_toml.write(vars(self))

    @classmethod
    def from_toml(cls, source: str | PathLike[str]) -> Recipe:
        """Read a recipe from `source`, a path or the TOML text itself.

        Raises:
            PolicyError: it is not TOML, or not a recipe; the message names file and line.
            OSError: the file cannot be read.
            TypeError: `source` is no path or string.
        """
        return cls(**recipe_toml.read(source))


def _without_hadamard(quantization: Quantization | None) -> Quantization | None:
    return None if quantization is None else replace(quantization, hadamard=None)
