"""Right kernels that lack a dtype; `passes` and `declares` are as in ``kernels.py``."""

from __future__ import annotations

import itertools

import torch

from amp_core.kernels import Portable


class Lacking(Portable):
    """Has not the dtype `lacks`, which torch has."""

    lacks = None
    passes = (("cast", "add", "multiply", "storage"), "")

    def _refuse(self, *lists):
        if self.lacks in [getattr(t, "dtype", t) for t in itertools.chain(*lists)]:
            raise NotImplementedError(f"no {self.lacks} here")

    def cast(self, tensors, dtype, out=None):
        self._refuse(tensors, [dtype] if out is None else out)
        return super().cast(tensors, dtype, out)

    def add_(self, totals, grads):
        self._refuse(totals, grads)
        super().add_(totals, grads)

    def multiply_(self, grads, factor, found_inf=None):
        self._refuse(grads)
        super().multiply_(grads, factor, found_inf)

    def grad_stats(self, grads, norm_type=2.0):
        self._refuse(grads)
        return super().grad_stats(grads, norm_type)

    def quantize(self, tensor, quantization, dim=-1, **options):
        self._refuse([tensor] if isinstance(tensor, torch.Tensor) else [])
        return super().quantize(tensor, quantization, dim, **options)

    def split_(self, wides, lows, kept):
        self._refuse(lows)
        super().split_(wides, lows, kept)

    def join_(self, wides, lows, kept):
        self._refuse(lows)
        super().join_(wides, lows, kept)

    def round_(self, wides, lows, keys, numbers):
        self._refuse(lows)
        super().round_(wides, lows, keys, numbers)


class LacksFloat16(Lacking):
    lacks, dtypes = torch.float16, (torch.bfloat16,)
    declares = {"supports_float16": False}  # noqa: RUF012


class LacksBfloat16(Lacking):
    lacks, dtypes = torch.bfloat16, (torch.float16,)
    passes = (
        (
            "layouts",
            "cast",
            "add",
            "grad_stats",
            "multiply",
            "update",
            "contexts",
            "memory",
            "quantize",
            "effects",
        ),
        "not threads and not region",
    )
    declares = {"supports_bfloat16": False, "default_dtype_is_torchs": False}  # noqa: RUF012
