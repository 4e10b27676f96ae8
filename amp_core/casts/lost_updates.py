"""Lost updates: elements of a weight that a step should have changed, but rounding left as they were."""

from __future__ import annotations

import contextlib
import copy
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_core._torch.tensors import part_of
from amp_core._torch.tracing import outside_graphs, untraced
from amp_core.casts.shards import like
from amp_core.casts.stand_ins import buckets, put_in_place, refuse_wrapper, unhooked_step
from amp_core.casts.storage import widen_state
from amp_core.casts.stored_parameters import still_named
from amp_core.common.arguments import check_module
from amp_core.common.generators import kept_generators
from amp_core.common.handle import LocalHandle
from amp_core.common.optimizers import copied_group, is_torchs, parameters_of

_LOW = (torch.bfloat16, torch.float16)


class Counts:
    """The share of lost updates in the last step of `optimizer`, by parameter.

    `GradScaler` makes the record of a step before the step is taken, and refers to the dict that the step
    will fill.

    Attributes:
        last: name -> share, on the device.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        if hasattr(optimizer, "_amp_core_lost_updates"):
            raise RuntimeError(
                "The lost updates of this optimizer are counted already: use the handle that counts them, or "
                "call its remove() first."
            )
        self._optimizer = optimizer
        self.last: dict[str, Tensor] = {}
        self.end()

    def begin(self) -> None:
        """Begin a step."""
        self.last = self._optimizer._amp_core_lost_updates  # type: ignore[attr-defined]

    def end(self) -> None:
        """End a step: the next one has counts of its own."""
        self._optimizer._amp_core_lost_updates = {}  # type: ignore[attr-defined]

    def count(self, name: str, lost: Tensor) -> None:
        """Note which elements of a parameter lost their update."""
        if lost.numel():
            self.last[name] = lost.float().mean()

    def read(self) -> dict[str, float]:
        """Return the shares; waits for the device."""
        return {name: float(share) for name, share in self.last.items()}

    def remove(self) -> None:
        """Stop counting."""
        self._optimizer.__dict__.pop("_amp_core_lost_updates", None)


class LostUpdates(LocalHandle):
    """The handle that `count_lost_updates` returns; also a context manager."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        check_module(model, "count_lost_updates")
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"count_lost_updates needs a torch.optim.Optimizer, not {type(optimizer).__name__}."
            )
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError("LBFGS evaluates the loss within a step, so its updates cannot be counted.")
        refuse_wrapper(optimizer, "count_lost_updates")
        self._counts = Counts(optimizer)
        self._model, self._optimizer = model, optimizer
        self._names: dict[Tensor, str] = {}
        self._before: list[tuple[str, Tensor, Tensor]] = []
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    @outside_graphs
    def _before_step(self, _optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(callable(value) for value in (*args, *kwargs.values())):
            raise RuntimeError(
                "count_lost_updates reads the gradients before the step, and a closure computes them within. "
                "Compute them first and call step() without a closure, or remove() the count."
            )
        self._counts.begin()
        names = {id(p): name for p, name in self._look_up().items()}
        # NaN equals nothing, so only elements that should change can be found unchanged.
        self._before = [
            (name, param, part_of(param).detach().masked_fill(wanted == part_of(param), torch.nan))
            for name, param, wanted in float32_steps(self._optimizer, names)
        ]

    def _look_up(self) -> dict[Tensor, str]:
        """Return the names that the model has for parameters of the optimizer."""
        own = set(parameters_of(self._optimizer))
        if not (own <= self._names.keys() and still_named(self._model, self._names)):
            self._names = {p: name for name, p in self._model.named_parameters() if p in own}
        return self._names

    @outside_graphs
    def _after_step(self, *_: object) -> None:
        for name, param, before in self._before:
            self._counts.count(name, part_of(param).detach() == before)
        self._before = []
        self._counts.end()

    def lost_updates(self) -> dict[str, float]:
        """Return, by name, the share of elements that the last step should have changed and did not.

        Waits for the device. Parameters other than bfloat16 and float16 ones are left out.
        """
        return self._counts.read()

    @untraced
    def remove(self) -> None:
        """Stop counting. Calling it again has no effect."""
        while self._hooks:
            self._hooks.pop().remove()
            self._counts.remove()


@untraced
def count_lost_updates(model: nn.Module, optimizer: Optimizer) -> LostUpdates:
    """Count the updates that the low-precision weights of `model` lose at each step of `optimizer`.

    Before each step, the optimizer steps on float32 copies of its bfloat16 and float16 parameters, gradients
    and states, one bucket (`Backend.grad_bucket_nbytes`) at a time; an optimizer from outside ``torch.optim``
    gets copies of all its parameters at once. An update is lost if that changes an element and the real step
    does not. The real step is as without the count. For a weight that `master_weights` stores, use its
    ``lost_updates=True``.

    The records of `GradScaler` have the counts too: ``scaler.history[-1].lost_updates``. Only reading waits
    for the device.

    Args:
        model: names the parameters.
        optimizer: any but LBFGS; what it keeps must be in ``state`` and ``param_groups``, or be numbers in
            its attributes.

    Returns:
        The handle. ``lost_updates()`` returns the share of each parameter's elements in the last step;
        ``remove()``, or leaving a ``with`` block, ends the count.

    Raises:
        TypeError: `optimizer` is not a ``torch.optim.Optimizer``.
        ValueError: it is LBFGS, or steps another optimizer.
        RuntimeError: its lost updates are counted already; or, at a step, it is called with a closure.

    Example:
        >>> import torch, amp_core
        >>> model = torch.nn.Linear(2, 1, bias=False, dtype=torch.bfloat16)
        >>> _ = torch.nn.init.ones_(model.weight)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        >>> with amp_core.count_lost_updates(model, optimizer) as counted:
        ...     model(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
        ...     optimizer.step()
        >>> counted.lost_updates()
        {'weight': 1.0}
    """
    return LostUpdates(model, optimizer)


def lost_to_rounding(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, float]:
    """Return the share of elements that a float32 step changes and rounding restores."""
    shares = {}
    for name, param, wanted in float32_steps(optimizer, names):
        before = part_of(param).detach()
        shares[name] = ((wanted != before) & (wanted.to(before.dtype) == before)).float().mean()
    return {name: float(share) for name, share in shares.items()}


def float32_steps(optimizer: Optimizer, names: Mapping[int, str]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield (name, parameter, this rank's part after a step in float32); the step leaves nothing behind."""
    step = unhooked_step(optimizer)
    for bucket in buckets(optimizer):
        chosen = [(copied_group(group), _stepped(optimizer, pairs, names)) for group, pairs in bucket]
        params = [param for _, pairs in chosen for _, param in pairs]
        low = [param for param in params if _is_low(param, names)]
        if not low:
            continue
        groups, states, copies = optimizer.param_groups, optimizer.state, defaultdict[Any, Any](dict)
        attributes = dict(vars(optimizer))  # such as a count of steps
        stand_ins = {id(param): _stand_in(param, states, copies) for param in params}
        copies.update({k: copy.deepcopy(state) for k, state in states.items() if not isinstance(k, Tensor)})
        try:
            optimizer.state = copies
            put_in_place(optimizer, chosen, stand_ins)
            with _random_numbers_kept(optimizer, low):
                step()
        finally:
            vars(optimizer).clear()
            vars(optimizer).update(attributes)
            optimizer.param_groups, optimizer.state = groups, states
        for param in low:
            yield names[id(param)], param, part_of(stand_ins[id(param)]).detach()


def _stepped(
    optimizer: Optimizer, pairs: list[tuple[int, Tensor]], names: Mapping[int, str]
) -> list[tuple[int, Tensor]]:
    """Return which parameters take the float32 step; one of another package may depend on all that it has."""
    return [pair for pair in pairs if _is_low(pair[1], names)] if is_torchs(optimizer) else pairs


def _random_numbers_kept(
    optimizer: Optimizer, params: Iterable[Tensor]
) -> contextlib.AbstractContextManager[None]:
    """Let the real step draw the same random numbers; torch's own optimizers draw none."""
    if is_torchs(optimizer):
        return contextlib.nullcontext()
    return kept_generators(next((p.device.type for p in params if not p.is_cpu), "cpu"))


def _is_low(param: Tensor, names: Mapping[int, str]) -> bool:
    dense = param.grad is not None and param.grad.layout is torch.strided
    return id(param) in names and param.dtype in _LOW and dense


def _stand_in(param: Tensor, states: Mapping[Any, Any], copies: dict[Any, Any]) -> Tensor:
    """Return a copy of `param`, in float32 if it is narrower, with gradient; add its state to `copies`."""
    dtype = torch.float32 if param.dtype in _LOW else param.dtype
    part = part_of(param).detach().to(dtype, copy=True)
    stand_in = like(param, part).requires_grad_(param.requires_grad)
    if param.grad is not None:
        stand_in.grad = param.grad.to(dtype, copy=True)
    if param in states:
        state = copy.deepcopy(states[param])
        copies[stand_in] = {k: widen_state(v) for k, v in state.items()} if param.dtype in _LOW else state
    return stand_in
