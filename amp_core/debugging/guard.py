"""`guard`: stop training at the first op that makes inf or NaN."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, MutableMapping
from contextlib import ExitStack
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer

from amp_core._torch.autograd import current_autograd_node, in_backward
from amp_core._torch.modules import CompiledCall, is_compiled_in_place
from amp_core._torch.tracing import is_in_compiled_call, outside_graphs, untraced
from amp_core.common.arguments import as_whole, check_module
from amp_core.common.fsdp import is_sharded
from amp_core.common.generators import generator_states, with_generators
from amp_core.common.identity import WeakIdentityMapping
from amp_core.common.optimizers import parameters_of, watch_steps
from amp_core.debugging.attached import Attached, Hook
from amp_core.debugging.op_faults import FaultFinder, OpFault, have_nan, in_reals, readable
from amp_core.debugging.op_kinds import numbers_in
from amp_core.debugging.state_keeper import with_own_buffers
from amp_core.debugging.tap import Tap, measuring
from amp_core.errors import AmpError, NonFiniteError
from amp_core.plugin import hookimpl, register, unregister
from amp_core.scaling.gradients import kernels_of, read_once


class Guard(Attached):
    """Watches a model until `remove`; see `guard`.

    Attributes:
        model: the model.
        step: the number of the model's current training step, from 0.
        fault: the op at which it stopped.
    """

    def __init__(
        self, model: nn.Module, steps: Container[int] | Callable[[int], bool] | None, patience: int
    ) -> None:
        check_module(model, "guard")
        if isinstance(model, torch.jit.ScriptModule):  # which takes no hooks
            raise TypeError(
                "guard() cannot see into the model, which TorchScript has compiled. Guard the model before "
                "torch.jit.script or torch.jit.trace, or a module that contains it."
            )
        if steps is not None and not callable(steps) and not _are_numbers(steps):
            raise TypeError(f"steps= must be a collection of numbers, or a function of one, not {steps!r}.")
        self._chosen = steps if callable(steps) else (() if steps is None else steps).__contains__
        self.fault: OpFault | None = None
        self._patience = as_whole(patience, "patience", 1)
        self._skips: MutableMapping[Optimizer, int] = WeakIdentityMapping()
        self._scaled: MutableMapping[Optimizer, object] = WeakIdentityMapping()
        self._used: MutableMapping[Optimizer, int] = WeakIdentityMapping()  # the step of its last gradients
        self._finder: FaultFinder | None = None  # while every op is checked
        self._search = ExitStack()
        self._masks_result = False
        self._generators = generator_states()  # of the start of a step
        self._call: CompiledCall | None = None
        super().__init__(model)  # last: an interrupt must leave no hook that lacks one of these
        listener = _Listener(self)
        try:
            register(listener)
        except BaseException:
            self.remove()
            raise
        self._until_gone(unregister, listener)
        self._removers.append(self._stop)

    def _watch_calls(self, before: Hook, after: Hook) -> list[Callable[[], None]]:
        if not is_compiled_in_place(self.model):
            return super()._watch_calls(before, after)
        self._call = CompiledCall(self.model, before, after)  # outside of the compiled function, not within
        return [self._call.remove]

    @untraced
    def remove(self) -> None:
        """Detach from the model. Calling it again has no effect.

        Raises:
            AmpError: a compiled function calls it while every op of a step is checked.
        """
        if self._finder is not None and is_in_compiled_call():
            raise AmpError(
                f"A compiled function cannot remove a guard while it checks every op of step {self.step}: "
                f"the checks began outside of the function. Call remove() there."
            )
        super().remove()

    def __getstate__(self) -> dict[str, Any]:
        left = ["_scaled", "_skips", "_used", "_finder", "_search", "_call"]
        return {**super().__getstate__(), **dict.fromkeys(left)}

    def _before(self) -> None:
        in_node = current_autograd_node() is not None  # a tap that starts there would end with it
        looks = not in_node and (self._chosen(self.step) or self._has_no_patience())
        if (looks or self._finder is not None) and is_in_compiled_call():
            error = NonFiniteError if self._has_no_patience() else AmpError
            raise error(_COMPILED.format(step=self.step if looks else self.step - 1))
        self._stop()
        if looks:
            finder, self._stepped = FaultFinder(self.step, self._found), set[int]()
            with ExitStack() as search:  # what begins must end, also if the next one cannot begin
                tap = search.enter_context(Tap(finder, self.model))
                if self._call is None:  # else the call of the model has yet to begin
                    tap.places.enter(self.model)
                search.callback(watch_steps(self._after_step, after=True))
                self._finder, self._search = finder, search.pop_all()
        else:
            self._generators = generator_states()

    def _has_no_patience(self) -> bool:
        return any(skips >= self._patience for skips in self._skips.values())

    def _after(self, args: Any, kwargs: Any, result: Any) -> None:
        with measuring():
            results = numbers_in(result)
        if self._all_finite(results) or (self._masks_result and not have_nan(results)):
            return
        finder = self._finder or self._replay(args, kwargs)
        names = [n for n, p in self.model.named_parameters() if not self._all_finite([p])]
        reason = "perhaps another tensor that it reads has"
        if names:
            reason = f"these parameters have them: {', '.join(names)}"
        elif not self._all_finite(numbers_in((args, kwargs))):
            reason = "its arguments have them"
        elif finder.masked and not have_nan(results):
            self._masks_result = True
            return
        raise NonFiniteError(f"The result of step {self.step} has inf or NaN, but no op made them: {reason}.")

    def _replay(self, args: Any, kwargs: Any) -> FaultFinder:
        """Run the forward pass again and look at each op."""
        model = self.model
        if isinstance(model, DistributedDataParallel):  # it would wait for ranks whose results are finite
            model = model.module
        if any(map(is_sharded, model.modules())):
            raise NonFiniteError(
                f"The result of step {self.step} has inf or NaN. Modules are sharded, so ranks must look for "
                f"the op together: run the program again with amp_core.guard(model, steps=[{self.step}])."
            )
        finder = FaultFinder(self.step, self._found)
        with (
            Tap(finder, self.model),
            torch.no_grad(),
            with_generators(self._generators),
            with_own_buffers(model),
        ):
            result = model(*args, **kwargs)
        if self._all_finite(numbers_in(result)):
            raise NonFiniteError(
                f"The result of step {self.step} has inf or NaN, but not when the forward pass runs again: "
                f"it depends on what the first one has changed. To find the op, run the program again with "
                f"amp_core.guard(model, steps=[{self.step}])."
            )
        return finder

    def _optimize(self, optimizer: Optimizer, parameters: list[Tensor]) -> None:
        if self._call is not None and not self._call.is_called():
            raise AmpError(
                "model.compile() was called after amp_core.guard(model), which has seen no call since. "
                "Remove the guard, and guard the model again."
            )
        if optimizer in self._scaled or getattr(optimizer, "found_inf", None) is not None:
            return  # the scaler checks the gradients and skips the step
        last = self._used.get(optimizer, max(self._used.values(), default=-1))
        first, self._used[optimizer] = min(last + 1, self.step), self.step
        if self._all_finite([p.grad for p in parameters if p.grad is not None]):
            return
        mine = [(n, p.grad) for n, p in self.model.named_parameters() if p.grad is not None]
        names = [name for name, grad in mine if not self._all_finite([grad])]
        which, steps = f"step {self.step}", f"[{self.step}]"
        if first != self.step:  # they were accumulated
            which, steps = f"steps {first} to {self.step}", f"range({first}, {self.step + 1})"
        raise NonFiniteError(
            f"These gradients of {which} have inf or NaN: {', '.join(names)}. To find the op, run the "
            f"program again with amp_core.guard(model, steps={steps})."
        )

    @outside_graphs
    def _after_step(self, optimizer: Optimizer) -> None:
        """End the search with the last use of the gradients: a compiled function may make the next call."""
        self._stepped |= set(map(id, parameters_of(optimizer)))
        used = [id(p) in self._stepped for p in self.model.parameters() if p.grad is not None]
        # Autograd sets back after each node which modes are on, so none may end within a backward pass.
        if used and all(used) and not is_in_compiled_call() and not in_backward():
            self._stop()

    def _all_finite(self, tensors: list[Tensor]) -> bool:
        by_device: dict[torch.device, list[Tensor]] = {}
        with measuring():
            for tensor in readable(tensors):
                by_device.setdefault(tensor.device, []).append(in_reals(tensor))
            read = (read_once(kernels_of(device), group, 2.0, device) for device, group in by_device.items())
            return not any(bool(stats.found_inf) for stats in read)

    def _count(self, scaler: Any, record: Any) -> None:
        """Count skipped steps in a row, of each optimizer that has parameters of the model."""
        self._scaled.update(scaler.last_step)
        mine = {id(parameter) for parameter in self.model.parameters()}
        for optimizer, last in scaler.last_step.items():
            if last is record and any(id(p) in mine for p in parameters_of(optimizer)):
                self._skips[optimizer] = self._skips.get(optimizer, 0) + 1 if record.skipped else 0

    def _found(self, fault: OpFault) -> None:
        self.fault = fault

    def _stop(self) -> None:
        self._finder = None
        self._search.close()


class _Listener:
    """Tells a guard of the steps of all scalers, without keeping it alive."""

    def __init__(self, guard: Guard) -> None:
        self._guard = weakref.ref(guard)

    @hookimpl
    def amp_step(self, scaler: Any, record: Any) -> None:
        """Let the guard count the step."""
        guard = self._guard()
        if guard is not None:
            guard._count(scaler, record)


_COMPILED = (
    "Every op of step {step} is to be checked, and a compiled function calls the model, so that the backward "
    "pass would go unchecked. If the model itself is compiled, guard it after model.compile(), or guard and "
    "call what torch.compile(model) returns. If the function does more than call the model, call it "
    "uncompiled in this step, up to the step of the optimizer."
)


def _are_numbers(steps: object) -> bool:
    if not hasattr(steps, "__contains__") or isinstance(steps, (str, bytes)):
        return False
    listed = steps if isinstance(steps, (list, tuple, set, frozenset, dict)) else ()
    return all(isinstance(step, Integral) for step in listed)


@untraced
def guard(
    model: nn.Module, *, steps: Container[int] | Callable[[int], bool] | None = None, patience: int = 10
) -> Guard:
    """Stop training at the first op that makes inf or NaN, and name its module, line, ranges and rule.

    The guard stays on the model until ``remove()``, or to the end of a ``with`` block. In most steps it only
    checks the model's result and, before an optimizer without a scaler steps, the gradients: one pass over
    each. If the result is not finite, it runs the forward pass again, with the same random numbers and on
    copies of the buffers, and stops at the op. If FSDP shards the model, or the forward pass has changed what
    the result depends on, it stops, and asks you to run the program again. In the chosen steps it checks
    every op, forward and backward; they take several times as long.

    amp-core's `GradScaler` may skip steps: the guard stops only after `patience` of them in a row, at the op
    of the next backward pass; each ``update`` of the scaler then waits for the device. Values that a mask
    sets to inf are no fault; if a result has such, the guard looks only for NaN in later results. Of a
    DTensor, each rank checks its part. Functions compiled by `torch.compile` run eagerly while every op is
    checked, but none of them may call the model then: guard the model after ``model.compile()``, or the
    result of ``torch.compile(model)``.

    Args:
        model: the model to guard, as it is called in training.
        steps: the steps in which to check every op, such as ``range(100, 110)``, or a function of the
            number. In these steps a loss scale that is too large also counts as a fault.
        patience: the number of steps of one optimizer of the model that a `GradScaler` may skip in a row.

    Returns:
        The guard, which is active already.

    Raises:
        TypeError: `model` is no module or compiled by TorchScript, `steps` no collection, or `patience` no
            integer.
        ValueError: `patience` is below 1.
        AmpError: later, where a compiled function calls the model in a chosen step.
        NonFiniteError: later, at the op; or where the op cannot be looked for.

    Example:
        >>> import torch, amp_core
        >>> model = torch.nn.Linear(2, 2)
        >>> _ = torch.nn.init.constant_(model.weight, 1e38)
        >>> guard = amp_core.guard(model)
        >>> model(torch.full((1, 2), 10.0))
        Traceback (most recent call last):
        amp_core.NonFiniteError: ...
        >>> guard.remove()
    """
    return Guard(model, steps, patience)
