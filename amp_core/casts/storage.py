"""Bfloat16 weights that lose no updates: `master_weights` with a storage other than float32.

The optimizer steps on float32 weights, gradients and states, which exist for one bucket of parameters at a
time. After that, a `Storage` decides what stays: the bfloat16 weight, and what the storage keeps beside it in
the optimizer's own state, so that its checkpoints hold everything.
"""

from __future__ import annotations

import fnmatch
import types
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_core.casts import rounding
from amp_core.casts.shards import elements, like, local
from amp_core.common.counter_random import key_of

KEPT = "amp_core_kept"
"""The entry of the optimizer's state, per parameter, that holds what its weight lacks."""
STEPS = "amp_core_steps"
"""The entry of a parameter group that counts steps: the number from which random bits are drawn."""

_BUCKET_BYTES = 64 * 2**20
"""Bytes of float32 weights that exist at a time during a step."""


class Draw(NamedTuple):
    """Identifies the random bits of one parameter in one step."""

    seed: int
    step: int
    number: int

    def key(self, purpose: int = 0) -> int:
        """Return the key of these random bits."""
        return key_of(self.seed, self.step, self.number, purpose)


class Storage(NamedTuple):
    """How a float32 weight is stored.

    Attributes:
        widen: (bfloat16 weight, what is kept) -> the float32 weight.
        narrow: (float32 weight, the parameter, draw) -> the bfloat16 weight and what is kept.
    """

    widen: Callable[[Tensor, Tensor | None], Tensor]
    narrow: Callable[[Tensor, Tensor, Draw], tuple[Tensor, Tensor | None]]


def _add(low: Tensor, kept: Tensor | None) -> Tensor:
    return low.float() if kept is None else low.float() + kept


def _compensated(wide: Tensor, _param: Tensor, _draw: Draw) -> tuple[Tensor, Tensor | None]:
    low = wide.bfloat16()
    # An infinity has no compensation: inf - inf is NaN.
    return low, (wide - low).nan_to_num_(0, 0, 0).bfloat16()


def _rounded(wide: Tensor, param: Tensor, draw: Draw) -> tuple[Tensor, Tensor | None]:
    return rounding.stochastic(wide, elements(param), draw.key()), None


STORAGES = {
    "remainder": Storage(
        lambda low, kept: low.float() if kept is None else rounding.join(low, kept),
        lambda wide, _param, _draw: rounding.split(wide),
    ),
    "stochastic": Storage(_add, _rounded),
    "kahan": Storage(_add, _compensated),
}


class StoredWeights:
    """The handle that `master_weights` returns for bfloat16 storage; also a context manager.

    Attributes:
        storage: ``"remainder"``, ``"stochastic"`` or ``"kahan"``.
        optimizer: the optimizer whose steps it takes.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        storage: str,
        *,
        seed: int,
        state_dtype: torch.dtype,
        keep: Iterable[str],
        lost_updates: bool,
    ) -> None:
        optimizer = _checked(optimizer, storage, state_dtype)
        globs = tuple(keep)
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self.storage, self.optimizer = storage, optimizer
        self._how, self._seed, self._state_dtype = STORAGES[storage], seed, state_dtype
        self._names = {
            id(p): name
            for name, p in model.named_parameters()
            if id(p) in held
            and p.dtype in (torch.float32, torch.bfloat16)
            and not any(fnmatch.fnmatchcase(name, glob) for glob in globs)
        }
        sharded = [p for p in self._params() if local(p) is not p and p.dtype is torch.float32]
        if sharded:
            name = self._names[id(sharded[0])]
            raise ValueError(f"{name} is a float32 shard: call model.to(torch.bfloat16) before fully_shard.")
        if not self._names:
            raise ValueError("No float32 or bfloat16 parameter of the model is stepped by the optimizer.")
        self._lost: dict[str, Tensor] | None = None
        if lost_updates:
            self._lost = optimizer._amp_core_lost_updates = {}  # type: ignore[attr-defined]
        for param in [p for p in self._params() if p.dtype is torch.float32]:
            self._convert(param)
        self._inner = _unhooked(optimizer)
        self._step = types.MethodType(Optimizer.profile_hook_step(self._take_step), optimizer)
        optimizer.step = self._step  # type: ignore[method-assign]
        self._loaded: dict[str, Any] = {}
        self._hooks = [
            optimizer.register_load_state_dict_pre_hook(self._remember),
            optimizer.register_load_state_dict_post_hook(self._load_exactly),
        ]

    def _params(self) -> Iterator[Tensor]:
        params = chain.from_iterable(group["params"] for group in self.optimizer.param_groups)
        return (p for p in params if id(p) in self._names)

    def _convert(self, param: Tensor) -> None:
        """Store a float32 parameter, rounded to nearest; no random bits are drawn."""
        if self.storage == "stochastic":
            low, kept = param.detach().bfloat16(), None
        else:
            low, kept = self._how.narrow(param.detach(), param, Draw(0, 0, 0))
        param.grad = None
        param.data = low
        if kept is not None:
            self.optimizer.state[param][KEPT] = kept

    # One step.

    def _take_step(self, _optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = self.optimizer.param_groups
        if self._lost is not None:  # the scaler's record of this step has it already
            self._lost = self.optimizer._amp_core_lost_updates  # type: ignore[attr-defined]
        for group in groups:
            group[STEPS] = group.get(STEPS, 0) + 1
        try:
            for bucket in self._buckets():
                self._step_bucket(bucket)
        finally:
            self.optimizer.param_groups = groups
            if self._lost is not None:
                self.optimizer._amp_core_lost_updates = {}  # type: ignore[attr-defined]
        return loss

    def _buckets(self) -> Iterator[list[tuple[dict[str, Any], list[tuple[int, Tensor]]]]]:
        """Yield the parameters with gradients, as (group, its (index, parameter) pairs) for each group.

        An optimizer of another package gets all in one: it may count its calls.
        """
        limit = _BUCKET_BYTES if type(self.optimizer).__module__.startswith("torch.optim") else float("inf")
        index, size = 0, 0
        bucket: list[tuple[dict[str, Any], list[tuple[int, Tensor]]]] = []
        for group in self.optimizer.param_groups:
            bucket.append((group, []))
            for param in group["params"]:
                index += 1
                if param.grad is None:
                    continue
                nbytes = 4 * local(param).numel()
                if size and size + nbytes > limit:
                    yield bucket
                    bucket, size = [(group, [])], 0
                bucket[-1][1].append((index, param))
                size += nbytes
        yield bucket

    def _step_bucket(self, bucket: list[tuple[dict[str, Any], list[tuple[int, Tensor]]]]) -> None:
        optimizer, originals = self.optimizer, [(group, group["params"]) for group, _ in bucket]
        wide = {id(p): self._widened(p) for _, pairs in bucket for _, p in pairs if id(p) in self._names}
        try:
            for group, pairs in bucket:
                group["params"] = [wide.get(id(p), p) for _, p in pairs]
            optimizer.param_groups = [group for group, _ in bucket]
            self._inner()
        finally:
            for group, params in originals:
                group["params"] = params
            for group, pairs in bucket:
                for index, param in pairs:
                    if id(param) in wide:
                        self._take_back(param, wide[id(param)], Draw(self._seed, group[STEPS], index))

    def _widened(self, param: Tensor) -> Tensor:
        """Return a float32 stand-in for `param`, with its gradient and the optimizer's state."""
        state = self.optimizer.state.pop(param, {})
        kept = state.pop(KEPT, None)
        low = local(param).detach()
        stand_in = like(param, self._how.widen(low, None if kept is None else local(kept)))
        stand_in.requires_grad_()
        assert param.grad is not None
        stand_in.grad = param.grad.float()
        self.optimizer.state[stand_in] = {
            k: v.float() if _is_elementwise(v, param) else v for k, v in state.items()
        }
        stand_in._amp_core_kept = kept  # type: ignore[attr-defined]
        return stand_in

    def _take_back(self, param: Tensor, stand_in: Tensor, draw: Draw) -> None:
        state = self.optimizer.state.pop(stand_in)
        before = None
        if self._lost is not None:
            kept = stand_in._amp_core_kept  # type: ignore[attr-defined]
            before = self._how.widen(local(param).detach(), None if kept is None else local(kept)).clone()
        low, kept = self._how.narrow(local(stand_in).detach(), param, draw)
        local(param).detach().copy_(low)
        if before is not None:
            self._count_lost(param, before, local(stand_in).detach(), kept)
        if self._state_dtype is not torch.float32:
            state = {
                k: _state_rounded(v, param, draw.key(1 + i)) for i, (k, v) in enumerate(sorted(state.items()))
            }
        if kept is not None:
            state[KEPT] = like(param, kept)
        self.optimizer.state[param] = state

    # Lost updates.

    def _count_lost(self, param: Tensor, before: Tensor, wanted: Tensor, kept: Tensor | None) -> None:
        now = self._how.widen(local(param).detach(), kept)
        assert self._lost is not None
        self._lost[self._names[id(param)]] = ((wanted != before) & (now == before)).float().mean()

    def lost_updates(self) -> dict[str, float]:
        """Return, by name, the share of elements that the last step should have changed and did not.

        Raises:
            RuntimeError: `master_weights` was called without ``lost_updates=True``.
        """
        if self._lost is None:
            raise RuntimeError("Pass lost_updates=True to master_weights to have lost updates counted.")
        return {name: float(share) for name, share in self._lost.items()}

    # Checkpoints.

    def _remember(self, _optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict

    def _load_exactly(self, optimizer: Optimizer) -> None:
        """Give the loaded states their own dtypes back: torch casts them to that of the parameter."""
        loaded, self._loaded = self._loaded, {}
        ids = chain.from_iterable(group["params"] for group in loaded["param_groups"])
        params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        for number, param in zip(ids, params, strict=True):
            for key, value in loaded["state"].get(number, {}).items():
                if id(param) in self._names and key != "step" and isinstance(value, Tensor):
                    optimizer.state[param][key] = value.to(device=param.device, copy=True)

    def float32_weights(self) -> dict[str, Tensor]:
        """Return the weights in float32 by name, as exact as the storage has them; for a checkpoint."""
        weights = {}
        for param in self._params():
            kept = self.optimizer.state.get(param, {}).get(KEPT)
            wide = self._how.widen(local(param).detach(), None if kept is None else local(kept))
            weights[self._names[id(param)]] = like(param, wide)
        return weights

    def nbytes(self) -> int:
        """Return the bytes that are kept beside the bfloat16 weights."""
        states = (self.optimizer.state.get(p, {}) for p in self._params())
        return sum(local(state[KEPT]).nbytes for state in states if KEPT in state)

    def remove(self) -> None:
        """Let the optimizer step on the bfloat16 weights again. Calling it again has no effect."""
        if not self._hooks:
            return
        while self._hooks:
            self._hooks.pop().remove()
        if self.optimizer.__dict__.get("step") is self._step:
            del self.optimizer.step
        for param in self._params():
            self.optimizer.state.get(param, {}).pop(KEPT, None)
        self.optimizer.__dict__.pop("_amp_core_lost_updates", None)
        self._lost = None
        self._names = {}  # a learning-rate scheduler may go on calling this step

    def __enter__(self) -> StoredWeights:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def _checked(optimizer: object, storage: str, state_dtype: torch.dtype) -> Optimizer:
    if storage not in STORAGES:
        raise ValueError(f"Unknown storage {storage!r}: the storages are fp32, {', '.join(STORAGES)}.")
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"storage={storage!r} needs the optimizer, not {type(optimizer).__name__}.")
    if state_dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"state_dtype must be torch.float32 or torch.bfloat16, not {state_dtype}.")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("LBFGS moves the weights several times within a step; it needs storage='fp32'.")
    if "step" in vars(optimizer):
        raise RuntimeError(
            "Something has replaced optimizer.step: other master_weights, or a learning-rate scheduler. Call "
            "remove() on the handle of the former; create a scheduler after master_weights."
        )
    return optimizer


def _unhooked(optimizer: Optimizer) -> Callable[[], Any]:
    """Return the step of `optimizer` without its hooks, which must run once per step."""
    step = type(optimizer).step
    step = step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]
    return types.MethodType(step, optimizer)


def _is_elementwise(value: Any, param: Tensor) -> bool:
    is_float = isinstance(value, Tensor) and value.is_floating_point()
    return is_float and value.shape == param.shape and value.dim() > 0


def _state_rounded(value: Any, param: Tensor, key: int) -> Any:
    """Round one state to bfloat16; stochastically, as the second moment would never change otherwise."""
    if not _is_elementwise(value, param):
        return value
    return like(param, rounding.stochastic(local(value), elements(param), key))
