"""Right kernels that work in unusual ways; `passes` are areas and checks, `declares` is what fixtures say."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace

import torch

from amp_core._torch.tracing import functorch_is_at_work
from amp_core.kernels import PORTABLE, GradStats, Kernels, Portable
from amp_core.kernels.interface import check_shapes

NUMBERS = (("layouts", "cast", "add", "grad_stats", "multiply", "update"), "")


def plain(tensors):
    """Whether `tensors` have memory: neither fake nor of torch.func."""
    return {*map(type, tensors)} <= {torch.Tensor, torch.nn.Parameter} and not functorch_is_at_work()


def parts(stats):
    return {field.name: getattr(stats, field.name) for field in fields(GradStats)}


class InChunks(Portable):
    """Three tensors at a time."""

    passes = (("layouts", "grad_stats"), "kernels_of_ or mixed or nothing")

    def cast(self, tensors, dtype, out=None):
        targets = [torch.empty_like(t, dtype=dtype) for t in tensors] if out is None else out
        check_shapes(tensors, targets, "out", "tensors")
        for i in range(0, len(tensors), 3):
            super().cast(tensors[i : i + 3], dtype, targets[i : i + 3])
        return list(targets)

    def multiply_(self, grads, factor, found_inf=None):
        for i in range(0, len(grads), 3):
            super().multiply_(grads[i : i + 3], factor, found_inf)

    def grad_stats(self, grads, norm_type=2.0):
        chunks = [
            super(InChunks, self).grad_stats(grads[i : i + 3], norm_type) for i in range(0, len(grads), 3)
        ]
        if len(chunks) < 2:
            return super().grad_stats(grads, norm_type)
        norms, bad = torch.cat([c.norms for c in chunks]), torch.cat([c.nonfinite for c in chunks])
        norm = torch.linalg.vector_norm(norms.double(), norm_type).to(norms.dtype)
        return GradStats(norm, norms, bad, bad.amax())


class Staging(Portable):
    """Works in dense copies that it writes back."""

    passes = (("layouts", "multiply"), "multiply or add_of or cast_into or views")

    def _staged(self, written, call):
        if not plain(written):
            return call(written)
        staged = [torch.empty(t.shape, dtype=t.dtype, device=t.device).copy_(t.detach()) for t in written]
        call(staged)
        with torch.no_grad():
            for target, copy in zip(written, staged, strict=True):
                target.detach().copy_(copy)
        return written

    def multiply_(self, grads, factor, found_inf=None):
        self._staged(grads, lambda staged: super(Staging, self).multiply_(staged, factor, found_inf))

    def add_(self, totals, grads):
        check_shapes(grads, totals, "totals", "grads")
        self._staged(totals, lambda staged: super(Staging, self).add_(staged, grads))

    def cast(self, tensors, dtype, out=None):
        if out is None:
            return super().cast(tensors, dtype)
        check_shapes(tensors, out, "out", "tensors")
        self._staged(out, lambda staged: super(Staging, self).cast(tensors, dtype, staged))
        return list(out)


class Pooling(Portable):
    """Gives parts of one buffer, each of which starts at a multiple of 16 elements."""

    passes = (("layouts", "memory", "cast"), "cast or views or kernels_of_ or alive or moment")

    def cast(self, tensors, dtype, out=None):
        if out is not None or not tensors or not plain(tensors):
            return super().cast(tensors, dtype, out)
        like = [torch.empty_like(t, dtype=dtype, device="meta") for t in tensors]
        ends = [*itertools.accumulate((-(-t.numel() // 16) * 16 for t in tensors), initial=16)]
        pool = torch.empty(ends[-1] + 16, dtype=dtype, device=tensors[0].device)
        places = zip(like, ends, strict=False)
        return super().cast(
            tensors, dtype, [torch.as_strided(pool, t.shape, t.stride(), at) for t, at in places]
        )


class InAnotherThread(Portable):
    """Computes in a thread of its own, and waits for it."""

    passes = (("memory", "effects", "contexts"), "moment or alive or thread or say or region or grad_mode")

    def __init__(self):
        super().__init__()
        self._pool = ThreadPoolExecutor(1)

    def _there(self, tensors, call):
        if not plain(tensors) or torch.utils._python_dispatch._get_current_dispatch_mode() is not None:
            return call()
        inference = torch.is_inference_mode_enabled()

        def run():
            with torch.inference_mode(inference):
                return call()

        return self._pool.submit(run).result()

    def cast(self, tensors, dtype, out=None):
        call = super().cast
        return self._there([*tensors, *(out or ())], lambda: call(tensors, dtype, out))

    def add_(self, totals, grads):
        call = super().add_
        self._there([*totals, *grads], lambda: call(totals, grads))

    def grad_stats(self, grads, norm_type=2.0):
        call = super().grad_stats
        return self._there(grads, lambda: call(grads, norm_type))

    def multiply_(self, grads, factor, found_inf=None):
        call = super().multiply_
        self._there([*grads, factor], lambda: call(grads, factor, found_inf))

    def update_scale_(self, state, found_inf, schedule):
        call = super().update_scale_
        self._there([found_inf], lambda: call(state, found_inf, schedule))


def flushed(tensor):
    """Return `tensor` with zeros for subnormal numbers."""
    if not plain([tensor]) or tensor.itemsize == 1:
        return tensor
    values = tensor.detach().resolve_neg().resolve_conj().clone()
    real = torch.view_as_real(values) if values.is_complex() else values
    real.masked_fill_(real.abs() < torch.finfo(real.dtype).tiny, 0.0)
    return values


def flush_(tensor):
    if not tensor.is_neg() and not tensor.is_conj() and tensor.itemsize > 1:
        with torch.no_grad(), torch.inference_mode(tensor.is_inference()):
            tensor.detach().copy_(flushed(tensor))
    return tensor


class ReadsSubnormalsAsZeros(Portable):
    """Flushes them in what it reads and in what it gives."""

    passes = NUMBERS
    declares = {"keeps_subnormals": False}  # noqa: RUF012

    def cast(self, tensors, dtype, out=None):
        targets = [torch.empty_like(t, dtype=dtype) for t in tensors] if out is None else out
        return [*map(flush_, super().cast([flushed(t) for t in tensors], dtype, targets))]

    def add_(self, totals, grads):
        super().add_(totals, [*map(flushed, grads)])
        for total in totals:
            flush_(total)

    def multiply_(self, grads, factor, found_inf=None):
        super().multiply_(grads, flushed(factor), found_inf)
        for grad in grads:
            flush_(grad)

    def grad_stats(self, grads, norm_type=2.0):
        stats = super().grad_stats([*map(flushed, grads)], norm_type)
        return GradStats(**{name: flush_(value) for name, value in parts(stats).items()})

    def update_scale_(self, state, found_inf, schedule):
        flush_(state.scale)
        super().update_scale_(state, flushed(found_inf), schedule)
        flush_(state.scale)


class MultipliesOneStepOff(Portable):
    """Gives the next float32 number, as a device without correct rounding may."""

    passes = (("layouts", "memory", "multiply", "scaler"), "multiply or scaler or thousands or large")
    declares = {"product_ulps": 1}  # noqa: RUF012

    def multiply_(self, grads, factor, found_inf=None):
        super().multiply_(grads, factor, found_inf)
        for grad in grads:
            if plain([grad]) and grad.dtype is torch.float32:
                real = grad.detach()
                inside = (real.abs() > 1e-30) & (real.abs() < 1e30)
                real.copy_(torch.where(inside, real.nextafter(torch.full_like(real, math.inf)), real))


class MeasuresRoughly(Portable):
    """Sums in a way that loses three digits."""

    passes = (("layouts", "grad_stats", "scaler"), "grad_stats or clips or kernels_of_")
    declares = {"norm_rtol": 1e-3}  # noqa: RUF012

    def grad_stats(self, grads, norm_type=2.0):
        stats = super().grad_stats(grads, norm_type)
        return replace(stats, norm=stats.norm * 0.9995, norms=stats.norms * 0.9995)


@dataclass(frozen=True)
class Timed(GradStats):
    seconds: float = 0.0


class TellsMoreThanItMust(Portable):
    """Returns a subclass of `GradStats`, with a number."""

    passes = (("layouts", "grad_stats", "memory", "contexts"), "grad_stats or alive or fake or transforms")

    def grad_stats(self, grads, norm_type=2.0):
        return Timed(**parts(super().grad_stats(grads, norm_type)), seconds=1.5)


class Batch(Sequence):
    """Tensors in a class that is no list."""

    def __init__(self, tensors):
        self._tensors = tuple(tensors)

    def __len__(self):
        return len(self._tensors)

    def __getitem__(self, place):
        return self._tensors[place]


class PreparesAnotherSequence(Portable):
    """Prepares neither a list nor a tuple."""

    passes = (("layouts", "memory"), "grad_stats or multiply or moment or no_tensors or layout_is")

    def prepare(self, tensors, layout=None):
        return Batch(tensors)


class OnlyWhatIsAbstract(Kernels):
    """Inherits whatever it may."""

    passes = (("cast", "add", "update", "storage", "quantize", "effects"), "not threads")
    name = "own"

    def cast(self, tensors, dtype, out=None):
        return PORTABLE.cast(tensors, dtype, out)

    def grad_stats(self, grads, norm_type=2.0):
        return PORTABLE.grad_stats(grads, norm_type)

    def multiply_(self, grads, factor, found_inf=None):
        PORTABLE.multiply_(grads, factor, found_inf)

    def update_scale_(self, state, found_inf, schedule):
        PORTABLE.update_scale_(state, found_inf, schedule)


class CopiesOnWrite(Portable):
    """Gives lazy copies where the dtype stays the same."""

    passes = (("layouts", "memory", "cast"), "cast or views or kernels_of_ or alive")

    def cast(self, tensors, dtype, out=None):
        alike = plain(tensors) and all(t.dtype is dtype and t.is_contiguous() for t in tensors)
        if out is not None or not alike or any(t.is_neg() for t in tensors):
            return super().cast(tensors, dtype, out)
        return [torch._lazy_clone(t.detach()) for t in tensors]


class LaysOutInAList(Portable):
    """Its layout is a list of numbers."""

    passes = (("memory",), "alive or layout_is")

    def layout(self, tensors):
        return [t.numel() for t in tensors]
