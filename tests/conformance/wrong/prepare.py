"""Prepared lists, wrong in one plausible way each; `fails` names the checks that must say so."""

from __future__ import annotations

from amp_core.kernels import Portable


class PrepareCopies(Portable):
    fails = ("prepared_gradients_are_scaled_in_place",)

    def prepare(self, tensors, layout=None):
        return [t.detach().clone() for t in tensors]


class PrepareDropsWhatIsEmpty(Portable):
    fails = ("prepared_tensors_are_cast",)

    def prepare(self, tensors, layout=None):
        return [t for t in tensors if t.numel()]


class PrepareSortsByDtype(Portable):
    fails = ("prepared_gradients_are_measured_alike", "prepared_gradients_are_added")

    def prepare(self, tensors, layout=None):
        return sorted(tensors, key=lambda t: str(t.dtype))


class LayoutKeepsTheTensors(Portable):
    fails = ("layout_keeps_no_tensor_alive", "prepared_gradients_are_scaled_in_place")

    def layout(self, tensors):
        return list(tensors)

    def prepare(self, tensors, layout=None):
        return tensors if layout is None else layout


class LayoutForgetsTheStrides(Portable):
    fails = ("layouts_of_other_strides_are_kept_apart",)

    def __init__(self):
        self.known = {}

    def layout(self, tensors):
        kinds = tuple((t.shape, t.dtype) for t in tensors)
        return self.known.setdefault(kinds, [t.stride() for t in tensors])

    def prepare(self, tensors, layout=None):
        if layout is None:
            return tensors
        pairs = zip(tensors, layout, strict=True)
        return [t if t.storage_offset() else t.as_strided(t.shape, stride) for t, stride in pairs]
