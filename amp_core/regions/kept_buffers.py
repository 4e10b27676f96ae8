"""Buffers that stay float32 when their model is cast."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from amp_core._torch.modules import apply_to_tensors, require_module_casts
from amp_core.errors import PolicyError

_KEPT = "_amp_float32_buffers"


class KeptBuffers:
    """Buffers of a model that ``.to(dtype)``, ``half()`` and the like leave float32; devices may change.

    Args:
        model: the model.
        names: names of floating-point buffers of `model`.

    Attributes:
        names: the same, sorted.

    Raises:
        PolicyError: a buffer is already narrower than float32.
        TorchFeatureError: this torch casts modules in an unknown way.
    """

    def __init__(self, model: nn.Module, names: Iterable[str]) -> None:
        self.names = tuple(sorted(names))
        self._buffers: dict[nn.Module, list[str]] = {}
        for name in self.names:
            dtype = model.get_buffer(name).dtype
            if dtype.is_floating_point and dtype.itemsize < torch.float32.itemsize:
                raise PolicyError(
                    f"The buffer {name!r} should stay float32 but is {dtype}, which has lost its digits. "
                    f"Apply the plan before the model is cast, or set the buffer anew in float32."
                )
            owner, _, own = name.rpartition(".")
            self._buffers.setdefault(model.get_submodule(owner), []).append(own)
        if self.names:
            require_module_casts()

    def attach(self) -> None:
        """Keep the buffers from now on."""
        for module, names in self._buffers.items():
            module.__dict__[_KEPT] = [*module.__dict__.get(_KEPT, ()), *names]
            # Unlike a bound method, a partial comes back from a pickle as it was.
            module.__dict__["_apply"] = functools.partial(_apply, module)

    def detach(self) -> None:
        """Let the buffers be cast again."""
        while self._buffers:
            module, names = self._buffers.popitem()
            kept = module.__dict__[_KEPT] = list(module.__dict__[_KEPT])
            for name in names:
                kept.remove(name)
            if not kept:  # else another plan keeps buffers of this module
                del module.__dict__["_apply"], module.__dict__[_KEPT]


def _apply(
    module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], *args: Any, **kwargs: Any
) -> nn.Module:
    """Do what torch's own does, and put back buffers that it has cast."""
    kept = module.__dict__.get(_KEPT, ())  # none if a shallow copy, which has the same buffers, calls later
    before = {name: module._buffers.get(name) for name in kept}  # some may be gone
    result: nn.Module = apply_to_tensors(module, fn, *args, **kwargs)
    for name, buffer in before.items():
        now = module._buffers.get(name)
        if buffer is not None and now is not None and now.dtype is not buffer.dtype:
            module._buffers[name] = buffer.to(now.device)
    return result
