"""The CPU backend."""

from __future__ import annotations

import torch

from amp_backend_cpu.kernels import load
from amp_backend_cpu.op_policy import LISTS
from amp_core.common.text import counted
from amp_core.kernels import Kernels, ScaledProducts
from amp_core.plugin import Availability, Backend


class CpuBackend(Backend):
    """The CPU. Always available; bfloat16 by default, as in torch."""

    device_type = "cpu"
    api_version = 1
    _default_is_torchs = True
    op_lists = LISTS
    grad_bucket_nbytes = 1 << 20  # fits in a core's cache
    caches_memory = False

    def availability(self) -> Availability:
        return Availability(
            True, f"{torch.backends.cpu.get_cpu_capability()}, {counted(torch.get_num_threads(), 'thread')}"
        )

    def default_dtype(self) -> torch.dtype:
        return torch.get_autocast_dtype("cpu")

    def supported_dtypes(self) -> tuple[torch.dtype, ...]:
        return (torch.bfloat16, torch.float16)

    def kernels(self) -> Kernels:
        return load()

    def scaled_products(self) -> ScaledProducts:
        return _PRODUCTS


# Its results are ours, bit for bit, and it takes 1.2 times as long on stored operands, 2.9 times on others
# (1024 cubed): tests/kernels/test_scaled.py, benchmarks/formats.py.
_PRODUCTS = ScaledProducts("torch's scaled_mm emulates on CPUs too, with the same bits, and takes longer")
