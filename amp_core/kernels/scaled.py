"""Products of quantised matrices: the interface, and how every device emulates them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from amp_core.common.overrides import require_same_arguments

if TYPE_CHECKING:  # few programs have recipes
    from amp_core.formats import Quantization, Quantized, Recipe


class ScaledProducts:
    """Products of quantised matrices. This class emulates all of them; override what the device has.

    Args:
        reason: why all are emulated, for users.
    """

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        require_same_arguments(cls, ScaledProducts)

    def __init__(self, reason: str = "its backend has no native products") -> None:
        self._reason = reason

    def why_emulated(
        self,
        a: Quantization,  # noqa: ARG002
        b: Quantization,  # noqa: ARG002
        accumulate: torch.dtype,  # noqa: ARG002
        *,
        batched: bool = False,  # noqa: ARG002
    ) -> str:
        """Return why `multiply` emulates products of such operands; empty if the device has them.

        Args:
            a: of the first operand, along its last dimension.
            b: of the second operand, along its second to last dimension.
            accumulate: the dtype in which products are summed.
            batched: of batches of matrices.
        """
        return self._reason

    def multiply(self, a: Quantized | Tensor, b: Quantized | Tensor, accumulate: torch.dtype) -> Tensor:
        """Return the product of two matrices, or of two equal batches of them, in the dtype `accumulate`.

        Args:
            a: quantised along its last dimension; or a tensor, which is cast to `accumulate`.
            b: the same along its second to last dimension. If both have a Hadamard transform of one size,
                they are multiplied as they are transformed: the transforms cancel out.
            accumulate: the dtype in which products are summed.
        """
        sizes = {None if isinstance(each, Tensor) else each.quantization.hadamard for each in (a, b)}
        left, right = (
            each.to(accumulate)
            if isinstance(each, Tensor)
            else each.dequantize(accumulate, rotated=len(sizes) == 1)
            for each in (a, b)
        )
        return torch.mm(left, right) if left.dim() == 2 else torch.bmm(left, right)


def why_emulated(
    products: ScaledProducts,
    a: Quantization | None,
    b: Quantization | None,
    accumulate: torch.dtype,
    *,
    batched: bool = False,
) -> str:
    """Return why a product is emulated, as `ScaledProducts.why_emulated`; operands may be unquantised."""
    if a is None or b is None:
        return "one operand is not quantised"
    return products.why_emulated(a, b, accumulate, batched=batched)


def emulated(products: ScaledProducts, recipe: Recipe, *, batched: bool = False) -> dict[str, str]:
    """Return the products of a layer with `recipe` that are emulated, each with the reason."""
    from amp_core.formats.recipe import OPERANDS

    reasons = {
        name: why_emulated(products, *recipe.operands(name), recipe.accumulate, batched=batched)  # type: ignore[arg-type]
        for name in OPERANDS
    }
    return {name: reason for name, reason in reasons.items() if reason}
