"""Which products of quantised matrices CUDA GPUs have."""

from __future__ import annotations

from amp_core.formats import E2M1, E4M3, E5M2, Quantization
from amp_core.kernels.torch_scaled import TorchScaledProducts

_SINCE = {"tensor": (8, 9), "row": (8, 9), "mxfp8": (10, 0), "nvfp4": (10, 0)}
"""The compute capability that each kind of operands needs."""


class CudaScaledProducts(TorchScaledProducts):
    """Those of one compute capability.

    Args:
        capability: of the GPU, or the least one of several.
    """

    def __init__(self, capability: tuple[int, int]) -> None:
        super().__init__()
        self._capability = capability

    def lacks(self, kind: str, a: Quantization, b: Quantization) -> str:
        needed = _SINCE[kind]
        if self._capability < needed:
            has, needs = (".".join(map(str, each)) for each in (self._capability, needed))
            return f"{kind} products need compute capability {needs}, and a GPU has {has}"
        dtypes = [how.element.dtype for how in (a, b)]
        for dtype in dtypes:
            if dtype not in (E4M3.dtype, E5M2.dtype, E2M1.dtype):  # of an own format
                return f"CUDA multiplies no {dtype}"
        wide = [dtype is E5M2.dtype for dtype in dtypes]
        if all(wide):
            return "CUDA multiplies no e5m2 by e5m2"
        return "CUDA multiplies no rows of e5m2" if kind == "row" and any(wide) else ""
