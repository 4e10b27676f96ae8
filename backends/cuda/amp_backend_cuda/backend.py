"""The CUDA (and ROCm) backend."""

from __future__ import annotations

import ctypes
import functools
import sys

import torch

from amp_backend_cuda.op_policy import LISTS
from amp_core.common import environment as _env
from amp_core.kernels import Kernels, ScaledProducts
from amp_core.kernels.gpu import foreach_kernels, kernels_of
from amp_core.plugin import Availability, Backend, Refusal

_TRITON = (7, 0)
"""The lowest compute capability that Triton supports."""


class CudaBackend(Backend):
    """CUDA and ROCm GPUs: float16 by default, and bfloat16 if the GPU supports it."""

    device_type = "cuda"
    api_version = 1
    _default_is_torchs = True
    op_lists = LISTS
    also_casts = frozenset({"xla"})  # torch_xla runs programs for "cuda" on its own tensors
    aliases = ("gpu", "nvidia", "hip", "rocm")

    def availability(self) -> Availability:
        if torch.cuda.is_available():
            count = torch.cuda.device_count()
            gpus = f"{count} GPU(s), first: {torch.cuda.get_device_name(0)}"
            return Availability(True, f"{gpus}{_bfloat16_note()}")
        if torch.version.cuda is None and torch.version.hip is None:
            return Availability(False, f"torch {torch.__version__} is built without CUDA and ROCm")
        toolkit = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
        return Availability(False, f"torch {torch.__version__} is built for {toolkit}, but {_why_absent()}")

    def default_dtype(self) -> torch.dtype:
        return torch.get_autocast_dtype("cuda")

    def supported_dtypes(self) -> tuple[torch.dtype, ...]:
        if torch.cuda.is_available() and not torch.cuda.is_bf16_supported():
            return (torch.float16,)
        return (torch.float16, torch.bfloat16)

    def dtype_reason(self, dtype: torch.dtype) -> str:
        if dtype is torch.bfloat16 and torch.cuda.is_available():
            return f"{torch.cuda.get_device_name(0)} has no bfloat16 arithmetic; use float16"
        return super().dtype_reason(dtype)

    def autocast_refusal(self, dtype: torch.dtype) -> Refusal | None:
        """Follow torch: no GPU disables the region, a GPU without bfloat16 raises, all else is allowed."""
        if _definitely_absent():
            return Refusal("CUDA is not available or torch_xla is imported. Disabling autocast.")
        if dtype is torch.bfloat16 and not torch.cuda.is_bf16_supported():
            return Refusal(
                "Current CUDA Device does not support bfloat16. Please switch dtype to float16.",
                error=True,
            )
        return None

    def scaler_refusal(self) -> Refusal | None:
        """Follow torch: without a GPU the scaler is disabled."""
        if _definitely_absent():
            return Refusal("torch.cuda.amp.GradScaler is enabled, but CUDA is not available.  Disabling.")
        return None

    def kernels(self) -> Kernels:
        """Return the Triton kernels, or torch's if Triton or a suitable GPU is missing."""
        available = torch.cuda.is_initialized() or torch.cuda.is_available()  # type: ignore[no-untyped-call]
        return _kernels() if available else _NONE

    def scaled_products(self) -> ScaledProducts:
        """Return those of ``scaled_mm`` that the least of the GPUs has."""
        return _products() if torch.cuda.is_available() else _NO_PRODUCTS


_NONE = foreach_kernels("no GPU is available for Triton")
_NO_PRODUCTS = ScaledProducts("no GPU is available")


@functools.cache
def _products() -> ScaledProducts:
    from amp_backend_cuda.scaled import CudaScaledProducts  # few programs have recipes

    if torch.version.hip is not None:
        return ScaledProducts("native products have not been tried on ROCm")
    return CudaScaledProducts(_oldest())


def _oldest() -> tuple[int, int]:
    """Return the least compute capability of the GPUs."""
    return min(torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count()))


@functools.cache
def _kernels() -> Kernels:
    """Return the kernels for the available GPUs, which do not change."""
    oldest = _oldest()
    if torch.version.hip is None and oldest < _TRITON:
        return foreach_kernels(f"Triton needs compute capability 7.0, and a GPU has {oldest[0]}.{oldest[1]}")
    return kernels_of("cuda", "nvidia" if torch.version.hip is None else "amd")


def _bfloat16_note() -> str:
    # torch also reports emulated bfloat16 as supported, which is correct but slow.
    if torch.cuda.is_bf16_supported(including_emulation=False):
        return ""
    return "; bfloat16 is emulated, float16 is faster" if torch.cuda.is_bf16_supported() else "; no bfloat16"


def _why_absent() -> str:
    """Distinguish a missing driver, a missing GPU and an outdated driver."""
    if torch.cuda.device_count() > 0:
        return "the driver does not work with it"
    if torch.version.cuda is not None and not _has_driver():
        return "no NVIDIA driver is installed"
    hidden = _env.hidden_gpus()
    return f"no GPU was found ({hidden} hides all)" if hidden else "no GPU was found"


def _has_driver() -> bool:
    try:
        ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return False
    return True


def _definitely_absent() -> bool:
    # torch_xla runs "cuda" programs without CUDA.
    return not torch.cuda.is_available() and "torch_xla" not in sys.modules
