"""Sums, wrong in one plausible way each; `fails` names the checks that must say so."""

from __future__ import annotations

import time

import torch

from amp_core.kernels import Portable


class AddTakesTheFirstOnly(Portable):
    fails = ("kernels_of_thousands_of_tensors", "add_of_every_memory_layout")

    def add_(self, totals, grads):
        with torch.no_grad():
            totals[0].add_(grads[0])


class AddSumsInTheDtypeOfTheGradient(Portable):
    fails = ("add_of_every_memory_layout",)

    def add_(self, totals, grads):
        with torch.no_grad():
            for total, grad in zip(totals, grads, strict=True):
                total.copy_(total.to(grad.dtype) + grad)


class AddLeavesTheSumInTheGradient(Portable):
    fails = ("add_of_every_memory_layout",)

    def add_(self, totals, grads):
        super().add_(totals, grads)
        with torch.no_grad():
            for total, grad in zip(totals, grads, strict=True):
                grad.copy_(total)


class AddLosesStridedTotals(Portable):
    fails = ("add_of_every_memory_layout",)

    def add_(self, totals, grads):
        super().add_([t.contiguous() for t in totals], grads)


class AddDropsWhatIsNotFinite(Portable):
    fails = ("add_keeps_what_is_not_finite",)

    def add_(self, totals, grads):
        super().add_(totals, [torch.nan_to_num(g, 0.0, 0.0, 0.0) for g in grads])


class AddZipsShort(Portable):
    fails = ("add_refuses_other_shapes_before_it_writes",)

    def add_(self, totals, grads):
        with torch.no_grad():
            for total, grad in zip(totals, grads, strict=False):
                total.add_(grad)


class AddLooksAtTheFirst(Portable):
    fails = ("kernels_do_not_wait_for_the_device",)

    def add_(self, totals, grads):
        if grads and grads[0].numel() and grads[0].flatten()[0].isnan():
            return
        super().add_(totals, grads)


class AddSharesItsArguments(Portable):
    fails = ("kernels_serve_many_threads_at_once",)

    shared = None

    def add_(self, totals, grads):
        AddSharesItsArguments.shared = totals, grads
        time.sleep(0.001)
        super().add_(*AddSharesItsArguments.shared)
