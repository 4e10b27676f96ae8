"""The backend interface.

A backend provides everything in amp-core that depends on the device. A complete one::

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
from typing import TYPE_CHECKING, ClassVar

import torch

from amp_core.kernels import EMULATED, Kernels, ScaledProducts, portable_kernels
from amp_core.plugin.results import COMPUTED, RESULTS, Availability, CheckedDescriptor, Refusal, checked
from amp_core.policy.op_policy import OpPolicy

if TYPE_CHECKING:
    from amp_core.formats import Recipe

API_VERSION = 1
"""The version of the backend API that this amp-core implements."""


class Backend(ABC):
    """Mixed-precision support for one device type.

    Building an outermost region without ``dtype=`` calls `default_dtype`. The first region of each dtype
    also calls `autocast_refusal`, which asks `supported_dtypes`; the first one, `op_policy`. Building a
    scaler calls `scaler_refusal`. Entering a region calls none of these. `availability` only serves to
    describe the device, as in ``amp backends``. All may query the driver but must not allocate on the device.
    Several threads may call any method at once.
    """

    device_type: ClassVar[str]
    """The ``type`` of a ``torch.device``, such as ``"cuda"``."""

    api_version: ClassVar[int]
    """The version of the backend API that the class implements, as a literal (not `API_VERSION`)."""

    op_lists: Mapping[str, str] = MappingProxyType({})
    """The rules of the device's autocast kernels in C++: rule to op names, as in `amp_core.policy.tables`.
    An op with such a kernel that appears in no list has the rule ``native``."""

    has_float64: bool = True
    """Whether every present device of this type supports float64."""

    grad_bucket_nbytes: int = 1 << 25
    """Bytes of gradients to collect during a backward pass before a kernel reads them, and of float32 weights
    that a step with bfloat16 storage makes at a time."""

    caches_memory: bool = True
    """Whether the device has a caching allocator, which reuses freed memory cheaply."""

    also_casts: frozenset[str] = frozenset()
    """Other device types whose tensors a region on this one also casts."""

    aliases: tuple[str, ...] = ()
    """Names that users mistake for this device type; the error message then suggests this one."""

    origin: str = ""
    """The plugin that registered the backend, for errors; set by amp-core."""

    _default_is_torchs: ClassVar[bool] = False
    """Whether `default_dtype` is torch's setting, which building a region can read in half the time."""

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if "default_dtype" in vars(cls):  # of another one than the class above
            cls._default_is_torchs = vars(cls).get("_default_is_torchs", False)
        if not cls.__module__.startswith("amp_core."):
            for name in RESULTS:
                owner = next(each for each in cls.__mro__ if name in vars(each))
                method = vars(owner)[name]
                if owner is not cls and issubclass(owner, Backend):
                    continue  # checked there, unlike what comes from a class beside `Backend`
                if isfunction(method):
                    setattr(cls, name, checked(name, method))
                elif hasattr(method, "__get__") and not isinstance(method, COMPUTED):
                    setattr(cls, name, CheckedDescriptor(name, method))

    @abstractmethod
    def availability(self) -> Availability:
        """Return whether the device can be used now, and why or why not."""

    @abstractmethod
    def default_dtype(self) -> torch.dtype:
        """Return the dtype of a region that passes none. Within another region it has that one's instead."""

    @abstractmethod
    def supported_dtypes(self) -> tuple[torch.dtype, ...]:
        """Return the dtypes that a region may use on the present device."""

    def dtype_reason(self, dtype: torch.dtype) -> str:
        """Return the reason, shown by ``amp backends``, why `dtype` is not among `supported_dtypes`."""
        return f"{dtype} is not a mixed-precision dtype of {self.device_type}"

    def autocast_refusal(self, dtype: torch.dtype) -> Refusal | None:
        """Return ``None`` if an enabled region may use `dtype`, or the `Refusal` to report.

        The default is torch's rule for every device except CUDA: a dtype outside `supported_dtypes` causes a
        warning and disables the region (torch/amp/autocast_mode.py, 2.13). float32 is accepted on every
        device, which torch does only on CUDA; low-precision ops then run in float32.
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
        """Return ``None`` if this device supports an enabled `GradScaler`, or the `Refusal` to report."""
        return None

    def op_policy(self) -> OpPolicy:
        """Return the device's op policy; by default, the rules of its own autocast kernels.

        A device without such kernels gets `OpPolicy.uniform`.
        """
        if self.op_lists:
            return OpPolicy.from_lists(self.device_type, self.op_lists)
        return OpPolicy.default(self.device_type)

    def recommended_recipe(self) -> Recipe:
        """Return the recipe of a region with ``dtype=torch.float8_e4m3fn``; by default, rowwise fp8."""
        from amp_core.formats import Recipe

        return Recipe.fp8_rowwise()

    def kernels(self) -> Kernels:
        """Return the cast and gradient kernels; by default, the portable ones built on torch ops."""
        return portable_kernels(has_float64=self.has_float64)

    def scaled_products(self) -> ScaledProducts:
        """Return the products of quantised matrices; by default, all are emulated."""
        return EMULATED

    def _display_name(self) -> str:
        return self.device_type.upper()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} for {self.device_type!r}>"
