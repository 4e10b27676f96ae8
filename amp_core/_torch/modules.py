"""The private torch names for modules: how they are cast, copied and compiled."""

from __future__ import annotations

from typing import Any

import torch

from amp_core._torch.features import Feature

_KEEPING = Feature("kept_buffers", "PrecisionPlan.apply cannot keep buffers in float32")
_apply_to_tensors = _KEEPING.value("torch.nn.Module._apply", None)


@_KEEPING.probe
def _check_apply() -> None:
    seen: list[torch.Tensor] = []
    module = torch.nn.Module()
    module.register_buffer("each", torch.zeros(1))

    def see(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor)
        return tensor

    _apply_to_tensors(module, see)
    if not seen:
        raise RuntimeError("it passes no buffer to its function")


def require_module_casts() -> None:
    """Raise unless ``Module.to`` and the like go through one method that a module can replace.

    Raises:
        TorchFeatureError: they do not.
    """
    _KEEPING.require()


def apply_to_tensors(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call the method of the module's class through which ``Module.to`` and the like go."""
    method: Any = type(module)._apply
    return method(module, *args, **kwargs)


_REPLICAS = Feature("replicas", "nn.DataParallel runs modules with rules on the first device's weights")
_replicate = _REPLICAS.value("torch.nn.Module._replicate_for_data_parallel", None)


@_REPLICAS.probe
def _check_replicas() -> None:
    module = torch.nn.Module()
    vars(module)["own"] = True
    if not vars(_replicate(module)).get("own"):
        raise RuntimeError("it does not copy attributes")


def replica_of(module: torch.nn.Module) -> torch.nn.Module:
    """Return the copy of `module` to which ``nn.DataParallel`` gives the weights of another device."""
    method: Any = type(module)._replicate_for_data_parallel
    replica: torch.nn.Module = method(module)
    return replica


def uncompiled(module: torch.nn.Module) -> torch.nn.Module:
    """Unwrap a module returned by `torch.compile`; return other modules unchanged."""
    inner = module._modules.get("_orig_mod") if type(module).__name__ == "OptimizedModule" else None
    return module if inner is None else inner
