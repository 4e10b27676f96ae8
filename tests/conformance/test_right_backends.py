"""Right but unusual backends: each passes the kit, with its departures declared.

More stand in ``right/``: classes with `passes`, the areas and checks that they meet.
"""

from __future__ import annotations

import functools
import itertools
import runpy
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from amp_backend_cuda.backend import CudaBackend
from amp_core.kernels import GradStats, Portable
from amp_core.plugin import Availability, Refusal
from amp_core.policy import OpPolicy
from amp_core.testing import BackendFixtures, Loopback, check


class Flushing(Portable):
    """Flushes subnormal results, and reads subnormal gradients as zeros."""

    def cast(self, tensors, dtype, out=None):
        return [_flush(r) for r in super().cast(tensors, dtype, out)]

    def add_(self, totals, grads):
        super().add_(totals, grads)
        for total in totals:
            _flush(total)

    def multiply_(self, grads, factor, found_inf=None):
        super().multiply_(grads, factor, found_inf)
        for grad in grads:
            _flush(grad)


def _flush(tensor):
    real = torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor.detach()
    if real.numel() and not real.is_neg() and real.itemsize > 1:
        real.masked_fill_((real.double().abs() < torch.finfo(real.dtype).tiny) & (real != 0), 0.0)
    return tensor


class Flushes(BackendFixtures):
    keeps_subnormals = False


class LiveReason(Loopback):
    """Tells how many bytes are free, which no two calls agree on."""

    calls = itertools.count()

    def availability(self):
        return Availability(True, f"{10**9 - next(self.calls)} bytes free")


class Locking(Portable):
    """Serves one call at a time."""

    def __init__(self):
        super().__init__()
        self.lock = threading.RLock()

    def cast(self, tensors, dtype, out=None):
        with self.lock:
            return super().cast(tensors, dtype, out)

    def multiply_(self, grads, factor, found_inf=None):
        with self.lock:
            super().multiply_(grads, factor, found_inf)


class OneAllocation(Portable):
    """Puts its results into one piece of memory each."""

    def grad_stats(self, grads, norm_type=2.0):
        stats = super().grad_stats(grads, norm_type)
        norms = torch.cat([stats.norm.reshape(1), stats.norms])
        flags = torch.cat([stats.found_inf.reshape(1), stats.nonfinite])
        return GradStats(norms[0], norms[1:], flags[1:], flags[0])


class CachesByLayout(Portable):
    """Keeps what it computed of the shapes, for a bounded number of lists."""

    def __init__(self):
        super().__init__()
        self.known = {}

    def layout(self, tensors):
        key = tuple((t.shape, t.stride(), t.dtype) for t in tensors)
        if len(self.known) > 8:
            self.known.clear()
        return self.known.setdefault(key, len(self.known))


class InItsOwnThread(Portable):
    """Measures in a thread that it keeps, which lets go of a call a moment after it has returned."""

    def __init__(self):
        super().__init__()
        self.pool = ThreadPoolExecutor(1)

    def grad_stats(self, grads, norm_type=2.0):
        if any(type(g) not in (torch.Tensor, torch.nn.Parameter) for g in grads):
            return super().grad_stats(grads, norm_type)
        inference, measure = torch.is_inference_mode_enabled(), super().grad_stats

        def run():
            with torch.no_grad(), torch.inference_mode(inference):
                return measure(grads, norm_type)

        return self.pool.submit(run).result()


class Contiguous(Portable):
    """Works on contiguous copies."""

    def grad_stats(self, grads, norm_type=2.0):
        return super().grad_stats([g.detach().resolve_neg().contiguous() for g in grads], norm_type)

    def add_(self, totals, grads):
        super().add_(totals, [g.detach().resolve_neg().contiguous() for g in grads])


class Unusual(Loopback):
    """Answers in other ways: cached, bound to the class, in several lines; and refuses with errors."""

    aliases = ("processor", "host")
    supported_dtypes = functools.cache(Loopback.supported_dtypes)

    @classmethod
    def availability(cls):
        return Availability(True, "3 devices,\n  2 of them busy")

    def autocast_refusal(self, dtype):
        if dtype in (*self.supported_dtypes(), torch.float32):
            return None
        return Refusal(f"{dtype} is too slow here", error=True)


POLICY = OpPolicy.default("cpu").override({"exp": "fp32", "relu": "lower_precision_fp"})


class Departs(BackendFixtures):
    policy_departures = dict.fromkeys(OpPolicy.default("cpu").diff(POLICY), "faster so")


class Narrow(BackendFixtures):
    """A device without float64, complex numbers and 8-bit floats."""

    supports_float64 = supports_complex = supports_float8 = supports_lazy_signs = False
    norm_rtol = 1e-4  # sums in float32


NUMBERS = ("layouts", "cast", "add", "grad_stats", "multiply", "update")
STATS = "grad_stats or kernels_of_ or views or alive or every_call"
PREPARED = "cast_of_every or multiply_of_every or layout_is or alive or every_call or moment"
RIGHT = {
    "flushes subnormal results": (Loopback(kernels=Flushing()), Flushes, NUMBERS, ""),
    "tells live data": (LiveReason(), None, ("availability", "effects"), ""),
    "locks": (Loopback(kernels=Locking()), None, ("memory", "effects"), ""),
    "allocates once": (Loopback(kernels=OneAllocation()), None, ("layouts", "grad_stats", "memory"), STATS),
    "caches by layout": (Loopback(kernels=CachesByLayout()), None, ("layouts", "memory"), PREPARED),
    "departs from torch's policy": (
        Loopback(policy=POLICY), Departs, ("policy", "regions", "functions"), "",
    ),
    "measures in its own thread": (Loopback(kernels=InItsOwnThread()), None, ("memory",), "moment or alive"),
    "copies": (Loopback(kernels=Contiguous()), None, ("layouts", "add"), "add or kernels_of_no"),
    "answers in other ways": (Unusual(), None, ("availability", "dtypes", "regions"), ""),
    "has no float64": (Loopback(kernels=Portable(has_float64=False)), Narrow, NUMBERS, ""),
}  # fmt: skip


def unusual():
    """Return what stands in ``right/``, as `RIGHT` has it."""
    files = [runpy.run_path(str(path)) for path in sorted(Path(__file__).with_name("right").glob("*.py"))]
    found = {}
    for name, cls in itertools.chain.from_iterable(names.items() for names in files):
        if hasattr(cls, "passes") and getattr(cls, "lacks", True):
            areas, keyword = cls.passes
            fixtures = type(name, (BackendFixtures,), getattr(cls, "declares", {}))
            found[name] = make(cls), fixtures, areas, keyword
    return found


def make(cls):
    if issubclass(cls, Loopback):
        return cls()
    dtypes = getattr(cls, "dtypes", (torch.bfloat16, torch.float16))
    return Loopback(kernels=cls(), dtypes=dtypes, default=None if len(dtypes) > 1 else dtypes[0])


RIGHT |= unusual()


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_backend_passes(name):
    """A maker of an unusual device would have to make it wrong to pass."""
    backend, fixtures, areas, keyword = RIGHT[name]
    report = check(backend, fixtures=fixtures, areas=areas, keyword=keyword)
    failed = [(r.check, r.message) for r in report.results if r.outcome == "failed"]
    assert not failed
    assert {r.area for r in report.results if r.outcome == "passed"} == set(areas)


def test_the_built_in_cuda_backend_may_admit_what_torch_admits(monkeypatch):
    """`amp check cuda` would fail on every GPU: torch's regions on CUDA take float64."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_, **__: True)
    report = check(CudaBackend(), areas=["dtypes", "regions"], keyword="others_refused or refuses_an")
    assert [(r.outcome, r.message) for r in report.results] == [("passed", "")] * 2
