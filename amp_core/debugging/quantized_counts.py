"""Count what recipes did to the operands that they quantised."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor

from amp_core._torch.tensors import numbers
from amp_core.casts.shards import whole
from amp_core.debugging.places import Place
from amp_core.debugging.sink import Where
from amp_core.dispatch.quantized_products import Operand, ScaledProduct
from amp_core.formats import COUNTS
from amp_core.policy.recipes import short


class QuantizedKey(NamedTuple):
    """The key by which quantised operands are counted.

    Attributes:
        phase: ``forward`` or ``backward``.
        place: the model and module.
        role: ``input``, ``weight`` or ``grad_output``.
        format: elements and what shares a scale, such as ``e4m3 per block of 32``.
        rule: the rule of the op.
    """

    phase: str
    place: Place
    role: str
    format: str
    rule: str


def key_of(operand: Operand, where: Where) -> QuantizedKey:
    """Return the key of an operand of a product at `where`."""
    rule = "" if where.module_rule is None else where.module_rule[0]
    return QuantizedKey(where.phase, where.place, operand.role, short(operand.quantization), rule)


@dataclass
class QuantizedCount:
    """The number of operands and of their elements, and of elements by what happened to them.

    Attributes:
        calls: operands.
        elements: elements.
        inf: elements that were inf.
        nan: elements that were NaN.
        saturated: finite elements that were reduced to the largest value of the format.
        flushed: elements other than 0 that became 0.
    """

    calls: int = 0
    elements: int = 0
    inf: int = 0
    nan: int = 0
    saturated: int = 0
    flushed: int = 0


class QuantizedCounts:
    """Adds counts up on the device until they are read."""

    def __init__(self, counts: Mapping[QuantizedKey, QuantizedCount] = MappingProxyType({})) -> None:
        self._counts = defaultdict(QuantizedCount, counts)
        self._on_device: dict[QuantizedKey, Tensor] = {}

    def add(self, product: ScaledProduct, where: Where) -> None:
        """Count the operands of a product."""
        for operand in product.operands:
            key = key_of(operand, where)
            count, known = self._counts[key], self._on_device.get(key)
            counts = whole(operand.quantized.counts)
            count.calls += 1
            count.elements += operand.quantized.shape.numel()
            self._on_device[key] = counts if known is None else known + counts.to(known.device)

    def read(self) -> dict[QuantizedKey, QuantizedCount]:
        """Return all counts; waits for the device."""
        for key, tensor in self._on_device.items():
            count = self._counts[key]
            more = {name: getattr(count, name) + n for name, n in zip(COUNTS, numbers(tensor), strict=True)}
            self._counts[key] = replace(count, **more)
        self._on_device.clear()
        return dict(self._counts)
