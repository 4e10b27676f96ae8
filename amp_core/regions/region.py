"""`autocast`: a region in which the op policy decides the dtype of each op."""

# No `from __future__ import annotations`: TorchScript cannot read string annotations.

from typing import TYPE_CHECKING, Any, Optional

import torch

from amp_core._torch.autocast import autocast_known
from amp_core.common.arguments import device_type_of
from amp_core.errors import BackendNotFoundError
from amp_core.plugin.default_manager import get_backend
from amp_core.regions.autocast_state import enter, leave
from amp_core.regions.base import Region
from amp_core.states.region_stack import thread

if TYPE_CHECKING:
    from typing_extensions import Self

    from amp_core.policy import OpPolicy

_is_scripting = torch.jit.is_scripting


class autocast(Region):  # noqa: N801  # torch's name
    """A context manager or decorator that runs ops in mixed precision.

    A drop-in replacement for ``torch.autocast``: a subclass with the same arguments, errors and warnings.
    Unlike torch's, an instance is reentrant and several threads can use it at once. As a decorator it also
    covers the bodies of generators and coroutines; the region is left while they are suspended.

    Args:
        device_type: a device type with a backend (``amp backends`` lists them), a ``torch.device``, a tensor,
            or ``"auto"`` for the accelerator that is present, or the CPU if there is none.
        dtype: the dtype of low-precision ops; defaults to that of the region around this one, else to the
            backend's default, which is ``torch.get_autocast_dtype(device_type)`` on torch's own devices.
            ``torch.float8_e4m3fn`` means bfloat16 (the device's default dtype if it has no bfloat16), with
            the device's recommended `Recipe` for the matrix products that would run in it.
        enabled: ``False`` switches mixed precision off inside the region.
        cache_enabled: whether to cache casts of weights until the outermost region ends; defaults to the
            setting of the surrounding region.
        policy: the `OpPolicy` for the ops in the region; defaults to that of the surrounding region, or to
            the device's own.

    Raises:
        BackendNotFoundError: no backend serves the device type (a ``RuntimeError``, as in torch).
        RuntimeError: `dtype` is bfloat16 and the CUDA device does not support it.
        BackendLoadError: the backend of the device type failed to load.
        BackendDisabledError: ``AMP_DISABLE_BACKENDS`` names the device type.
        ValueError: `device_type` is not a valid device type, device or tensor.
        TypeError: `dtype` is no dtype.
        PolicyError: `policy` is no `OpPolicy`, or is for another device type; or `dtype` is
            ``torch.float8_e4m3fn``, and the policy has products in low precision by size.

    Warns:
        UserWarning: the device is missing or does not support `dtype`; the region is disabled.
        EmulationWarning: the policy has recipes, and the device emulates them; once per device
            type and reason.

    Example:
        >>> import torch, amp_core
        >>> x = torch.ones(2, 2)
        >>> with amp_core.autocast("cpu", dtype=torch.bfloat16):
        ...     (x @ x).dtype
        torch.bfloat16
        >>> exact = amp_core.OpPolicy.default("cpu").override({"matmul": "fp32"})
        >>> with amp_core.autocast("cpu", policy=exact):
        ...     (x @ x).dtype
        torch.float32
    """

    # torch.jit.script recognizes the region by this name. It compiles the methods below, hence `Optional`,
    # `Any` and no keyword-only arguments.
    _jit_override_qualname = "__torch__.torch.amp.autocast_mode.autocast"

    if TYPE_CHECKING:  # TorchScript knows no such types

        def __init__(
            self,
            device_type: str | torch.device | torch.Tensor,
            dtype: torch.dtype | None = None,
            enabled: bool = True,
            cache_enabled: bool | None = None,
            policy: OpPolicy | None = None,
        ) -> None: ...
        def __enter__(self) -> Self: ...

    else:

        def __init__(
            self,
            device_type: str,
            dtype: Optional[torch.dtype] = None,
            enabled: bool = True,
            cache_enabled: Optional[bool] = None,
            policy: Any = None,
        ) -> None:
            if _is_scripting():
                self._enabled = enabled
                self.device = device_type
                self.fast_dtype = torch.get_autocast_dtype(device_type) if dtype is None else dtype
                return
            self.configure(device_type, dtype, enabled, cache_enabled, policy)

        def __enter__(self) -> Any:
            if _is_scripting():
                return self
            enter(thread.regions, self, self._settings, self._activation)
            return self

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> Any:
        if _is_scripting():
            return None
        leave(thread.regions, self, self._settings)
        return False


def is_autocast_available(device_type: str | torch.device) -> bool:
    """Return whether `autocast` accepts `device_type`, even if no such device is present.

    Args:
        device_type: a device type, or a ``torch.device``.

    Raises:
        RuntimeError: `device_type` is not a device type (torch's own error).
        ValueError: it is no string, device or tensor.

    Example:
        >>> import amp_core
        >>> amp_core.is_autocast_available("cpu")
        True
    """
    name = device_type_of(device_type)
    try:
        get_backend(name)
    except BackendNotFoundError:
        return autocast_known(name)
    return True
