"""The private torch names for regions: device types, and torch's own entry and exit."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import torch

from amp_core._torch.features import Feature

# torch's own, bound here once: `amp_compat.install` may put ours under these names.
torch_autocast = torch.autocast
autocast_known = torch.amp.is_autocast_available


def is_device_type(name: str) -> bool:
    """Whether torch would parse `name` as the type of a ``torch.device``."""
    try:
        return torch.device(name).type == name
    except RuntimeError:
        return False


def privateuse1_name() -> str:
    """Return the present name of the PrivateUse1 device type."""
    return torch.device("privateuseone").type  # torch parses the slot's own name and gives the new one


def autocast_off(device_type: str) -> AbstractContextManager[Any]:
    """Return a context in which autocast is off, as in ``torch.autocast(device_type, enabled=False)``.

    torch's own asks a PrivateUse1 device for the dtypes of regions even here, which not every one can say.
    """
    if not torch.compiler.is_compiling() and device_type == privateuse1_name():
        return switched_off(device_type)
    return cast("AbstractContextManager[Any]", torch_autocast(device_type, enabled=False))


@contextmanager
def switched_off(device_type: str) -> Iterator[None]:
    """Turn autocast off in the block; nothing else of its state changes."""
    before = torch.is_autocast_enabled(device_type)
    torch.set_autocast_enabled(device_type, False)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device_type, before)


def privateuse1_amp_dtypes(device_type: str) -> list[torch.dtype]:
    """Return the dtypes that a PrivateUse1 device says autocast may use.

    Raises:
        AssertionError: with torch's text, when the device's module is missing or lacks the function.
    """
    text = (
        f"Tried to use AMP with the `{device_type}` backend, but the backend has not registered a "
        "module or  the module miss some necessary funcs. The backend should register a module by "
        "`torch._register_device_module`, and the module must have these funcs: \n"
        "`get_amp_supported_dtype() -> List[torch.dtype]`. \n"
    )
    module = getattr(torch, device_type, None)
    if module is None:
        raise AssertionError(text)
    if not hasattr(module, "get_amp_supported_dtype"):
        raise AssertionError(text + "But the func `get_amp_supported_dtype` is missing. \n")
    return cast("list[torch.dtype]", module.get_amp_supported_dtype())


_DEVICES = Feature(
    "all_devices", "amp_core.disable and amp_core.record cover only the device types that amp-core knows"
)
_KNOWN_DEVICES = ("cpu", "cuda", "hpu", "ipu", "maia", "mps", "mtia", "xla", "xpu")
_autocast_devices = _DEVICES.function(
    "torch._C._autocast_supported_devices",
    lambda: [*_KNOWN_DEVICES, privateuse1_name()],
    check=lambda f: [torch.is_autocast_enabled(device) for device in f()],
)


def autocast_devices_enabled() -> list[str]:
    """Return the device types for which autocast is on in this thread."""
    return [d for d in _autocast_devices() if torch.is_autocast_enabled(d)]


_EXPORT = Feature(
    "export",
    "programs that torch.export traces without strict=True lose their regions",
    "torch.fx.experimental.proxy_tensor.PreDispatchTorchFunctionMode",
)

# Whether a ``TorchFunctionMode`` is active. Asked each time that a region is entered or left.
function_modes_are_on: Callable[[], bool] = _EXPORT.function(
    "torch._C._is_torch_function_mode_enabled", lambda: False, check=lambda f: f()
)
_function_modes = _EXPORT.function(
    "torch.overrides._get_current_function_mode_stack", list, check=lambda f: list(f())
)
_REGIONS = Feature("enter_autocast", "amp_core._enter_autocast and amp_core._exit_autocast are not there")
enter_autocast = _REGIONS.function("torch.amp.autocast_mode._enter_autocast")
exit_autocast = _REGIONS.function("torch.amp.autocast_mode._exit_autocast")


def record_enter(device: str, dtype: torch.dtype, enabled: bool, cache_enabled: bool) -> None:
    """Tell `torch.export`'s pre-dispatch tracer that a region begins; the modes of users see nothing."""
    mode = _pre_dispatch_mode()
    if mode is not None:
        mode.__torch_function__(enter_autocast, (), (device, dtype, enabled, cache_enabled))


def record_exit() -> None:
    """Tell `torch.export`'s pre-dispatch tracer that a region ends."""
    mode = _pre_dispatch_mode()
    if mode is not None:
        mode.__torch_function__(exit_autocast, (), ())


def _pre_dispatch_mode() -> Any:
    # Whoever traces has imported the tracer; to import it takes a second.
    tracer = sys.modules.get("torch.fx.experimental.proxy_tensor")
    if tracer is None or not _EXPORT.works_or_warn():
        return None
    kind = tracer.PreDispatchTorchFunctionMode
    return next((mode for mode in _function_modes() if isinstance(mode, kind)), None)
