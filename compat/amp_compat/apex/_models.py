"""Models and optimizers for the levels that cast weights (O0, O2, O3)."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from amp_compat.apex._levels import Properties
from amp_core.common.containers import map_tensors

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def cast_model(model: nn.Module, chosen: Properties, outputs: torch.dtype | None) -> None:
    """Cast `model` in place; patch ``forward`` to cast its inputs, and its results to `outputs`."""
    dtype = chosen.cast_model_type
    assert dtype is not None
    for module in model.modules():
        if not (chosen.keep_batchnorm_fp32 and isinstance(module, _BATCH_NORMS)):
            _cast_own(module, dtype)
    _patch_forward(model, dtype, outputs)


def _cast_own(module: nn.Module, dtype: torch.dtype) -> None:
    for tensors in (module._parameters, module._buffers):
        for tensor in tensors.values():
            if tensor is not None and tensor.is_floating_point():
                tensor.data = tensor.data.to(dtype)


def _patch_forward(model: nn.Module, inputs: torch.dtype, outputs: torch.dtype | None) -> None:
    forward = model.forward

    @functools.wraps(forward)
    def cast_forward(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = _cast((args, kwargs), inputs)
        result = forward(*args, **kwargs)
        return result if outputs is None else _cast(result, outputs)

    model.forward = cast_forward


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return map_tensors(value, lambda t: t.to(dtype) if t.is_floating_point() else t)


def add_master_weights(optimizer: Optimizer) -> None:
    """Make `optimizer` update float32 copies of its low-precision parameters, copied back after each step."""
    pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
    for group in optimizer.param_groups:
        group["params"] = [_master(param, optimizer, pairs) for param in group["params"]]
    optimizer._amp_pairs = pairs  # type: ignore[attr-defined]
    optimizer.zero_grad = functools.partial(_zero_grad, optimizer, optimizer.zero_grad)  # type: ignore[method-assign]
    optimizer.register_step_post_hook(lambda *_: _copy_back(pairs))


def _master(param: nn.Parameter, optimizer: Optimizer, pairs: list[Any]) -> nn.Parameter:
    if param.dtype is torch.float32:
        return param
    master = nn.Parameter(param.detach().float(), requires_grad=param.requires_grad)
    if param in optimizer.state:
        optimizer.state[master] = optimizer.state.pop(param)
    pairs.append((param, master))
    return master


def _zero_grad(optimizer: Optimizer, original: Any, set_to_none: bool = True) -> None:
    original(set_to_none=set_to_none)
    for param, _ in optimizer._amp_pairs:  # type: ignore[attr-defined]
        if param.grad is not None:
            param.grad = None if set_to_none else param.grad.zero_()


@torch.no_grad()
def _copy_back(pairs: list[tuple[nn.Parameter, nn.Parameter]]) -> None:
    for param, master in pairs:
        param.copy_(master)


def masters_of(optimizer: Optimizer) -> set[nn.Parameter]:
    """Return the float32 copies that `optimizer` updates."""
    return {master for _, master in getattr(optimizer, "_amp_pairs", ())}


def load_into_masters(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Let what is loaded into `model`, or into a part of it, reach the float32 copies of the next step."""
    masters = {param: master for each in optimizers for param, master in getattr(each, "_amp_pairs", ())}

    @torch.no_grad()
    def refresh(module: nn.Module, _: Any) -> None:
        for param in module.parameters(recurse=False):
            if (master := masters.get(param)) is not None:
                master.copy_(torch.where(param == master.to(param.dtype), master, param))

    for module in model.modules():
        if any(param in masters for param in module.parameters(recurse=False)):
            module.register_load_state_dict_post_hook(refresh)  # type: ignore[no-untyped-call]


def master_params(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    """Yield the parameters that the optimizer updates: float32 copies where they exist.

    Use it to clip gradients: ``clip_grad_norm_(amp.master_params(optimizer), 1.0)``.
    """
    for group in optimizer.param_groups:
        yield from group["params"]


def move_gradients(optimizer: Optimizer) -> None:
    """Move the gradients of low-precision parameters to their float32 copies."""
    for param, master in getattr(optimizer, "_amp_pairs", ()):
        if param.grad is not None:
            master.grad = param.grad.float()
            param.grad = None


def drop_gradients(optimizer: Optimizer) -> None:
    """Remove the gradients of low-precision parameters that have not been moved to their float32 copies."""
    for param, _ in getattr(optimizer, "_amp_pairs", ()):
        param.grad = None
