"""Wrong for some orders or numbers alone; `fails` names the checks that must say so."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from amp_core.kernels import Portable

LARGE, ORDERS = ("grad_stats_of_large_and_small_numbers",), ("grad_stats_norms_of_every_dtype_and_order",)


def of_other_order(other):
    """Return kernels that compute a norm of the order ``other(order)``."""

    class Norms(Portable):
        fails = ORDERS

        def grad_stats(self, grads, norm_type=2.0):
            return super().grad_stats(grads, other(norm_type))

    return Norms


LowOrdersAreAHalf = of_other_order(lambda p: max(p, 0.5))
OneAndAHalfIsTwo = of_other_order(lambda p: 2.0 if p == 1.5 else p)
OrdersAboveTenAreInf = of_other_order(lambda p: math.inf if p > 10 else p)


def flags_of(norm, case):
    """Return kernels that flag, where `case` holds, what has no finite norm."""

    class Flags(Portable):
        fails = LARGE

        def grad_stats(self, grads, norm_type=2.0):
            stats = super().grad_stats(grads, norm_type)
            if not any(case(g, norm_type) for g in grads):
                return stats
            bad = (~torch.stack([norm(g.detach(), norm_type) for g in grads]).isfinite()).float()
            return replace(stats, nonfinite=bad, found_inf=bad.amax())

    return Flags


def _norm(grad, order):
    return torch.linalg.vector_norm(grad.double(), order)


FlagsByNormsOfHighOrders = flags_of(_norm, lambda g, p: 7 < p < math.inf)
FlagsByNormsOfFloat64 = flags_of(_norm, lambda g, p: g.dtype is torch.float64)
FlagsByModuli = flags_of(lambda g, p: g.abs().sum(), lambda g, p: g.is_complex())


def of_flushed(case):
    """Return kernels that read subnormal numbers as zeros where `case` holds."""

    class Flushed(Portable):
        fails = LARGE

        def grad_stats(self, grads, norm_type=2.0):
            read = [_flushed(g.detach()) if case(g, norm_type) else g for g in grads]
            return super().grad_stats(read, norm_type)

    return Flushed


def _flushed(grad):
    return torch.where(grad.abs() < torch.finfo(grad.dtype).tiny, grad * 0, grad)


NormsWithoutSmallFloat16 = of_flushed(lambda g, p: g.dtype is torch.float16)
NormsOfOrder3WithoutSmallNumbers = of_flushed(lambda g, p: p == 3 and not g.is_complex())


class SumsWithoutSmallGradients(Portable):
    fails = ("add_keeps_what_is_not_finite",)

    def add_(self, totals, grads):
        super().add_(totals, [_flushed(g.detach()) for g in grads])


class FlagsProductsByModuli(Portable):
    fails = ("multiply_of_special_numbers",)

    def multiply_(self, grads, factor, found_inf=None):
        super().multiply_(grads, factor, found_inf)
        moduli = [g.detach().abs() for g in grads if g.is_complex()]
        if found_inf is not None and not all(m.isfinite().all() for m in moduli):
            found_inf.fill_(1.0)


class CastsToATuple(Portable):
    fails = ("cast_keeps_nan_inf_and_signed_zero",)

    def cast(self, tensors, dtype, out=None):
        return tuple(super().cast(tensors, dtype, out))
