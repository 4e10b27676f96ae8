"""Sample every value that a run of a step computes, under names that match across runs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from amp_core._torch.autograd import in_backward
from amp_core._torch.dispatcher import Overload, dispatcher_name
from amp_core._torch.tensors import is_dtensor, part_of
from amp_core.casts.shards import whole
from amp_core.common.identity import WeakIdentityMapping
from amp_core.debugging.fits import Fit, fit_of
from amp_core.debugging.op_kinds import floats_in, results
from amp_core.debugging.places import Lines, Place
from amp_core.debugging.quantized_counts import QuantizedCounts, QuantizedKey, key_of
from amp_core.debugging.sink import BACKWARD, FORWARD, Frame, Sink, Where
from amp_core.debugging.tap import Tap, measuring
from amp_core.debugging.values import extent, fills_memory, in_parts, is_readable
from amp_core.dispatch.quantized_products import ScaledProduct
from amp_core.errors import AmpError
from amp_core.formats import Recipe
from amp_core.formats.recipe import OPERANDS

OP, MODULE, PARAMETER = "op", "module", "parameter"


_DTENSORS = (
    "compare() and advise() cannot tell how the operands of a tensor-parallel product fit a format: each "
    "rank rounds its part of a DTensor. Use format= before parallelize_module(); DDP and FSDP2 work."
)


class Key(NamedTuple):
    """Identifies a value across runs of the same step.

    Attributes:
        level: `OP`, `MODULE` or `PARAMETER`.
        phase: ``forward`` (activations) or ``backward`` (gradients).
        place: the module.
        name: the op, ``output`` of a module, or the parameter.
        call: the number of earlier calls of `name` in this module and phase.
        result: the number of the result, from 0, among those that a call of the op computed.
    """

    level: str
    phase: str
    place: Place
    name: str
    call: int
    result: int = 0


@dataclass(frozen=True)
class Sample:
    """Part of a tensor.

    Attributes:
        values: evenly spaced elements, one-dimensional, float32 or wider.
        dtype: dtype of the tensor.
        shape: shape of the tensor.
        largest: the largest finite magnitude in the tensor.
        not_finite: the number of inf or NaN elements in the tensor.
        parents: the inputs of its op that were computed in the run.
        random: whether the op draws random numbers.
        line: ``file:line`` of the program that called the op; for an op of the backward pass, its forward op.
    """

    values: Tensor
    dtype: torch.dtype
    shape: torch.Size
    largest: float
    not_finite: int
    parents: tuple[Key, ...]
    random: bool
    line: str = ""


@dataclass
class Run:
    """The results of a run.

    Attributes:
        samples: its values, in order of computation.
        ran_backward: whether a backward pass ran.
        scales_itself: whether the step ran it, with whatever loss scale it has.
        scale: the loss scale.
        loss: the loss, if the step returned one.
        loss_producer: the op that produced the loss.
        quantized: the operands that recipes quantised.
        recipe: the last recipe that did.
        fits: how well they fit their formats.
        parameters: how well the parameters of modules without such a product fit them, by name.
        work: the floating-point operations of products with a recipe in the forward pass, by module and op.
    """

    samples: dict[Key, Sample] = field(default_factory=dict)
    ran_backward: bool = False
    scales_itself: bool = False
    scale: float = 1.0
    loss: float | None = None
    loss_producer: Key | None = None
    quantized: QuantizedCounts = field(default_factory=QuantizedCounts)
    recipe: Recipe | None = None
    fits: dict[QuantizedKey, Fit] = field(default_factory=dict)
    parameters: dict[str, Fit] = field(default_factory=dict)
    work: Counter[tuple[Place, str]] = field(default_factory=Counter)

    def has_gradients(self) -> bool:
        """Return whether there is a gradient of a parameter among the values."""
        return any(key.level == PARAMETER for key in self.samples)


class Capture(Sink):
    """A sink for `Tap` that samples the values of a run.

    Args:
        limit: maximum number of elements to keep per tensor.
        on_leaf: called with each leaf tensor that requires a gradient when an op uses it.

    Attributes:
        run: what it has found.
    """

    def __init__(self, limit: int, on_leaf: Callable[[Tensor], None]) -> None:
        self.run = Run()
        self._limit = limit
        self._on_leaf = on_leaf
        self._lines = Lines()
        self._calls: Counter[tuple[Any, ...]] = Counter()
        self._producers: WeakIdentityMapping[torch.UntypedStorage, tuple[Key, ...]] = WeakIdentityMapping()

    def tap(self, model: nn.Module | None, ops: Iterable[str] = ()) -> Tap:
        """Return a `Tap` that reports to this sink, which does not keep it: it holds the models."""
        tap = Tap(self, model, ops)
        tap.places.on_return = self._returned
        return tap

    # Callbacks of the tap.

    def cast(self, source: Tensor, result: Tensor, _where: Where) -> None:
        """Attribute a cast to its source."""
        self.moved([source], [result])

    def moved(self, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        """Attribute a copy to its source."""
        inputs = [*filter(is_readable, inputs)]
        self._set_producers([*filter(is_readable, outputs)], self._producers_of(inputs[:1]))

    def ran(self, op: Overload, inputs: list[Tensor], outputs: list[Tensor], where: Where) -> None:
        """Sample the result of an op that autocast does not affect."""
        self.run.ran_backward |= where.phase == BACKWARD
        if not where.frames:
            random = torch.Tag.nondeterministic_seeded in op.tags
            self._keep(OP, where.phase, where.place, dispatcher_name(op), inputs, outputs, random)
            return
        # Part of an op that autocast handles. The backward pass may read it, so attribute it to that op.
        call = OP, where.phase, where.place, where.frames[0].op
        self._set_producers([*filter(is_readable, outputs)], (Key(*call, self._calls[call]),))

    def multiplied(self, product: ScaledProduct, where: Where) -> None:
        """Count the operands that a recipe quantised, and see how they fit its formats.

        Raises:
            AmpError: they are DTensors.
        """
        if any(map(is_dtensor, product.factors)):
            raise AmpError(_DTENSORS)
        run = self.run
        run.quantized.add(product, where)
        run.recipe = product.rule.recipe
        exact = dict(zip(OPERANDS[product.name], product.factors, strict=True))
        for operand in product.operands:
            key = key_of(operand, where)
            run.fits[key] = run.fits.get(key, Fit()) + fit_of(exact[operand.role], operand.quantized)
        if where.frames and not in_backward():  # checkpoints that are recomputed count once
            run.work[where.place, where.frames[-1].op] += _work(where.frames[-1].op, product)

    def communicated(
        self, kind: str, of: str, inputs: list[Tensor], outputs: list[Tensor], where: Where
    ) -> None:
        """Attribute what arrives to what this rank contributed."""
        del kind, of, where
        self.moved(inputs, outputs)

    def framed(self, frame: Frame, inputs: list[Tensor], outputs: list[Tensor], where: Where) -> None:
        """Sample the result of an op that autocast may have changed."""
        if not where.frames and outputs:
            self._keep(OP, where.phase, where.place, frame.op, inputs, outputs)

    def _returned(self, place: Place, given: Any, result: Any) -> None:
        with measuring():
            inputs, outputs = floats_in(given), floats_in(result)
            if not outputs:
                return
            self._keep(MODULE, FORWARD, place, "output", inputs, outputs[:1])
            if outputs[0].requires_grad:
                outputs[0].register_hook(lambda grad: self._gradient(place, grad))  # type: ignore[no-untyped-call]

    def _gradient(self, place: Place, gradient: Tensor | None) -> None:
        with measuring():
            self._keep(MODULE, BACKWARD, place, "output", [], floats_in(gradient))

    def parameter(self, place: Place, name: str, gradient: Tensor) -> None:
        """Sample the first gradient of a parameter."""
        if not self._calls[PARAMETER, BACKWARD, place, name]:
            self._keep(PARAMETER, BACKWARD, place, name, [gradient], [gradient])

    def _keep(
        self,
        level: str,
        phase: str,
        place: Place,
        name: str,
        inputs: list[Tensor],
        outputs: list[Tensor],
        random: bool = False,
    ) -> None:
        inputs, outputs = [*filter(is_readable, inputs)], [*filter(is_readable, outputs)]
        if not outputs:
            return
        if phase == FORWARD:
            for leaf in (tensor for tensor in inputs if tensor.is_leaf and tensor.requires_grad):
                self._on_leaf(leaf)
        call = self._calls[level, phase, place, name]
        self._calls[level, phase, place, name] += 1
        key = Key(level, phase, place, name, call)
        parents = self._producers_of(inputs)
        is_op = level == OP  # modules and parameters only hand on what an op produced
        line = self._lines.of_op(phase == BACKWARD) if is_op else ""
        kept = results(name, outputs) if is_op else outputs
        if is_op:
            self._set_producers(outputs[len(kept) :], (key,))
        for number, output in enumerate(kept):
            one = key._replace(result=number)
            self.run.samples[one] = _sample(output, self._limit, parents, random, line)
            if is_op:
                self._set_producers([output], (one,))

    # Producers by storage: torch keeps one Python object per storage for the storage's lifetime.

    def _set_producers(self, tensors: list[Tensor], keys: tuple[Key, ...]) -> None:
        for tensor in tensors:
            memory = _storage(tensor)
            rest = () if fills_memory(_part(tensor)) else self._producers.get(memory, ())
            self._producers[memory] = tuple(dict.fromkeys((*rest, *keys)))

    def _producers_of(self, tensors: list[Tensor]) -> tuple[Key, ...]:
        found = (key for tensor in tensors for key in self._producers.get(_storage(tensor), ()))
        return tuple(dict.fromkeys(found))

    def producer(self, tensor: Tensor) -> Key | None:
        """Return the op that last wrote to the memory of `tensor`; None if the run did not compute it."""
        return next(reversed(self._producers_of([tensor])), None)


def _work(op: str, product: ScaledProduct) -> int:
    """Return the floating-point operations of a product in `op`, as `amp_core.dispatch.work` counts them."""
    a, b = product.factors
    if "::conv" in op:  # the output uses each weight once, or the input does
        return 2 * (a if "transpose" in op else product.result).numel() * math.prod(b.shape[1:])
    return 2 * min(a.numel() * b.shape[-1], b.numel() * a.shape[-2])


@torch.no_grad()
@measuring()
def _storage(tensor: Tensor) -> torch.UntypedStorage:
    """Return the memory of this rank's part, also of one that a collective has yet to deliver."""
    return _part(tensor).untyped_storage()


def _part(tensor: Tensor) -> Tensor:
    part: Any = part_of(tensor)
    return getattr(part, "elem", part)  # type: ignore[no-any-return]


@torch.no_grad()
def _sample(tensor: Tensor, limit: int, parents: tuple[Key, ...], random: bool, line: str) -> Sample:
    real = in_parts(whole(tensor.detach()))
    flat = real.reshape(-1)
    step = max(1, -(-flat.numel() // limit))
    wide = torch.float64 if flat.dtype is torch.float64 else torch.float32
    values = flat[::step].to(wide, copy=True)
    return Sample(values, tensor.dtype, real.shape, *extent(flat), parents, random, line)
