"""The private torch names for modules: how they are cast, copied and compiled."""

from __future__ import annotations

from collections.abc import Callable
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


_IN_PLACE = Feature("compiled_in_place", "guard refuses chosen steps of models with model.compile()")
_IN_PLACE.value("torch.nn.Module._compiled_call_impl", None)


@_IN_PLACE.probe
def _check_compiled_call() -> None:
    module: Any = torch.nn.Module()
    module._compiled_call_impl = lambda: True
    if not module():
        raise RuntimeError("a module does not call it")


class CompiledCall:
    """What a module calls after ``module.compile()``, with `before` and `after` around it, until `remove`."""

    def __init__(
        self, module: torch.nn.Module, before: Callable[..., None], after: Callable[..., None]
    ) -> None:
        self._module: Any = module
        self._inner: Any = self._module._compiled_call_impl
        self._before, self._after = before, after
        self._module._compiled_call_impl = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._before(self._module, args, kwargs)
        result = self._inner(*args, **kwargs)
        self._after(self._module, args, kwargs, result)
        return result

    def is_called(self) -> bool:
        """Whether the module still calls it: ``module.compile()`` puts another function in its place."""
        called = self._module._compiled_call_impl
        while isinstance(called, CompiledCall) and called is not self:
            called = called._inner
        return called is self

    def remove(self) -> None:
        """Let the module call its compiled function itself, unless another one is around this one by now."""
        if self._module._compiled_call_impl is self:
            self._module._compiled_call_impl = self._inner


def is_compiled_in_place(module: torch.nn.Module) -> bool:
    """Whether ``module.compile()`` was called."""
    return getattr(module, "_compiled_call_impl", None) is not None and _IN_PLACE.works_or_warn()


def uncompiled(module: torch.nn.Module) -> torch.nn.Module:
    """Unwrap a module returned by `torch.compile`; return other modules unchanged."""
    inner = module._modules.get("_orig_mod") if type(module).__name__ == "OptimizedModule" else None
    return module if inner is None else inner
