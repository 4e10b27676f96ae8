"""Gradient accumulation in which one bad micro-batch does not cost the others."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_core._torch.tensors import is_dtensor, is_tensor_view, part_of, summed
from amp_core._torch.tracing import outside_graphs
from amp_core.common.optimizers import parameters_of
from amp_core.scaling.arithmetic import moved
from amp_core.scaling.grad_scaler import GradScaler
from amp_core.scaling.gradients import IN_COMMON, group_by_device, joined
from amp_core.scaling.loss_scale import LossScale
from amp_core.scaling.loss_scales import as_list, check_key, check_optimizers
from amp_core.scaling.micro_batches import MicroBatches
from amp_core.scaling.optimizer_state import ParameterNames, Window
from amp_core.scaling.step_record import name_of
from amp_core.states.loss_scale import OptState


class AccumulationWindow:
    """Check the gradients of each micro-batch separately; leave out those that hold an inf or a NaN.

    Without it, one bad micro-batch spoils the sum and the whole step is skipped. With it, the sum is that
    of the good micro-batches, the step is taken, and the next `GradScaler.update` still lowers the scale.
    If all that have gradients are bad and there were none before, the step is skipped. The record of the
    step says which were bad, and in which parameters.

    Use it as a context around the micro-batches of one step, and `micro_batch` around each backward pass.
    Gradients from before the first micro-batch, an earlier window's too, are not checked, and are added when
    the window closes; call ``zero_grad()`` before if there should be none. While it is open, ``unscale_``,
    ``clip_grad_norm_``, ``step`` and ``update`` raise RuntimeError. If the block raises, gradients are as
    they were before it, unless the scaler is disabled.

    It waits for the device only if some parameters get no gradient: once for each set of such parameters.
    It costs memory for a second set of gradients, and for a third if there were gradients before; three
    passes over them for each micro-batch, and one at the end. Ranks that step as one (see `GradScaler`)
    leave out the same micro-batches: one collective of two numbers for each, and one of one at the end.

    Under ``DistributedDataParallel`` every micro-batch must be reduced, so do not use ``no_sync``: what one
    rank adds up without the others is not a gradient of the model. Micro-batches that ``fully_shard`` reduces
    together, by ``set_requires_gradient_sync(False)``, are good or bad together.

    Args:
        scaler: scales the losses. If it is disabled, nothing is checked.
        optimizer: will step on the gradients. Several optimizers lose the same micro-batches, and must step
            as one: pass them together to `GradScaler.clip_grad_norm_` or `GradScaler.unscale_`.
        leave_out: ``False`` adds up all micro-batches as usual, and only records the first bad one.
        reweight: multiply the sum by (all / good micro-batches), so that a mean stays a mean. Those without
            gradients do not count.
        key: the key that the losses are scaled under, if any.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: there is no optimizer, or two have a parameter in common.

    Example::

        window = AccumulationWindow(scaler, optimizer)
        with window:
            for inputs, targets in micro_batches:
                with window.micro_batch():
                    scaler.scale(loss_fn(model(inputs), targets) / len(micro_batches)).backward()
        scaler.step(optimizer)
        scaler.update()
    """

    def __init__(
        self,
        scaler: GradScaler,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        leave_out: bool = True,
        reweight: bool = True,
        key: str | None = None,
    ) -> None:
        if not isinstance(scaler, GradScaler):
            raise TypeError(
                f"AccumulationWindow needs an amp_core.GradScaler, not {type(scaler).__module__}."
                f"{type(scaler).__qualname__}."
            )
        if key is not None:
            check_key(key)
        self._optimizers = [*as_list(optimizer)]
        check_optimizers(self._optimizers, "AccumulationWindow")
        self._scaler, self._key = scaler, key
        self._leave_out, self._reweight = leave_out, reweight
        self._params: list[Tensor] = []
        self._ids: tuple[int, ...] = ()
        self._find_parameters()
        self._micro_batches = MicroBatches()
        self._earlier: list[Tensor | None] | None = None  # gradients from before the first micro-batch
        self._is_open = self._in_micro_batch = False

    def _find_parameters(self) -> None:
        """Take in parameters that were added to the optimizers; each keeps its place."""
        known = set(self._ids)
        unique = self._held()
        self._params += [p for key, p in unique.items() if key not in known]
        self._ids = tuple(map(id, self._params))

    def _held(self) -> dict[int, Tensor]:
        """Return the parameters that the optimizers have now, by id."""
        held: dict[int, Tensor] = {}
        for each in self._optimizers:
            own = {id(p): p for p in parameters_of(each)}
            if not held.keys().isdisjoint(own):
                raise ValueError(IN_COMMON)
            held.update(own)
        return held

    def __enter__(self) -> AccumulationWindow:
        if self._is_open:
            raise RuntimeError("This AccumulationWindow is already open. Enter it once for each step.")
        scales = self._scaler._scales
        for each in self._optimizers if self._scaler.is_enabled() else ():
            if id(each) in scales.in_window:
                raise RuntimeError(
                    f"Another AccumulationWindow of this {type(each).__name__} is open. Leave it first."
                )
        if not self._held().keys() >= set(self._ids):  # some have left
            self._params, self._ids, self._micro_batches = [], (), MicroBatches()
            self._find_parameters()
        self._micro_batches.restart()
        self._earlier = None
        opened = {id(each): self._key for each in self._optimizers}
        # Interrupts come after calls, of which there are none from here on: __exit__ would not run.
        scales.in_window |= opened  # the same dict: other threads open windows, too
        self._is_open = True
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._is_open = False
        closes = kind is None
        try:
            self._leave()
            if closes:
                self._forget_cleared()
                self._close()
        except BaseException:
            closes = False
            self._leave()  # an interrupt may have come within the first call
            raise
        finally:
            if self._earlier is not None:
                added = [None] * (len(self._params) - len(self._earlier))
                self._put(self._sums(self._earlier) if closes else [*self._earlier, *added])
                self._earlier = None

    def _leave(self) -> None:
        for each in self._optimizers:
            self._scaler._scales.in_window.pop(id(each), None)

    @contextmanager
    def micro_batch(self) -> Iterator[None]:
        """Check the gradients that the block adds. If it raises, they are as they were before.

        A disabled scaler does neither.

        Raises:
            RuntimeError: the window is not open, or another micro-batch is; or the gradients were unscaled or
                stepped on since the last update.
            TypeError: a gradient is sparse.
        """
        self._check_place()
        self._in_micro_batch = True
        try:
            with self._kept_apart() if self._scaler.is_enabled() else nullcontext():
                yield
        finally:
            self._in_micro_batch = False

    def _check_place(self) -> None:
        if not self._is_open:
            raise RuntimeError(
                "micro_batch() was entered outside of its window, so an overflow would not lower the scale. "
                "Put the micro-batches of a step inside `with window:`."
            )
        if self._in_micro_batch:
            raise RuntimeError(
                "micro_batch() was entered inside another micro-batch, so its gradients would count twice. "
                "Leave the first one before you enter the next."
            )

    @contextmanager
    def _kept_apart(self) -> Iterator[None]:
        self._check_stage()
        self._find_parameters()
        kept = [p.grad for p in self._params]
        is_first = self._earlier is None
        self._forget_cleared()
        if self._leave_out or is_first:
            kept = [_own_memory(grad) for grad in kept]
            self._put([None] * len(kept))
        else:  # the block adds to them in place
            kept = [None if grad is None else grad.detach().clone() for grad in kept]
        try:
            yield
            self._check()
            if self._leave_out:
                self._clear_bad()
        except BaseException:
            self._put(kept)
            raise
        if is_first and all(param.grad is None for param in self._params):
            self._put(kept)
        elif is_first:  # these are not of this window, which weighs its own
            self._earlier = kept
        elif self._leave_out:
            self._put(self._sums(kept))

    def _forget_cleared(self) -> None:
        """Forget the gradients from before the window if ``zero_grad()`` has set all to None since."""
        if self._earlier is not None and all(param.grad is None for param in self._params):
            self._earlier = [None] * len(self._earlier)

    def _check_stage(self) -> None:
        loss_scale = self._loss_scale()
        if loss_scale is None:
            return
        for each in self._optimizers:
            state = loss_scale.optimizer_states.known(each)
            if state is not None and state.stage is not OptState.READY:
                raise RuntimeError(
                    f"A micro-batch cannot be added to gradients of this {type(each).__name__} that were "
                    f"unscaled or stepped on since the last update(): they have another scale. Call "
                    f"unscale_, clip_grad_norm_ and step after the window."
                )

    def _loss_scale(self) -> LossScale | None:
        scales = self._scaler._scales
        return scales.own if self._key is None else scales.keyed.get(self._key)

    def _put(self, grads: list[Tensor | None]) -> None:
        for param, grad in zip(self._params, grads, strict=False):  # the block may have added parameters
            param.grad = grad

    @outside_graphs
    def _check(self) -> None:
        self._find_parameters()
        sparse = next((p for p in self._params if p.grad is not None and p.grad.is_sparse), None)
        if sparse is not None:
            raise TypeError(_SPARSE.format(name=name_of(sparse, self._scaler._log.names)))
        parts = joined([group_by_device(each, allow_fp16=True) for each in self._optimizers])
        device = parts[0].device if parts else self._params[0].device
        self._micro_batches.add(parts, self._ids, device, self._scaler._unscaler.deciders())

    @torch.no_grad()
    def _clear_bad(self) -> None:
        """Zero the gradients of the last micro-batch if one of them is not finite."""
        flag = self._micro_batches.last_is_bad
        bad = {flag.device: flag}
        for param in self._params:
            if param.grad is not None:
                device = param.grad.device
                if device not in bad:
                    bad[device] = moved(flag, device)
                part_of(param.grad).masked_fill_(bad[device] > 0, 0)

    @torch.no_grad()
    def _sums(self, kept: list[Tensor | None]) -> list[Tensor | None]:
        """Return `kept`, with the gradients that the parameters have now added to them."""
        pairs = itertools.zip_longest(kept, [param.grad for param in self._params])
        return [
            now if before is None else before if now is None else before.add_(now) for before, now in pairs
        ]

    @torch.no_grad()
    def _close(self) -> None:
        loss_scale = self._loss_scale()
        if loss_scale is None or not self._micro_batches.have_gradients:
            return
        flags, with_gradients = self._micro_batches.table()
        bad = self._micro_batches.bad_parameters(len(self._params))
        if self._leave_out:
            loss_scale.optimizer_states.orphans.append(flags.amax(0))  # the next update lowers the scale
            self._weigh(flags, with_gradients, bad)
        else:
            # A bad sum stays bad: only the first bad micro-batch is known.
            flags = flags.diff(prepend=torch.zeros_like(flags[:1])).clamp_(min=0)
        together = frozenset(map(id, self._optimizers))
        for each, of_it in zip(self._optimizers, self._by_optimizer(bad), strict=True):
            state = loss_scale.optimizer_states.of(each)
            found = Window(flags, *of_it, self._leave_out, together)
            state.window = found if state.window is None else state.window.and_then(found)

    def _by_optimizer(self, bad: Tensor) -> Iterator[tuple[ParameterNames, Tensor]]:
        """Yield, for each optimizer, the names of its parameters, and what `bad` says of them."""
        names = [(name_of(p, self._scaler._log.names), p.numel()) for p in self._params]
        if len(self._optimizers) == 1:
            yield tuple(names), bad
            return
        places = {key: place for place, key in enumerate(self._ids)}
        singly = bad.unbind()
        for each in self._optimizers:
            own = sorted({places[id(p)] for p in parameters_of(each) if id(p) in places})
            flags = torch.stack([singly[place] for place in own]) if own else bad[:0]  # an index would wait
            yield tuple([names[place] for place in own]), flags

    def _weigh(self, flags: Tensor, with_gradients: Tensor, bad: Tensor) -> None:
        """Multiply the sum of the good micro-batches; if nothing is good, let the step be skipped.

        Args:
            flags: for each micro-batch, 1.0 if it is bad.
            with_gradients: for each micro-batch, 1.0 if it has gradients.
            bad: for each parameter, 1.0 if a gradient of it was.
        """
        good = (with_gradients - flags).sum()
        factor = with_gradients.sum() / good if self._reweight else torch.ones_like(good)
        nothing_else = self._began_with_gradients(good.device) == 0
        if self._earlier is None:
            return
        of_bad = torch.where((bad > 0) & nothing_else, torch.nan, 1.0)
        factors = torch.where(good > 0, factor, of_bad)
        for param, own in zip(self._params, factors.unbind(), strict=True):
            if param.grad is not None:
                part_of(param.grad).mul_(moved(own, param.grad.device))

    @outside_graphs
    def _began_with_gradients(self, device: torch.device) -> Tensor:
        """Return 1.0 if any rank had gradients before the window other than zeros, else 0.0."""
        # Zeros are what zero_grad(set_to_none=False) has left.
        earlier = [p.grad for p in self._params] if self._earlier is None else self._earlier
        flags = [part_of(grad).any().float() for grad in earlier if grad is not None]
        return self._micro_batches.any_of(flags, device)


_SPARSE = (
    "The gradient of {name} is sparse, and an AccumulationWindow cannot take sparse gradients out of a sum. "
    "Build the embedding with sparse=False, or accumulate this optimizer's gradients without a window."
)


def _own_memory(gradient: Tensor | None) -> Tensor | None:
    """Return `gradient`, or a copy if its memory is part of someone else's, who may overwrite it.

    ``DistributedDataParallel(gradient_as_bucket_view=True)`` reduces the next micro-batch in that memory.
    """
    if gradient is None or gradient.layout is not torch.strided:
        return gradient
    if is_dtensor(gradient):
        return summed(gradient)
    whole = gradient.untyped_storage().nbytes() <= gradient.numel() * gradient.element_size()
    return gradient if whole and not is_tensor_view(gradient) else gradient.detach().clone()
