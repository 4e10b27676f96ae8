"""Bfloat16 weights that lose no updates: `master_weights` with a storage other than float32.

The optimizer steps on float32 weights, gradients and states, which exist for one bucket of parameters at a
time. After that, a `Storage` decides what stays: the bfloat16 weight, and what the storage keeps beside it in
the optimizer's own state, so that its checkpoints hold everything.
"""

from __future__ import annotations

import contextlib
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_core._torch.list_writes import see_list_writes
from amp_core._torch.tensors import part_of
from amp_core._torch.tracing import outside_graphs, untraced
from amp_core.casts.last_writes import LastWrites
from amp_core.casts.lost_updates import Counts
from amp_core.casts.memory import KeptMemory
from amp_core.casts.shards import like
from amp_core.casts.stand_ins import Bucket, buckets, put_in_place, refused_writes, unhooked_step
from amp_core.casts.storage import (
    KEPT,
    KEPT_DTYPES,
    STORAGES,
    Draw,
    drop_foreign,
    narrow_state,
    unpacked,
    widen_state,
)
from amp_core.casts.stored_checkpoints import StoredCheckpoints
from amp_core.casts.stored_parameters import (
    checked_globs,
    checked_optimizer,
    is_dense,
    refuse_unstorable,
    still_named,
    storable,
)
from amp_core.common.arguments import as_whole, check_module
from amp_core.common.containers import map_tensors
from amp_core.common.handle import LocalHandle
from amp_core.common.optimizers import leaves_weights, parameters_of

STEPS = "amp_core_steps"
"""The entry of a parameter group that counts steps: the number from which random bits are drawn."""
_IDLE_BYTES = 32 * 2**20
"""At most so many bytes of work memory stay between two steps, on devices that do not cache it themselves."""


class StoredWeights(LocalHandle):
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
        optimizer = checked_optimizer(optimizer, storage, state_dtype)
        check_module(model, "master_weights")
        seed = as_whole(seed, "seed")
        self.storage, self.optimizer = storage, optimizer
        self._memory = KeptMemory()
        self._how, self._seed, self._state_dtype = STORAGES[storage], seed, state_dtype
        self._model, self._keep = model, checked_globs(model, keep)
        stored = storable(model, optimizer, self._keep)
        refuse_unstorable(model, stored)
        # A weak reference to a parameter would forbid torch.utils.swap_tensors, by which DTensors move.
        self._names: dict[Tensor, str] = {}  # of the parameters that are stored
        self._known: dict[Tensor, None] = {}  # that the model has, too
        self._lost = Counts(optimizer) if lost_updates else None
        # What is kept until the first step: a state shows that it began.
        self._first: dict[Tensor, Tensor] = {}
        optimizer._amp_core_first = self._first  # type: ignore[attr-defined]  # for copies of its state
        self._writes = LastWrites(optimizer)
        for param in stored.values():
            self._convert(param)
        for group in optimizer.param_groups:
            group.setdefault(STEPS, 0)
        see_list_writes()
        self._inner = unhooked_step(optimizer)
        self._step = types.MethodType(Optimizer.profile_hook_step(_step_of(self)), optimizer)
        optimizer.step = self._step  # type: ignore[method-assign]
        optimizer._amp_core_stored = self  # type: ignore[attr-defined]  # the step itself does not keep this
        self._checkpoints: StoredCheckpoints | None = StoredCheckpoints(
            optimizer, self._how, state_dtype, self._first, self._params, self._writes
        )
        self._look_up()

    def _params(self) -> Iterator[Tensor]:
        self._look_for_new()
        return filter(self._is_stored, parameters_of(self.optimizer))

    def _is_stored(self, param: Tensor) -> bool:
        return param in self._names and param.dtype is torch.bfloat16  # float32 if it joined later

    def _look_for_new(self) -> None:
        """Look up the names if parameters may have joined or left the optimizer, or joined the model."""
        self._clear_rewritten()
        stepped = parameters_of(self.optimizer)
        if len(stepped) < len(self._known) or not all([param in self._known for param in stepped]):
            self._look_up()

    def _clear_rewritten(self) -> None:
        """Let weights lack nothing that were written to before their first step, as DDP does on all ranks."""
        for param in self._writes.take_rewritten():
            kept = self._kept(param)
            if kept is not None:
                part_of(kept).zero_()

    def _look_up(self) -> None:
        """Choose among the parameters that have joined, and name those that are stored as the model does."""
        if self._checkpoints is None:  # this was removed
            return
        stepped = set(parameters_of(self.optimizer))
        stored = {param: name for param, name in self._names.items() if param in stepped}
        joined = storable(self._model, self.optimizer, self._keep).values()
        new = {param for param in joined if is_dense(param) and param not in self._known}
        now: dict[Tensor, str] = {
            p: name for name, p in self._model.named_parameters() if p in stored or p in new
        }
        taken = {*now.values()}  # "" if a weight has left the model, and another has the name
        left = {p: "" if name in taken else name for p, name in stored.items() if p not in now}
        self._names = {**left, **now}
        self._known = dict.fromkeys([*left, *(p for p in self._model.parameters() if p in stepped)])
        self._writes.forget_others(stepped)
        for param in self._first.keys() - stepped:
            del self._first[param]

    def _convert(self, param: Tensor) -> None:
        """Store a float32 parameter, rounded to nearest; no random bits are drawn."""
        state = self.optimizer.state.get(param, {})
        if self._state_dtype is torch.float32:  # DCP loads into them, in the dtype that they have
            state.update({key: widen_state(value) for key, value in state.items() if key != KEPT})
        if param.dtype is torch.float32:
            wide, grad = param.detach().clone(), param.grad
            state.pop(KEPT, None)  # of a checkpoint that was loaded too early: float32 weights lack nothing
            param.grad = None
            param.data = torch.empty_like(wide, dtype=torch.bfloat16)
            if grad is not None:  # an attribute since torch 2.13; None allows any
                param.grad = grad.to(getattr(param, "grad_dtype", param.dtype) or grad.dtype)
        elif state and KEPT not in state:  # as Adagrad's: DCP loads only entries that a state has
            wide = part_of(param).detach().float()
        else:
            return
        kept = self._how.narrow(wide, param)
        if kept is None:
            return
        self._writes.note_converted(param)
        if state:  # torch's flattened checkpoints load only the entries that are there
            state[KEPT] = like(param, kept)
        else:
            self._first[param] = like(param, kept)

    # One step.

    def _take_step(self, closure: Callable[[], Any] | None) -> Any:
        """Let the optimizer step on float32 weights; returns what the closure returned."""
        self._writes.refuse_two(self._names)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        counts = not leaves_weights(self.optimizer)  # a checkpoint must not change later random bits
        for group in self.optimizer.param_groups:
            group[STEPS] = group.get(STEPS, 0) + counts
        self._look_for_new()
        for param in self._names:
            if param.grad is not None and not self._is_stored(param):  # a model that was cast to float32
                self._drop_kept(param)
        if self._lost is not None:
            if not still_named(self._model, self._names):  # layers have moved
                self._look_up()
            self._lost.begin()
        try:
            for bucket in buckets(self.optimizer):
                self._step_bucket(bucket)
        finally:
            if self._memory.idle_nbytes() > _IDLE_BYTES:
                self._memory.clear()
            if self._lost is not None:
                self._lost.end()
        return loss

    def _step_bucket(self, bucket: Bucket) -> None:
        params = [p for _, pairs in bucket for _, p in pairs if self._is_stored(p) and p.grad is not None]
        groups, lists = self.optimizer.param_groups, [(group, group["params"]) for group, _ in bucket]
        wide: dict[int, Tensor] = {}
        try:
            for param in params:
                stand_in, state = self._widened(param)  # takes memory, so it may fail
                wide[id(param)] = stand_in
                self.optimizer.state[stand_in] = state
                self.optimizer.state.pop(param, None)
                self._first.pop(param, None)
            with refused_writes(self.optimizer, params):
                put_in_place(self.optimizer, bucket, wide)
                self._inner()
        finally:
            try:
                self._end_bucket(bucket, wide, groups, lists)
            except BaseException:  # an interrupt, after which the optimizer would have lost what is left
                self._end_bucket(bucket, wide, groups, lists)
                raise

    def _end_bucket(
        self,
        bucket: Bucket,
        wide: dict[int, Tensor],
        groups: list[dict[str, Any]],
        lists: list[tuple[dict[str, Any], list[Tensor]]],
    ) -> None:
        """Take back each stand-in, the others too if one fails: it has the only state of its parameter."""
        for group, params in lists:
            group["params"] = params
        self.optimizer.param_groups = groups
        with contextlib.ExitStack() as stack:
            for group, pairs in reversed(bucket):
                for index, param in reversed(pairs):
                    if id(param) in wide:
                        draw = Draw(self._seed, group[STEPS], index)
                        stack.callback(self._take_back, param, wide, draw)

    def _widened(self, param: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """Return a float32 stand-in for `param`, with its gradient, and the state that it needs."""
        stand_in = like(param, self._wide(param)).requires_grad_()
        assert param.grad is not None
        stand_in.grad = self._float32(param.grad)
        stand_in._amp_core_kept = self._kept(param)  # type: ignore[attr-defined]
        state = {key: value for key, value in self.optimizer.state.get(param, {}).items() if key != KEPT}
        return stand_in, {k: widen_state(v) for k, v in state.items()}

    def _kept(self, param: Tensor) -> Tensor | None:
        """Return what is kept beside `param`, as the storage keeps it."""
        state = self.optimizer.state.get(param, {})
        kept: Tensor | None = state.get(KEPT, self._first.get(param))
        if kept is not None and (kept.dim() > param.dim() or kept.dtype not in KEPT_DTYPES):
            # A class that loads in its own way may put integers back as they were saved; others cast states.
            kept = state[KEPT] = unpacked(kept.clone(), param, self._how)
        return kept

    def _drop_kept(self, param: Tensor) -> None:
        self.optimizer.state.get(param, {}).pop(KEPT, None)
        self._first.pop(param, None)

    def _wide(self, param: Tensor) -> Tensor:
        """Return this rank's part of `param` in float32, as exact as the storage has it."""
        whole = self._kept(param)
        low = part_of(param).detach().bfloat16()
        wide = self._memory.empty_like(low, torch.float32)
        kept = None if whole is None else part_of(whole)
        if kept is not None and not self._writes.is_last(param, whole):
            kept = drop_foreign(kept, low)  # doing this at each step would take twice the time
        self._how.widen_(wide, low, kept)
        return wide

    def _float32(self, grad: Tensor) -> Tensor:
        if grad.dtype is torch.float32 or grad.layout is not torch.strided or part_of(grad) is not grad:
            return grad.float()
        return self._memory.empty_like(grad, torch.float32).copy_(grad)

    def _take_back(self, param: Tensor, stand_ins: dict[int, Tensor], draw: Draw) -> None:
        states, stand_in = self.optimizer.state, stand_ins[id(param)]
        if stand_in not in states:  # an interrupt came first, and what the parameter had is still there
            return
        wide, kept = part_of(stand_in).detach(), stand_in._amp_core_kept  # type: ignore[attr-defined]
        state = states[param] = states[stand_in]
        if kept is not None:
            state[KEPT] = kept
        del states[stand_in], stand_ins[id(param)]
        if getattr(self.optimizer, "grad_scale", None) is not None:  # torch's fused steps unscale gradients
            part_of(param.grad).detach().copy_(part_of(stand_in.grad).detach())  # type: ignore[arg-type]
        before = None if self._lost is None else self._wide(param)
        changed = None if before is None else wide != before  # `wide` is overwritten
        kept = self._how.narrow(wide, param, draw, None if kept is None else part_of(kept))
        if kept is not None:
            state[KEPT] = like(param, kept)
        else:
            state.pop(KEPT, None)  # of another storage, which a checkpoint may be of
        self._writes.note(param, state.get(KEPT))
        if self._state_dtype is not torch.float32:
            for i, name in enumerate(sorted(state.keys() - {KEPT})):
                state[name] = narrow_state(state[name], param, draw.key(1 + i))
        if not state:  # FSDP1 refuses an empty one, which torch's SGD never has
            del self.optimizer.state[param]
        if self._lost is not None and changed is not None and self._names[param]:
            self._lost.count(self._names[param], changed & (self._wide(param) == before))

    def lost_updates(self) -> dict[str, float]:
        """Return, by name, the share of elements that the last step should have changed and did not.

        Raises:
            RuntimeError: `master_weights` was called without ``lost_updates=True``.
        """
        if self._lost is None:
            raise RuntimeError("Pass lost_updates=True to master_weights to have lost updates counted.")
        return self._lost.read()

    def float32_weights(self) -> dict[str, Tensor]:
        """Return the weights in float32 by name, as exact as the storage has them; for a checkpoint."""
        self._clear_rewritten()
        self._look_up()  # layers may have moved
        return {name: like(param, self._exact(param)) for param, name in self._names.items() if name}

    def _exact(self, param: Tensor) -> Tensor:
        """Return this rank's part of `param` in float32, also if ``model.float()`` has cast it since."""
        wide, part = self._wide(param), part_of(param).detach()
        return wide if self._is_stored(param) else torch.where(part == part.bfloat16(), wide, part.float())

    def nbytes(self) -> int:
        """Return the bytes that are kept beside the bfloat16 weights."""
        states = (self.optimizer.state.get(p, {}) for p in self._params())
        kept = [state[KEPT] for state in states if KEPT in state]
        return sum(part_of(each).nbytes for each in (*kept, *self._first.values()))

    @untraced
    def remove(self) -> None:
        """Let the optimizer step on the bfloat16 weights again; its states are rounded to bfloat16, too.

        Calling it again has no effect.
        """
        if self._checkpoints is None:
            return
        self._checkpoints.remove()
        if self.optimizer.__dict__.get("step") is self._step:
            del self.optimizer.step
        if self.optimizer.__dict__.get("_amp_core_stored") is self:  # else it is stored anew
            del self.optimizer._amp_core_stored
        self._memory.clear()
        for param in parameters_of(self.optimizer):  # those too that are float32 by now
            self._drop_kept(param)
        for param in self._params():
            state = self.optimizer.state.get(param, {})
            for key, value in state.items():
                if key != "step":  # as torch's load_state_dict does
                    state[key] = map_tensors(value, lambda t: t.bfloat16() if t.is_floating_point() else t)
        self._first.clear()
        if self._lost is not None:
            self._lost.remove()
            self._lost = None
        self._writes.end()
        self._checkpoints = None  # late: another call ends what an interrupt broke off
        self._names, self._known = {}, {}  # a scheduler may go on calling this step


def _step_of(stored: StoredWeights) -> Callable[..., Any]:
    """Return the step of its optimizer. A scheduler may keep that for good, and so would keep the model."""
    ref = weakref.ref(stored)

    @outside_graphs  # the random bits of each step would be traced, number by number
    def step(optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        taken_by = ref()
        return unhooked_step(optimizer)(closure) if taken_by is None else taken_by._take_step(closure)

    return step
