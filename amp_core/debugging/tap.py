"""Observe the ops in a block both above autocast, where rules apply, and below, where kernels run."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from typing_extensions import Self

from amp_core._torch.autocast import autocast_devices_enabled
from amp_core._torch.autograd import current_autograd_node, in_backward
from amp_core._torch.dispatcher import Overload, is_mutable, written
from amp_core._torch.tracing import without_torch_functions
from amp_core.common.call_site import callers
from amp_core.common.containers import tensors_in
from amp_core.common.locks import new_lock
from amp_core.debugging.collectives import Collectives, given, kind_of
from amp_core.debugging.op_kinds import copied, dtypes_of, floats_in, only_moves
from amp_core.debugging.op_modes import calling, observe_ops, outside_program_modes, runs_kernel_of
from amp_core.debugging.places import NOWHERE, Places
from amp_core.debugging.sink import BACKWARD, FORWARD, Frame, Sink, Where
from amp_core.dispatch.activate import default_policy
from amp_core.dispatch.engine import Engine, engine
from amp_core.dispatch.quantized_products import ProductObserver, ScaledProduct, observe
from amp_core.dispatch.work import work
from amp_core.errors import AmpError
from amp_core.plugin import get_backend
from amp_core.policy import OpPolicy, names
from amp_core.policy.rules import FP32, UNCHANGED, as_work, threshold

_FORWARD_OP = "the forward op"
_MODULE_RULE = FP32, "module rule 'fp32'"


class _Muted(threading.local):
    on = False


_MUTED = _Muted()


@contextlib.contextmanager
def muted() -> Iterator[None]:
    """Hide what this thread runs in a block from all taps."""
    earlier = _MUTED.on
    try:
        _MUTED.on = True
        yield
    finally:
        _MUTED.on = earlier


@contextlib.contextmanager
def measuring() -> Iterator[None]:
    """Hide a tool's measurements in a block from all taps, and from the program's modes and subclasses."""
    with muted(), outside_program_modes(), without_torch_functions():
        yield


class _Eager:
    lock, blocks = new_lock(), 0
    stance: Any = None


@contextlib.contextmanager
def eager() -> Iterator[None]:
    """Run compiled functions eagerly in a block, in all threads. Blocks may end in any order."""
    with _Eager.lock:
        if not _Eager.blocks:
            try:
                _Eager.stance = torch.compiler.set_stance("force_eager")
            except RuntimeError as error:
                raise AmpError(
                    "Ops cannot be recorded or compared from within a function that torch.compile compiles: "
                    "the rest of it would run compiled. Enter record(), or call compare() or advise(), "
                    "outside of that function."
                ) from error
        _Eager.blocks += 1
    try:
        yield
    finally:
        with _Eager.lock:
            _Eager.blocks -= 1
            if not _Eager.blocks:
                _Eager.stance.__exit__(None, None, None)


class Tap:
    """Reports to a sink each op that a thread runs in a block, including backward passes it starts.

    Args:
        sink: receives the ops; its exceptions propagate to the program.
        model: see `Places`.
        ops: additional ops to give a frame, besides those with a built-in rule in torch.

    Attributes:
        met_compiled: whether a backward pass compiled by torch.compile ran; it is observed only in part.
    """

    def __init__(self, sink: Sink, model: nn.Module | None = None, ops: Iterable[str] = ()) -> None:
        self.places = Places(model)
        self._sink = sink
        self._more_ops = frozenset(ops)
        self._frames: list[Frame] = []
        self._reasons: dict[tuple[int, str], tuple[OpPolicy, str, str]] = {}
        self._shared, self._of_thread = ExitStack(), ExitStack()
        self._ended = self._began_in_backward = False
        self._collectives = Collectives()
        self.met_compiled = False

    def __enter__(self) -> Self:
        for tap in [*_ENTERED.taps]:
            if tap._ended:
                tap._leave_thread()
        self._began_in_backward = in_backward()
        with ExitStack() as shared, ExitStack() as of_thread:
            # Dynamo permanently skips every frame that it encounters under one of our modes.
            shared.enter_context(eager())
            shared.callback(self.places.detach)
            self.places.attach()
            for device_type in _device_types():
                end = self._watch(engine(device_type))
                of_thread.callback(end)
                shared.callback(end)
            of_thread.callback(observe(ProductObserver(muted, self._multiplied)))
            of_thread.callback(observe_ops(self._observe))
            self._shared, self._of_thread = shared.pop_all(), of_thread.pop_all()
        _ENTERED.taps.append(self)
        return self

    def __exit__(self, *exc: Any) -> None:
        """End the reports.

        If another thread does, or a hook in a backward pass, after which autograd sets back which modes are
        on, the next tap of the thread that entered ends the modes.
        """
        self._ended = True
        try:
            if self in _ENTERED.taps and (self._began_in_backward or not in_backward()):
                self._leave_thread()
        finally:  # an interrupt must not leave the whole process observed
            self._shared.close()

    def _leave_thread(self) -> None:
        _ENTERED.taps.remove(self)
        self._of_thread.close()

    def _watch(self, here: Engine) -> Callable[[], None]:
        native = OpPolicy.default(here.device_type).rules
        return here.watch(
            {*native, *self._more_ops},
            lambda op, call, args, kwargs: self._frame(here, op, call, args, kwargs),
        )

    def _frame(self, here: Engine, op: str, call: Callable[[], Any], args: Any, kwargs: Any) -> Any:
        if _MUTED.on or self._ended or runs_kernel_of(op):
            return call()
        inputs = floats_in((args, kwargs))
        rule, origin = self._reason(here, op)
        overload = names.find(op)
        if overload is not None and threshold(rule) is not None:
            rule += f": {as_work(work(overload, args, kwargs))}"
        frame = Frame(op, dtypes_of(inputs), rule, origin)
        self._frames.append(frame)
        try:
            with calling(casts=rule != UNCHANGED):
                result = call()
        finally:
            self._frames.pop()
        with measuring():
            self._sink.framed(frame, inputs, floats_in(result), self._where())
        return result

    def _multiplied(self, product: ScaledProduct) -> None:
        """Report a product of quantised operands as one op: its parts are not ops of the program."""
        if _MUTED.on or self._ended:
            return
        with measuring():
            where = self._where()
            formats = "+".join(sorted({each.quantization.element.name for each in product.operands}))
            where = replace(where, formats=formats, module_rule=(str(product.rule), _FORWARD_OP))
            self._sink.multiplied(product, where)
            op = torch.ops.aten.mm.default if product.result.dim() == 2 else torch.ops.aten.bmm.default
            self._sink.ran(op, list(product.factors), [product.result], where)

    def _reason(self, here: Engine, op: str) -> tuple[str, str]:
        policy = default_policy(get_backend(here.device_type)) if here.policy is None else here.policy
        key = id(policy), op
        if key not in self._reasons:
            explanation = policy.explain(names.find(op))[0]
            # Keep the policy alive so that its id is not reused.
            self._reasons[key] = policy, explanation.rule, explanation.origin
        return self._reasons[key][1:]

    def _where(self) -> Where:
        node = current_autograd_node()
        if node is None and in_backward() and not self.places.in_module:
            return Where(BACKWARD, NOWHERE, tuple(self._frames))
        if node is None or self.places.in_module:  # called in a node: a checkpoint repeats it
            rule = _MODULE_RULE if self.places.in_float32 else None
            return Where(FORWARD, self.places.here, tuple(self._frames), rule)
        self.met_compiled |= node.name().startswith("CompiledFunction")
        phase = FORWARD if torch.is_grad_enabled() and _in_checkpoint() else BACKWARD
        return Where(phase, self.places.of_node(node), tuple(self._frames))

    def _observe(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if _MUTED.on or self._ended or not isinstance(func, Overload):
            return
        kind = kind_of(func)
        if kind is not None:
            self._communicated(func, kind, args, result)
            return
        self._collectives.note(func, result)
        copies = [*copied(func, args, result)]
        for source, copy in copies:
            if source.dtype is not copy.dtype and source.is_floating_point() and copy.is_floating_point():
                self._sink.cast(source, copy, self._where())
            else:
                self._sink.moved(self._sink.seen_in(source), self._sink.seen_in(copy))
        if copies:
            return
        inputs, outputs = self._sink.seen_in((args, kwargs)), self._sink.seen_in(result)
        if not outputs and is_mutable(func):
            outputs = self._sink.seen_in(written(func, args, kwargs))
        if only_moves(func) or not inputs:
            self._sink.moved(inputs, outputs)
        elif outputs:
            self._sink.ran(func, inputs, outputs, self._where())

    def _communicated(self, op: Overload, kind: str, args: tuple[Any, ...], result: Any) -> None:
        where, inputs = self._where(), given(op, args)
        of = self._collectives.purpose(inputs, where.phase == BACKWARD, self.places.in_module)
        outputs = [*tensors_in(result)] or [*tensors_in(args)]
        self._sink.communicated(kind, of, inputs, outputs, where)


def _in_checkpoint() -> bool:
    """Whether the innermost backward pass repeats a function that a checkpoint has called."""
    modules = (frame.f_globals.get("__name__") for frame in callers())
    found = next((name for name in modules if name in (_CHECKPOINT, _BACKWARD_PASS)), None)
    return found == _CHECKPOINT


_CHECKPOINT, _BACKWARD_PASS = "torch.utils.checkpoint", "torch.autograd.graph"


class _Entered(threading.local):
    def __init__(self) -> None:
        self.taps: list[Tap] = []


_ENTERED = _Entered()
"""The taps whose modes are on in this thread."""


def _device_types() -> list[str]:
    """Return the CPU, the accelerator and each device with autocast enabled, if they have backends."""
    accelerator = torch.accelerator.current_accelerator()
    device_types = {"cpu", *autocast_devices_enabled()}
    if accelerator is not None:
        device_types.add(accelerator.type)
    return sorted(d for d in device_types if _has_backend(d))


def _has_backend(device_type: str) -> bool:
    try:
        get_backend(device_type)
    except AmpError:
        return False
    return True
