"""What a mutated kernel does wrong, to a tensor or to the call."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor


def _at(t, index):
    return t.detach()[tuple((index % n) for n in t.shape)] if t.dim() else t.detach()


def poke(t, index=0):
    """Change one element: the first, the last, or one between."""
    if t.numel():
        with torch.no_grad(), torch.inference_mode(t.is_inference()):
            place = _at(t, index)
            place.copy_(torch.where(place == 1, torch.full_like(place, 2), torch.ones_like(place)))


def _change(t, values):
    with torch.no_grad(), torch.inference_mode(t.is_inference()):
        t.detach().copy_(values)


def _beyond(t, which):
    """Return the element of the storage before or after those of `t`; none where there is none."""
    last = t.storage_offset() + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    place = last + 1 if which > 0 else t.storage_offset() - 1
    room = t.untyped_storage().nbytes() // t.itemsize
    there = t.numel() and 0 <= place < room
    return torch.as_strided(t.detach(), (int(there),), (1,), max(place, 0))


def _real(t):
    return torch.view_as_real(t) if t.is_complex() else t


def _skip(t):
    return isinstance(t, FakeTensor) or t.itemsize == 1


# What is done to a written tensor or a result; each takes the source, the target and what the target was.
VALUES = {
    "the first element wrong": lambda s, t, before: poke(t, 0),
    "the last element wrong": lambda s, t, before: poke(t, -1),
    "an element between wrong": lambda s, t, before: poke(t, 1),
    "zeros": lambda s, t, before: _change(t, torch.zeros_like(t)),
    "rounded to bfloat16 first": lambda s, t, before: (
        None if t.is_complex() else _change(t, t.detach().bfloat16().to(t.dtype))
    ),
    "NaN becomes 0": lambda s, t, before: (
        None if t.is_complex() or _skip(t) else _change(t, torch.where(t.isnan(), 0.0, t.detach()))
    ),
    "inf becomes the largest number": lambda s, t, before: (
        None if t.is_complex() or _skip(t) else _change(t, t.detach().clamp(*_span(t)))
    ),
    "the sign of zero lost": lambda s, t, before: None if _skip(t) else _change(t, t.detach() + 0.0),
    "the sign lost": lambda s, t, before: (
        None if t.is_complex() or _skip(t) else _change(t, t.detach().abs())
    ),
    "subnormals flushed": lambda s, t, before: (
        None
        if t.is_complex() or _skip(t)
        else _change(t, torch.where(t.detach().abs() < torch.finfo(t.dtype).tiny, 0.0, t.detach()))
    ),
    "the element after the last written": lambda s, t, before: _zero(_beyond(t, 1)),
    "the element before the first written": lambda s, t, before: _zero(_beyond(t, -1)),
}  # fmt: skip
WRITTEN = {
    "not written": lambda s, t, before: before is not None and _change(t, before),
    "no version moved": lambda s, t, before: _hide(t),
    "requires_grad turned": lambda s, t, before: t.is_leaf and t.requires_grad_(not t.requires_grad),
    "taken out of its graph": lambda s, t, before: t.grad_fn is not None and t.detach_(),
    "its gradient set": lambda s, t, before: t.is_leaf and setattr(t, "grad", t.detach().clone()),
}
READ = {
    "the source written": lambda s, t, before: poke(s, 0),
    "the source's last element written": lambda s, t, before: poke(s, -1),
    "the source's version moved": lambda s, t, before: (
        None if s.is_inference() else torch.autograd.graph.increment_version(s)
    ),
    "the source's requires_grad turned": lambda s, t, before: (
        s.is_leaf and s.requires_grad_(not s.requires_grad)
    ),
    "the element after the source's last written": lambda s, t, before: _zero(_beyond(s, 1)),
    "the source normalised behind autograd": lambda s, t, before: poke(s.data, 0),
}  # fmt: skip
# What takes the place of a new result.
NEW = {
    "contiguous": lambda s, r: r.contiguous() if not r.is_contiguous() else _turned(r),
    "with turned strides": lambda s, r: _turned(r),
    "in float32": lambda s, r: r.float() if r.dtype is not torch.float32 else r.bfloat16(),
    "requires gradients": lambda s, r: r.requires_grad_(),
    "a parameter": lambda s, r: torch.nn.Parameter(r, requires_grad=False),
    "the source itself": lambda s, r: s.detach() if s.dtype is r.dtype else r,
    "a view of the source's memory": lambda s, r: (
        s.detach().view(r.dtype) if s.itemsize == r.itemsize and s.dim() else r
    ),
    "an inference tensor": lambda s, r: _inference(r),
    "on another device": lambda s, r: r.to("meta"),
    "of another shape": lambda s, r: r.reshape(1, *r.shape),
}


def _span(t):
    return torch.finfo(t.dtype).min, torch.finfo(t.dtype).max


def _zero(part):
    with torch.no_grad(), torch.inference_mode(part.is_inference()):
        part.zero_()


def _turned(r):
    order = range(r.dim() - 1, -1, -1)
    other = torch.empty_permuted(r.shape, list(order), dtype=r.dtype, device=r.device)
    return other.copy_(r) if r.dim() > 1 else r


def _inference(r):
    with torch.inference_mode():
        return r.clone(memory_format=torch.preserve_format)


def _hide(t):
    if not t.is_inference() and not isinstance(t, FakeTensor):
        torch._C._autograd._unsafe_set_version_counter((t,), (0,))
