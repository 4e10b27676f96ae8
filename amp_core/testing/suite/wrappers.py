"""A subclass of `torch.Tensor` that only wraps another tensor, as those of torchao and of collectives do."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from amp_core._torch.dispatcher import is_mutable
from amp_core._torch.tensors import make_wrapper
from amp_core.common.containers import map_tensors


class Wrapper(Tensor):
    """Runs each op on the tensor that it wraps; it has no memory of its own."""

    _inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:  # noqa: D102
        like = {"strides": inner.stride(), "dtype": inner.dtype, "device": inner.device}
        made: Wrapper = make_wrapper(cls, inner.size(), **like)
        made._inner = inner
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*map_tensors(args, unwrapped), **map_tensors(kwargs or {}, unwrapped))
        if is_mutable(func):  # in place: the wrapper itself, or nothing for a list
            return None if result is None else args[0]
        return map_tensors(result, Wrapper)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Wrapper({self._inner!r})"


def unwrapped(tensor: Tensor) -> Tensor:
    """Return what `tensor` wraps, or `tensor`."""
    return tensor._inner if isinstance(tensor, Wrapper) else tensor
