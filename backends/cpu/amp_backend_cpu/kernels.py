"""The CPU's kernels: compiled ones if the library was built, else the portable ones."""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from amp_backend_cpu import library as _library
from amp_backend_cpu.storage import StorageKernels
from amp_core._torch.steps import unscale_
from amp_core.kernels import GradStats, Kernels, Portable
from amp_core.kernels.memory import are_numbers, are_plain, on_host, read

if TYPE_CHECKING:  # few programs have recipes
    from amp_core.formats import Quantization, Quantized

_CODES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
_CPU = torch.device("cpu")
_LARGE = 1 << 22  # elements: above this, streaming stores matter
# torch's kernel, which has no arguments to pack, unscales fewer small tensors than this in less time.
_FEW = 24
# It takes as long for this many elements as for one tensor more.
_AS_LONG_AS_ONE = 192 if torch.backends.cpu.get_cpu_capability() == "DEFAULT" else 1024
_ADDRESS = "L" if array("L").itemsize == 8 else "Q"  # filling "L" takes half the time


class Compiled(StorageKernels):
    """Plain C with OpenMP, for the instruction set that torch uses.

    It handles dense tensors. Calls with any other tensor (complex, strided, fake, of a subclass), another
    norm order, or a cast to the same dtype use the portable kernels.
    """

    name = "compiled"
    sums_are_fast = True

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._tuning = _library.Tuning(library)

    def __reduce__(self) -> tuple[Any, ...]:
        return load, ()  # handles of a library cannot be copied

    @property
    def reason(self) -> str:  # type: ignore[override]  # measured on first use
        used = _library.instruction_set(self._library)
        return f"{used}, OpenMP; {self._tuning}; a few small gradients by torch"

    def layout(self, tensors: Sequence[Tensor]) -> object:
        return _Layout(tensors)

    def prepare(self, tensors: Sequence[Tensor], layout: object = None) -> Sequence[Tensor]:
        return _Table(tensors, layout if type(layout) is _Layout else _Layout(tensors))

    def grad_stats(self, grads: Sequence[Tensor], norm_type: float = 2.0) -> GradStats:
        table = _table_of(grads) if norm_type == 2.0 else None
        if table is None:
            return super().grad_stats(grads, norm_type)
        dtype = torch.float64 if table.layout.wide else torch.float32
        norms, norm = _empty(len(grads), dtype), _empty((), dtype)
        nonfinite, found_inf = _empty(len(grads), torch.float32), _empty((), torch.float32)
        outputs = [t.data_ptr() for t in (norms, nonfinite, norm, found_inf)]
        arguments = _library.pack_grad_stats(*table.arguments, table.threads(), *outputs, table.layout.wide)
        _check(self._library.amp_grad_stats(arguments))
        return GradStats(norm, norms, nonfinite, found_inf)

    def multiply_(self, grads: Sequence[Tensor], factor: Tensor, found_inf: Tensor | None = None) -> None:
        if found_inf is not None and type(grads) is _Table and grads.suits_torch() and _shrinks(factor):
            unscale_(grads, found_inf, factor)
            increment_version([*grads, found_inf])  # torch's kernel does not
            return None
        flags = [] if found_inf is None else [found_inf]
        table = _table_of(grads)
        if table is None or not are_numbers([factor, *flags], _CPU):
            return super().multiply_(grads, factor, found_inf)
        flag = 0 if found_inf is None else found_inf.data_ptr()
        arguments = _library.pack_multiply(*table.arguments, table.threads(), factor.data_ptr(), flag)
        _check(self._library.amp_multiply(arguments))
        increment_version([*table, *flags])
        return None

    def cast(
        self, tensors: Sequence[Tensor], dtype: torch.dtype, out: Sequence[Tensor] | None = None
    ) -> list[Tensor]:
        targets = [torch.empty_like(t, dtype=dtype) for t in tensors] if out is None else list(out)
        source, target = _table_of(tensors), _table_of(targets)
        if source is None or target is None or not _to_others(tensors, targets):
            return super().cast(tensors, dtype, targets)
        if not self._tuning.settled and source.layout.elements >= _LARGE:
            self._tuning.settle()
        _, to, _, codes = target.arguments
        _check(self._library.amp_cast(_library.pack_cast(*source.arguments, source.threads(), to, codes)))
        increment_version(targets)
        return targets

    def add_(self, totals: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        source, target = _table_of(grads), _table_of(totals)
        if source is None or target is None or not _halves_to_float32(totals, grads):
            return super().add_(totals, grads)
        _, to, _, _ = target.arguments
        _check(self._library.amp_add(_library.pack_add(*source.arguments, source.threads(), to)))
        increment_version(totals)
        return None

    def quantize(
        self,
        tensor: Tensor,
        quantization: Quantization,
        dim: int = -1,
        *,
        seed: int | Tensor | None = None,
        amax: Tensor | None = None,
        packed: bool = False,
    ) -> Quantized:
        from amp_backend_cpu.quantizing import CompiledPasses, takes
        from amp_core.formats.quantize import quantize_by

        if not takes(tensor, dim):
            return super().quantize(tensor, quantization, dim, seed=seed, amax=amax, packed=packed)
        passes = CompiledPasses(self._library)
        return quantize_by(passes, tensor, quantization, dim, seed=seed, amax=amax, packed=packed)


def _empty(shape: int | tuple[()], dtype: torch.dtype) -> Tensor:
    # Pass the device explicitly because the default device may differ.
    return torch.empty(shape, dtype=dtype, device=_CPU)


def _to_others(tensors: Sequence[Tensor], targets: Sequence[Tensor]) -> bool:
    """Return whether each cast changes the dtype and keeps the shape and layout."""
    pairs = list(zip(tensors, targets, strict=True))
    return all(t.shape == o.shape and t.stride() == o.stride() and t.dtype is not o.dtype for t, o in pairs)


def _halves_to_float32(totals: Sequence[Tensor], grads: Sequence[Tensor]) -> bool:
    """Return whether 16-bit `grads` are added to float32 totals of the same layout."""
    same = all(t.shape == g.shape and t.stride() == g.stride() for t, g in zip(totals, grads, strict=True))
    return same and {t.dtype for t in totals} == {torch.float32} and all(g.itemsize == 2 for g in grads)


class _Layout:
    """The library's arguments for a list of tensors, except addresses.

    Computing them takes most of the time of a call on small tensors.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.fits = bool(tensors) and are_plain(tensors, _CPU, _CODES.keys())
        """Whether the library supports such tensors."""
        self.few = False
        """Whether torch's kernel multiplies them in less time than it takes to read their addresses."""
        if self.fits:
            self.sizes = array("q", [t.numel() for t in tensors])
            self.codes = array("i", [_CODES[t.dtype] for t in tensors])
            self.addresses = [a.buffer_info()[0] for a in (self.sizes, self.codes)]
            self.elements = sum(self.sizes)
            self.wide = _CODES[torch.float64] in self.codes
            size = len(tensors) + self.elements / _AS_LONG_AS_ONE
            self.few = size < _FEW and not any(self.codes) and not any(map(_is_special, tensors))


def _is_special(tensor: Tensor) -> bool:
    """Return whether torch refuses to write to `tensor` in some modes."""
    return tensor.requires_grad or tensor.is_inference()


def _shrinks(factor: Tensor) -> bool:
    """Return whether the host can see that no product with `factor` overflows."""
    return on_host(factor) and -1.0 <= read(factor) <= 1.0


class _Table(list[Tensor]):
    """Tensors, with the library's arguments for them once these are needed."""

    __slots__ = ("_addresses", "_reads", "arguments", "layout")

    def __init__(self, tensors: Sequence[Tensor], layout: _Layout) -> None:
        super().__init__(tensors)
        self.layout = layout
        self._reads: bool | None = None

    def suits_torch(self) -> bool:
        """Return whether torch's kernel multiplies them in less time: not once the addresses are there."""
        return self.layout.few and self._reads is None

    def reads(self) -> bool:
        """Read the addresses, once; return whether the library supports the tensors."""
        if self._reads is None:
            self._reads = self.layout.fits and self._read()
        return self._reads

    def _read(self) -> bool:
        self._addresses = array(_ADDRESS, list(map(Tensor.data_ptr, self)))
        self.arguments = (len(self), self._addresses.buffer_info()[0], *self.layout.addresses)
        # memory of a nonempty tensor may have been freed
        return 0 not in self._addresses or all([t.data_ptr() or not t.numel() for t in self])

    def threads(self) -> int:
        return _library.threads_for(self.layout.elements)


def _table_of(tensors: Sequence[Tensor]) -> _Table | None:
    table = tensors if type(tensors) is _Table else _Table(tensors, _Layout(tensors))
    return table if table.reads() else None


def _check(status: int) -> None:
    if status != 0:
        raise MemoryError("amp-core's compiled CPU kernels could not allocate memory for their work lists.")


@functools.cache
def load() -> Kernels:
    """Return the compiled kernels, or the portable ones with the reason."""
    try:
        return Compiled(_library.load())
    except _library.LibraryMissingError as error:
        kernels = Portable()
        kernels.sums_are_fast = True
        kernels.reason = str(error)
        return kernels
