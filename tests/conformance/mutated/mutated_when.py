"""When a mutated kernel goes wrong: of a tensor, its place in the list, its values, or the call's context."""

from __future__ import annotations

import itertools
import threading

import torch
from torch._subclasses.fake_tensor import FakeTensor

LOW = (torch.float16, torch.bfloat16)
DTYPES = (*LOW, torch.float32, torch.float64)


def _permuted(t):
    return not t.is_contiguous()


def _rows(t):
    return t.dim() > 1 and t.stride(-1) == 1 and t.stride(-2) > t.size(-1)


def _dense(t):
    return t.numel() == 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))


def _values(t):
    """Return real numbers to look at, or none where there is nothing to see."""
    if isinstance(t, FakeTensor) or torch._C._functorch.maybe_current_level() is not None or t.is_meta:
        return torch.zeros(0, device="cpu")
    t = t.detach().resolve_conj().resolve_neg()
    return (torch.view_as_real(t) if t.is_complex() else t).double().reshape(-1)


def _alike(i, pairs, of):
    return any(of(pairs[j][0]) == of(pairs[i][0]) for j in range(i))


# Each takes the source, the target, the place and all pairs.
LAYOUT = {
    "4-d channels_last": lambda s, *_: (
        s.dim() == 4 and s.is_contiguous(memory_format=torch.channels_last) and _permuted(s)
    ),
    "5-d channels_last_3d": lambda s, *_: (
        s.dim() == 5 and s.is_contiguous(memory_format=torch.channels_last_3d) and _permuted(s)
    ),
    "transposed": lambda s, *_: s.dim() == 2 and s.stride(0) == 1 and s.stride(1) >= s.size(0) > 1,
    "more than four dimensions": lambda s, *_: s.dim() > 4,
    "more than eight dimensions, permuted": lambda s, *_: s.dim() > 8 and _permuted(s),
    "no dimensions": lambda s, *_: s.dim() == 0,
    "expanded": lambda s, *_: 0 in s.stride() and s.numel() > 1,
    "expanded in the last dimension": lambda s, *_: s.dim() > 1 and s.stride()[-1] == 0 != s.stride()[0],
    "windows": lambda s, *_: s.dim() > 1 and set(s.stride()) == {1} and min(s.shape) > 1,
    "negated": lambda s, *_: s.is_neg(),
    "conjugated": lambda s, *_: s.is_conj(),
    "an odd offset": lambda s, *_: s.storage_offset() % 2 == 1,
    "gaps": lambda s, *_: s.dim() > 0 and s.stride(-1) == 2 and s.size(-1) > 1,
    "padded rows": lambda s, *_: _rows(s),
    "padded rows of three dimensions": lambda s, *_: s.dim() == 3 and _rows(s),
    "permuted, dense, of three dimensions": lambda s, *_: s.dim() == 3 and _permuted(s) and _dense(s),
    "dimensions of one": lambda s, *_: s.dim() > 1 and 1 in s.shape,
    "part of a larger storage": lambda s, *_: s.numel() * s.itemsize < s.untyped_storage().nbytes(),
}  # fmt: skip
TWO = {  # of source and target
    "target lies otherwise": lambda s, t, *_: s.stride() != t.stride(),
    "source permuted, target contiguous": lambda s, t, *_: _permuted(s) and not _permuted(t),
    "source contiguous, target permuted": lambda s, t, *_: not _permuted(s) and _permuted(t),
    "both permuted, not alike": lambda s, t, *_: _permuted(s) and _permuted(t) and s.stride() != t.stride(),
    "target negated": lambda s, t, *_: t.is_neg(),
    "source and target negated": lambda s, t, *_: s.is_neg() and t.is_neg(),
    "target of padded rows": lambda s, t, *_: _rows(t),
    "target with gaps, source negated": lambda s, t, *_: t.dim() > 0 and t.stride(-1) == 2 and s.is_neg(),
    "target a parameter": lambda s, t, *_: isinstance(t, torch.nn.Parameter),
    "target with a graph": lambda s, t, *_: t.grad_fn is not None,
    "expanded into padded rows": lambda s, t, *_: 0 in s.stride() and s.numel() > 1 and _rows(t),
    "source and target of one dtype, lying otherwise": lambda s, t, *_: (
        s.dtype is t.dtype and s.stride() != t.stride()
    ),
    **{
        f"{a} to {b}".replace("torch.", ""): lambda s, t, *_, a=a, b=b: s.dtype is a and t.dtype is b
        for a, b in itertools.product(DTYPES, repeat=2)
    },
    "float8 to float32": lambda s, t, *_: s.itemsize == 1 and t.dtype is torch.float32,
    "float32 to float8": lambda s, t, *_: t.itemsize == 1 and s.dtype is torch.float32,
    "float8 to float8, permuted": lambda s, t, *_: s.itemsize == 1 == t.itemsize and _permuted(s),
}  # fmt: skip
KIND = {
    **{str(d)[6:]: lambda s, *_, d=d: s.dtype is d for d in DTYPES},
    "float64, permuted": lambda s, *_: s.dtype is torch.float64 and _permuted(s),
    "bfloat16, an odd offset": lambda s, *_: s.dtype is torch.bfloat16 and s.storage_offset() % 2 == 1,
    "float16, more than four dimensions": lambda s, *_: s.dtype is torch.float16 and s.dim() > 4,
    "a parameter": lambda s, *_: isinstance(s, torch.nn.Parameter),
    "a leaf that requires gradients": lambda s, *_: s.requires_grad and s.is_leaf and s.dim() > 1,
    "a graph": lambda s, *_: s.grad_fn is not None,
    "an inference tensor": lambda s, *_: s.is_inference(),
}
COMPLEX = {
    "complex": lambda s, *_: s.is_complex(),
    "complex64, permuted": lambda s, *_: s.dtype is torch.complex64 and _permuted(s),
    "complex128": lambda s, *_: s.dtype is torch.complex128,
    "complex, conjugated and permuted": lambda s, *_: s.is_conj() and _permuted(s),
}
PLACE = {
    "the third": lambda s, t, i, pairs: i == 2,
    "the last": lambda s, t, i, pairs: i == len(pairs) - 1 > 0,
    "the first of many": lambda s, t, i, pairs: i == 0 and len(pairs) > 9,
    "the 65th": lambda s, t, i, pairs: i == 64,
    "beyond 1024": lambda s, t, i, pairs: i == 1024,
    "beyond 4096": lambda s, t, i, pairs: i >= 4096,
    "the second of its dtype": lambda s, t, i, pairs: sum(p[0].dtype is s.dtype for p in pairs[:i]) == 1,
    "not of the first's dtype": lambda s, t, i, pairs: s.dtype is not pairs[0][0].dtype,
    "after an empty one": lambda s, t, i, pairs: i > 0 and pairs[i - 1][0].numel() == 0,
    "twice in the list": lambda s, t, i, pairs: i < 99 and _alike(i, pairs, id),
    "at an earlier one's address": lambda s, t, i, pairs: (
        i < 99
        and s.numel() > 0
        and not isinstance(s, FakeTensor)
        and torch._C._functorch.maybe_current_level() is None
        and _alike(i, pairs, torch.Tensor.data_ptr)
    ),
    "alone": lambda s, t, i, pairs: len(pairs) == 1,
    "one of two": lambda s, t, i, pairs: len(pairs) == 2,
}
SIZE = {
    "one element": lambda s, *_: s.numel() == 1,
    "three elements": lambda s, *_: s.numel() == 3,
    "17 elements": lambda s, *_: s.numel() == 17,
    "no multiple of eight": lambda s, *_: s.numel() % 8 and s.numel() > 8,
    "a multiple of 64": lambda s, *_: s.numel() and s.numel() % 64 == 0,
    "over a thousand": lambda s, *_: 1000 < s.numel() < 10_000,
    "over a million": lambda s, *_: s.numel() > 1_000_000,
}
VALUES = {
    "with a NaN": lambda s, *_: bool(_values(s).isnan().any()),
    "with an inf": lambda s, *_: bool(_values(s).isinf().any()),
    "with -inf": lambda s, *_: bool((_values(s) == -torch.inf).any()),
    "of zeros": lambda s, *_: s.numel() > 1 and not bool(_values(s).any()),
    "with a subnormal": lambda s, *_: bool(
        ((_values(s) != 0) & (_values(s).abs() < torch.finfo(s.dtype).tiny)).any()
    ),
    "with numbers over 1e30": lambda s, *_: bool((_values(s).abs() > 1e30).any()),
    "with numbers below 1e-30": lambda s, *_: bool(
        ((_values(s) != 0) & (_values(s).abs() < 1e-30)).any()
    ),
    "that ends with inf": lambda s, *_: bool(_values(s)[-1:].isinf().any()),
}  # fmt: skip

# Each takes the call.
CONTEXT = {
    "inference mode": lambda c: torch.is_inference_mode_enabled(),
    "no_grad": lambda c: not torch.is_grad_enabled() and not torch.is_inference_mode_enabled(),
    "grad mode": lambda c: torch.is_grad_enabled(),
    "a region": lambda c: torch.is_autocast_enabled("cpu"),
    "a region, with gradients": lambda c: torch.is_autocast_enabled("cpu") and torch.is_grad_enabled(),
    "a region in inference mode": lambda c: (
        torch.is_autocast_enabled("cpu") and torch.is_inference_mode_enabled()
    ),
    "a default dtype of float64": lambda c: torch.get_default_dtype() is torch.float64,
    "a default dtype of float16": lambda c: torch.get_default_dtype() is torch.float16,
    "another default device": lambda c: torch.get_default_device().type != "cpu",
    "a dispatch mode": lambda c: c.mode and not c.fake,
    "FakeTensors": lambda c: c.fake,
    "torch.func": lambda c: torch._C._functorch.maybe_current_level() is not None,
    "a backward pass": lambda c: torch._C._current_graph_task_id() != -1,
    "deterministic algorithms": lambda c: torch.are_deterministic_algorithms_enabled(),
    "anomaly mode": lambda c: torch.is_anomaly_enabled(),
    "another thread": lambda c: threading.current_thread() is not threading.main_thread(),
}
CALL = {
    "a tuple": lambda c: type(c.given) is tuple and len(c.given) > 0,
    "a list": lambda c: type(c.given) is list and len(c.given) > 0,
    "a list of one": lambda c: len(c.given) == 1,
    "the same list as before": lambda c: c.again("list", [id(c.given)]),
    "the same tensors as before": lambda c: len(c.given) > 0 and c.again("tensors", map(id, c.given)),
    "the addresses of before": lambda c: (
        len(c.given) > 0
        and not c.fake
        and torch._C._functorch.maybe_current_level() is None
        and c.again("addresses", [t.data_ptr() for t in c.given])
    ),
    "the shapes of before": lambda c: (
        len(c.given) > 0 and c.again("shapes", [(t.shape, t.dtype) for t in c.given])
    ),
    "the shapes of before, other strides": lambda c: (
        len(c.given) > 0
        and c.again("shapes", [(t.shape, t.dtype) for t in c.given])
        and not c.again("strides", [(t.shape, t.dtype, t.stride()) for t in c.given])
    ),
    "more than 30 calls": lambda c: c.number > 30,
    "while another call runs": lambda c: c.busy > 1,
}
