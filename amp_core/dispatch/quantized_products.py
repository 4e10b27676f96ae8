"""The products of one call of an op with a recipe, their gradients, and who watches them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from amp_core._torch.dynamo import never_compile
from amp_core._torch.op_kernels import excluded
from amp_core._torch.tracing import are_batches, calls_are_captured
from amp_core.dispatch import delayed_scales, kept_operands
from amp_core.dispatch.bilinear import Bilinear, Compute
from amp_core.errors import PolicyError
from amp_core.formats import AmaxHistory, Quantization, Quantized, quantize
from amp_core.formats.recipe import OPERANDS
from amp_core.kernels.scaled import why_emulated
from amp_core.plugin.default_manager import get_backend
from amp_core.plugin.results import wrong_kernel
from amp_core.policy.recipes import RecipeRule

ProductName = Literal["output", "grad_input", "grad_weight"]


class Operand(NamedTuple):
    """One quantised operand, as observers see it; `role` is ``input``, ``weight`` or ``grad_output``."""

    role: str
    quantization: Quantization
    quantized: Quantized


class ScaledProduct(NamedTuple):
    """One product of quantised operands, as observers see it.

    Attributes:
        name: ``output``, ``grad_input`` or ``grad_weight``.
        rule: the rule of the op.
        factors: both factors before they were quantised.
        operands: the quantised ones among them.
        result: the product, in the dtype of the recipe's ``accumulate``.
    """

    name: ProductName
    rule: RecipeRule
    factors: tuple[Tensor, Tensor]
    operands: tuple[Operand, ...]
    result: Tensor


class ProductObserver(NamedTuple):
    """What watches products.

    Attributes:
        during: makes a context that holds while a product is computed.
        after: receives the product.
    """

    during: Callable[[], AbstractContextManager[None]]
    after: Callable[[ScaledProduct], None]


class _Thread(threading.local):
    observers: tuple[ProductObserver, ...] = ()


_thread = _Thread()


def watching() -> tuple[ProductObserver, ...]:
    """Return the observers of this thread."""
    return _thread.observers


def observe(observer: ProductObserver) -> Callable[[], None]:
    """Let `observer` watch the products that this thread starts, and their backward ones, in any thread.

    Returns:
        A function that ends the observation; call it in the same thread.
    """
    _thread.observers = (*_thread.observers, observer)

    def end() -> None:
        _thread.observers = tuple(other for other in _thread.observers if other is not observer)

    return end


class Call(NamedTuple):
    """What the products of one call share.

    Attributes:
        rule: the rule of the op.
        keys: the dispatch keys to exclude.
        observers: what watches the products.
        kept: by role, the quantised forms of those factors that are weights in a scope.
        histories: by role, those of delayed scales.
    """

    rule: RecipeRule
    keys: Any
    observers: tuple[ProductObserver, ...]
    kept: Mapping[str, kept_operands.Forms]
    histories: Mapping[str, AmaxHistory | delayed_scales.GraphHistory]

    def multiply(self, name: ProductName, a: Tensor, b: Tensor, compute: Compute | None = None) -> Tensor:
        """Return ``a @ b``, or what `compute` returns, of the operands as the recipe quantises them."""
        with excluded(self.keys), ExitStack() as stack:  # a backward pass may run in a region
            for observer in self.observers:
                stack.enter_context(observer.during())
            computed = self._multiply(name, a, b, compute)
        for observer in self.observers:
            observer.after(computed)
        return computed.result

    def _multiply(self, name: ProductName, a: Tensor, b: Tensor, compute: Compute | None) -> ScaledProduct:
        recipe = self.rule.recipe
        hows, accumulate = recipe.operands(name), recipe.accumulate
        products = get_backend(a.device.type).scaled_products()
        native = compute is None and not why_emulated(products, *hows, accumulate, batched=a.dim() != 2)
        operands, factors = list[Operand](), list[Quantized | Tensor]()
        for role, how, tensor, dim in zip(OPERANDS[name], hows, (a, b), (-1, -2), strict=True):
            if how is None:
                factors.append(tensor)
                continue
            quantized = self._quantized(role, tensor, how, dim, packed=native)
            operands.append(Operand(role, how, quantized))
            factors.append(quantized)
        left, right = factors
        if compute is None:
            result = products.multiply(left, right, accumulate)
        else:
            result = compute(*(_wide(factor, accumulate) for factor in (left, right)))
        return ScaledProduct(name, self.rule, (a, b), tuple(operands), result)

    def _quantized(
        self, role: str, tensor: Tensor, how: Quantization, dim: int, *, packed: bool
    ) -> Quantized:
        history = self.histories.get(role)
        if isinstance(history, delayed_scales.GraphHistory):
            made = history.quantize(tensor, how, dim, _seed(how, tensor.device))
            return made.packed() if packed else made
        if history is not None:  # the next step has another scale, also of a weight that does not change
            quantized = _quantize(tensor, how, dim, history.amax, packed=packed)
            delayed_scales.record(history, quantized.amax)
            return quantized
        forms = self.kept.get(role)
        if forms is None:
            return _quantize(tensor, how, dim, packed=packed)
        return kept_operands.quantized(
            forms, tensor, how, dim, lambda: _quantize(tensor, how, dim, packed=packed), packed=packed
        )


def _wide(factor: Quantized | Tensor, dtype: torch.dtype) -> Tensor:
    return factor.to(dtype) if isinstance(factor, Tensor) else factor.dequantize(dtype)


def _quantize(
    tensor: Tensor, how: Quantization, dim: int, amax: Tensor | None = None, *, packed: bool
) -> Quantized:
    """Quantise with the device's kernel; in a graph, which cannot hold it, with PyTorch operations."""
    seed = _seed(how, tensor.device)
    if calls_are_captured():
        made = quantize(tensor, how, dim, seed=seed, amax=amax)
        return made.packed() if packed else made
    kernels = get_backend(tensor.device.type).kernels()
    made = kernels.quantize(tensor, how, dim, seed=seed, amax=amax, packed=packed)
    if not isinstance(made, Quantized):
        raise wrong_kernel(kernels, "quantize", tensor.device.type, made, "an amp_core.Quantized")
    return made


def _seed(how: Quantization, device: torch.device) -> int | Tensor | None:
    """Draw a seed from torch's CPU generator, so that `torch.manual_seed` repeats a run on every device.

    A graph draws it on the device, in each call.
    """
    if how.rounding != "stochastic":
        return None
    if calls_are_captured():
        return torch.randint(2**62, (), device=device)
    return int(torch.randint(2**62, ()))


class _Product(torch.autograd.Function):
    """One product, perhaps as a `Bilinear` op computes it, and its two gradients."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, call: Call, op: Bilinear | None) -> Tensor:
        # torch compares the number of saved tensors when it recomputes a checkpoint: the empty one lets it
        # notice a recomputation without this rule.
        ctx.save_for_backward(a, b, a.new_empty(0))
        ctx.call, ctx.op = call, op
        return call.multiply("output", a, b, None if op is None else op.compute)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        _refuse_batch(grad)
        a, b, _ = ctx.saved_tensors
        op, grad_a, grad_b = ctx.op, None, None
        if ctx.needs_input_grad[0]:
            factors = (grad, b.mT) if op is None else (grad, b, op.of_first(a))
            grad_a = ctx.call.multiply("grad_input", *factors).to(a.dtype)
        if ctx.needs_input_grad[1]:
            factors = (a.mT, grad) if op is None else (a, grad, op.of_second(b))
            grad_b = ctx.call.multiply("grad_weight", *factors).to(b.dtype)
        return _once(grad_a, grad, a, b), _once(grad_b, grad, a, b), None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Any:  # noqa: ARG004
        raise PolicyError(
            "An op with a recipe got a tangent of forward-mode differentiation: quantised products have "
            "derivatives in reverse mode alone. Give the layer the rule 'lower_precision_fp' or 'fp32'."
        )


never_compile(_Product.backward)


def _refuse_batch(grad: Tensor) -> None:
    if are_batches([grad]):
        raise PolicyError(
            "An op with a recipe got a batch of gradients, as from autograd.grad(is_grads_batched=True), "
            "jacobian(vectorize=True) or torch.func: quantised products do not support them. Compute the "
            "gradients one by one, or give the layer the rule 'lower_precision_fp' or 'fp32'."
        )


class _DifferentiableOnce(torch.autograd.Function):
    """Makes a gradient depend on what it was computed from, and refuses to differentiate it."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, *sources: Tensor) -> Tensor:  # noqa: ARG004
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # noqa: ARG004
        raise RuntimeError(
            "An op with a recipe was differentiated twice. amp-core has no second derivative for quantised "
            "products: give the layers that need one the rule 'lower_precision_fp' or 'fp32'."
        )


def _once(grad: Tensor | None, *sources: Tensor) -> Tensor | None:
    if grad is None or not torch.is_grad_enabled():
        return grad
    result: Tensor = _DifferentiableOnce.apply(grad, *sources)  # type: ignore[no-untyped-call]
    return result


def product(a: Tensor, b: Tensor, call: Call, op: Bilinear | None = None) -> Tensor:
    """Return ``a @ b``, or what `op` computes, of operands quantised as `call` says; gradients likewise."""
    result: Tensor = _Product.apply(a, b, call, op)  # type: ignore[no-untyped-call]
    return result
