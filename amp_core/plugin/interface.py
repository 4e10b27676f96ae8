"""What a backend is.

A backend tells amp-core everything that a device decides. A whole one::

    import torch
    from amp_core.plugin import Availability, Backend, hookimpl

    class NpuBackend(Backend):
        device_type = "npu"
        api_version = 1

        def availability(self):
            if not torch.npu.is_available():
                return Availability(False, "no NPU driver is loaded")
            return Availability(True, f"{torch.npu.device_count()} NPU(s)")

        def default_dtype(self):
            return torch.float16

        def supported_dtypes(self):
            return (torch.float16, torch.bfloat16)

    @hookimpl
    def amp_register_backends(registry):
        registry.add(NpuBackend())

and, in the package's ``pyproject.toml``::

    [project.entry-points."amp_core.backends"]
    npu = "amp_backend_npu.hooks"
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from inspect import isfunction
from types import MappingProxyType
from typing import ClassVar

import torch

from amp_core.kernels import Kernels, portable_kernels
from amp_core.plugin.results import RESULTS, Availability, Refusal, checked
from amp_core.policy.op_policy import OpPolicy

API_VERSION = 1
"""The version of the backend contract that this amp-core speaks."""


class Backend(ABC):
    """One device type's side of mixed precision.

    The core calls `availability`, `default_dtype` and `supported_dtypes` when a region or scaler is
    built, never when it is entered; they may query the driver but must not allocate on the device.
    All methods may be called from several threads at once.
    """

    device_type: ClassVar[str]
    """The ``type`` of a ``torch.device``, such as ``"cuda"``."""

    api_version: ClassVar[int]
    """The contract that the class was written against, as a literal (not `API_VERSION`)."""

    op_lists: Mapping[str, str] = MappingProxyType({})
    """The rules of the autocast kernels that the device has in C++: rule to op names, as in the
    `amp_core.policy.tables`. An op with such a kernel that no list names has the rule ``native``."""

    has_float64: bool = True
    """Whether every device of this type that is present computes in float64."""

    grad_bucket_nbytes: int = 1 << 25
    """How many bytes of gradients to collect during a backward pass before a kernel reads them."""

    caches_memory: bool = True
    """Whether the device's allocator keeps freed memory, so that the next tensor gets it cheaply."""

    also_casts: frozenset[str] = frozenset()
    """Other device types whose tensors a region on this one casts too."""

    aliases: tuple[str, ...] = ()
    """Words that users write for the device type by mistake; an error then suggests this one."""

    origin: str = ""
    """The plugin that registered the backend, for errors; set by amp-core."""

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if not cls.__module__.startswith("amp_core."):
            for name in RESULTS.keys() & vars(cls).keys():
                if isfunction(vars(cls)[name]):
                    setattr(cls, name, checked(name, vars(cls)[name]))

    @abstractmethod
    def availability(self) -> Availability:
        """Say whether the device can be used now, and why."""

    @abstractmethod
    def default_dtype(self) -> torch.dtype:
        """Return the dtype of a region that names none."""

    @abstractmethod
    def supported_dtypes(self) -> tuple[torch.dtype, ...]:
        """Return the dtypes that a region may use on the device that is present."""

    def dtype_reason(self, dtype: torch.dtype) -> str:
        """Say in words why `dtype` is not among `supported_dtypes` (shown by ``amp backends``)."""
        return f"{dtype} is not a mixed-precision dtype of {self.device_type}"

    def autocast_refusal(self, dtype: torch.dtype) -> Refusal | None:
        """Decide whether an enabled region may use `dtype`; ``None`` admits it.

        The default is torch's rule for every device but CUDA: a dtype outside `supported_dtypes`
        is warned about and disables the region. (torch/amp/autocast_mode.py, 2.13) float32 is admitted
        everywhere, as torch does on CUDA alone: ops of low precision then run in float32.
        """
        supported = self.supported_dtypes()
        if dtype in supported or dtype is torch.float32:
            return None
        name = self._display_name()
        return Refusal(
            f"In {name} autocast, but the target dtype is not supported. Disabling autocast.\n"
            f"{name} Autocast only supports dtypes of "
            f"{', '.join(str(d) for d in supported)} currently."
        )

    def scaler_refusal(self) -> Refusal | None:
        """Decide whether an enabled `GradScaler` may be built for this device; ``None`` admits it."""
        return None

    def op_policy(self) -> OpPolicy:
        """Return which op runs in which dtype; by default, the rules of the device's own autocast kernels.

        A device that has none gets `OpPolicy.uniform`.
        """
        if self.op_lists:
            return OpPolicy.from_lists(self.device_type, self.op_lists)
        return OpPolicy.default(self.device_type)

    def kernels(self) -> Kernels:
        """Return the cast and gradient kernels; by default, the portable ones over torch ops."""
        return portable_kernels(has_float64=self.has_float64)

    def _display_name(self) -> str:
        return self.device_type.upper()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} for {self.device_type!r}>"
