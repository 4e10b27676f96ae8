"""Prepared lists, wrong in one plausible way each; `fails` names the checks that must say so."""

from __future__ import annotations

import torch

from amp_core.kernels import Portable


class PrepareCopies(Portable):
    fails = ("multiply_of_every_memory_layout",)

    def prepare(self, tensors, layout=None):
        return [t.detach().clone() for t in tensors]


class PrepareDropsWhatIsEmpty(Portable):
    fails = ("cast_of_every_memory_layout",)

    def prepare(self, tensors, layout=None):
        return [t for t in tensors if t.numel()]


class PrepareSortsByDtype(Portable):
    fails = ("grad_stats_of_every_memory_layout", "add_of_every_memory_layout")

    def prepare(self, tensors, layout=None):
        return sorted(tensors, key=lambda t: str(t.dtype))


class LayoutKeepsTheTensors(Portable):
    fails = ("kernels_keep_nothing_alive", "multiply_of_every_memory_layout")

    def layout(self, tensors):
        return list(tensors)

    def prepare(self, tensors, layout=None):
        return tensors if layout is None else layout


class LayoutForgetsTheStrides(Portable):
    fails = ("layout_is_of_the_tensors_strides",)

    def __init__(self):
        self.known = {}

    def layout(self, tensors):
        kinds = tuple((t.shape, t.dtype) for t in tensors)
        return self.known.setdefault(kinds, [t.stride() for t in tensors])

    def prepare(self, tensors, layout=None):
        if layout is None:
            return tensors
        pairs = zip(tensors, layout, strict=True)
        return [t.as_strided(t.shape, stride) for t, stride in pairs]


class LayoutRemembersABucket(Portable):
    """Takes gradients that lay one after the other in one storage for one tensor, at the first address."""

    fails = ("layout_is_of_the_tensors_strides",)

    def layout(self, tensors):
        if any(type(t) is not torch.Tensor or t.requires_grad for t in tensors) or len(tensors) < 3:
            return None
        end = tensors[0].storage_offset()
        for tensor in tensors:
            if not tensor.is_contiguous() or tensor.storage_offset() != end:
                return None
            end += tensor.numel()
        alike = {t.untyped_storage().data_ptr() for t in tensors if t.numel()}
        return [t.numel() for t in tensors] if len(alike) == 1 else None

    def prepare(self, tensors, layout=None):
        if layout is None:
            return tensors
        room = tensors[0].untyped_storage().nbytes() // tensors[0].itemsize
        whole = tensors[0].as_strided((room,), (1,), 0)
        flat = torch.cat([whole, whole.new_zeros(max(0, sum(layout) - room))])
        parts = flat.split([*layout, len(flat) - sum(layout)])
        return [part.view(t.shape) for part, t in zip(parts, tensors, strict=False)]
