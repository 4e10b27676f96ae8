"""Which parameters `StoredWeights` stores in bfloat16, and which optimizers it steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_core._torch.tensors import is_wrapper, part_of
from amp_core.casts.stand_ins import refuse_wrapper
from amp_core.casts.storage import STORAGES
from amp_core.common.optimizers import parameters_of
from amp_core.regions.selecting import matches, matching


def checked_optimizer(optimizer: object, storage: str, state_dtype: torch.dtype) -> Optimizer:
    """Return `optimizer` if `master_weights` can let it step on bfloat16 weights; else raise an error."""
    if not isinstance(storage, str):
        raise TypeError(f"storage= must be the name of a storage, not {storage!r}.")
    if storage not in STORAGES:
        raise ValueError(f"Unknown storage {storage!r}: the storages are fp32, {', '.join(STORAGES)}.")
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"storage={storage!r} needs the optimizer, not {type(optimizer).__name__}.")
    if state_dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"state_dtype must be torch.float32 or torch.bfloat16, not {state_dtype!r}.")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("LBFGS moves the weights several times within a step; it needs storage='fp32'.")
    refuse_wrapper(optimizer, "master_weights")
    if "step" in vars(optimizer):
        raise RuntimeError(
            "Something has replaced optimizer.step: other master_weights, or a learning-rate scheduler. Call "
            "remove() on the handle of the former; create a scheduler after master_weights."
        )
    return optimizer


def checked_globs(model: nn.Module, keep: Iterable[str]) -> list[str]:
    """Return the globs of ``keep=``.

    Raises:
        TypeError: `keep` is not a list of globs.
        PolicyError: a glob matches no parameter.
    """
    globs = None if isinstance(keep, (str, Tensor)) or not isinstance(keep, Iterable) else [*keep]
    if globs is None or not all(isinstance(glob, str) for glob in globs):
        raise TypeError(f"keep= must be a list of globs, such as ['**.norm.*'], not {keep!r}.")
    matching((name for name, _ in model.named_parameters(remove_duplicate=False)), globs, "parameter", model)
    return globs


def storable(model: nn.Module, optimizer: Optimizer, globs: list[str]) -> dict[str, Tensor]:
    """Return, by name, the float32 and bfloat16 parameters that `optimizer` steps and `globs` leave."""
    chosen = set(map(id, parameters_of(optimizer))) - _kept(model, globs)
    return {
        name: p
        for name, p in model.named_parameters()
        if p.dtype in (torch.float32, torch.bfloat16) and id(p) in chosen
    }


def refuse_unstorable(model: nn.Module, stored: dict[str, Tensor]) -> None:
    """Raise ValueError if there is no parameter in `stored`, or one that cannot be stored in bfloat16."""
    if not stored:
        raise ValueError(
            "No float32 or bfloat16 parameter of the model, but for keep=, is stepped by the optimizer."
        )
    in_ddp = _in_ddp(model)
    for name, param in stored.items():
        _refuse(name, param, in_ddp)
    _refuse_one_memory(stored)


def still_named(model: nn.Module, names: Mapping[Tensor, str]) -> bool:
    """Return whether each parameter has its name in `model`: a look at few of many parameters."""
    try:
        return all(name and model.get_parameter(name) is param for param, name in names.items())
    except AttributeError:
        return False


def is_dense(param: Tensor) -> bool:
    """Return whether `param` is in memory that kernels can read."""
    part = part_of(param)
    return part.layout is torch.strided and not is_wrapper(part)


def _refuse(name: str, param: Tensor, in_ddp: set[int]) -> None:
    """Raise ValueError if `param` cannot be stored in bfloat16."""
    part = part_of(param)
    if is_wrapper(part):
        raise ValueError(
            f"{name} is a {type(part).__name__}, whose memory only the library that it comes from can "
            f"replace. Name it in keep=."
        )
    if part.layout is not torch.strided:
        raise ValueError(f"{name} has the layout {part.layout}, not torch.strided. Name it in keep=.")
    if param.dtype is not torch.float32:
        return
    if nn.parameter.is_lazy(param) or param.is_meta:
        raise ValueError(
            f"{name} has no memory yet. Call the model once, if it is of a lazy module, or move it to its "
            f"device; call master_weights then."
        )
    if part is not param:
        raise ValueError(f"{name} is a float32 shard: call model.to(torch.bfloat16) before fully_shard.")
    if id(param) in in_ddp:
        raise ValueError(
            f"{name} is float32, and DistributedDataParallel, which has wrapped it, would no longer reduce "
            f"its gradient in bfloat16: call master_weights on the model, or model.to(torch.bfloat16), and "
            f"wrap it then."
        )


def _refuse_one_memory(stored: dict[str, Tensor]) -> None:
    """Raise ValueError if two parameters have the same memory: the update of one would be lost."""
    names: dict[int, str] = {}
    for name, param in stored.items():
        address = part_of(param).data_ptr()
        other = names.setdefault(address, name)
        if address and other != name:
            raise ValueError(
                f"{other} and {name} have the same memory and are two parameters, as "
                f"load_state_dict(assign=True) leaves tied ones. Give both names one parameter again, and "
                f"create the optimizer then."
            )


def _kept(model: nn.Module, globs: list[str]) -> set[int]:
    """Return the ``id`` of each parameter that stays as it is; globs of ``keep=`` match any of its names."""
    named = model.named_parameters(remove_duplicate=False)
    chosen = {id(param) for name, param in named if any(matches(name, glob) for glob in globs)}
    return chosen | _beside_statistics(model)


def _beside_statistics(model: nn.Module) -> set[int]:
    """Return the ``id`` of each float32 parameter of a batch norm with float32 running statistics.

    Kernels take weights in the dtype of these statistics, of which bfloat16 would lose most updates.
    """
    statistics = ((m, getattr(m, "running_mean", None)) for m in model.modules())
    norms = (m for m, mean in statistics if isinstance(mean, Tensor) and mean.dtype is torch.float32)
    return {id(p) for m in norms for p in m.parameters(recurse=False) if p.dtype is torch.float32}


def _in_ddp(model: nn.Module) -> set[int]:
    """Return the ``id`` of each parameter in a DistributedDataParallel of `model`."""
    wrappers = (m for m in model.modules() if isinstance(m, nn.parallel.DistributedDataParallel))
    return {id(param) for wrapper in wrappers for param in wrapper.parameters()}
