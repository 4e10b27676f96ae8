"""Observe the ops in a block both above autocast, where rules apply, and below, where kernels run."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Self

from amp_core._torch import internals as _torch
from amp_core._torch.dispatcher import Overload, dispatcher_name, is_view
from amp_core.common.containers import tensors_in
from amp_core.debugging.collectives import Collectives, given, kind_of
from amp_core.debugging.places import NOWHERE, Place, Places
from amp_core.dispatch.activate import default_policy
from amp_core.dispatch.engine import Engine, engine
from amp_core.dispatch.scaled_products import Observer, ScaledProduct, observe
from amp_core.dispatch.work import work
from amp_core.errors import AmpError
from amp_core.plugin import get_backend
from amp_core.policy import OpPolicy, names
from amp_core.policy.rules import as_work, threshold

FORWARD, BACKWARD = "forward", "backward"
_FORWARD_OP = "the forward op"
_MODULE_RULE = "fp32", "module rule 'fp32'"
_aten = torch.ops.aten
_CASTS = (_torch.to_copy, torch.ops.prims.convert_element_type.default)


@dataclass(frozen=True)
class Frame:
    """A call of an op that may have an autocast rule on some device.

    Attributes:
        op: its full name.
        given: the floating-point dtypes of its inputs, before any cast.
        rule: the rule of the active policy; with a threshold, followed by the work of this call.
        origin: the origin of that rule.
    """

    op: str
    given: tuple[torch.dtype, ...]
    rule: str
    origin: str


@dataclass(frozen=True)
class Where:
    """The context of a call.

    Attributes:
        phase: `FORWARD` or `BACKWARD`.
        place: the module.
        frames: the enclosing autocast frames, outermost first.
        module_rule: rule and origin of the whole module's rule, if any, or of the forward op.
        formats: the element formats of the operands, if a recipe quantised them.
    """

    phase: str
    place: Place
    frames: tuple[Frame, ...]
    module_rule: tuple[str, str] | None = None
    formats: str = ""

    @property
    def cause(self) -> tuple[str, str] | None:
        """Rule and origin of the innermost frame with an effective rule, or else of the module."""
        ruled = (f for f in reversed(self.frames) if f.rule != "unchanged")
        return next(((f.rule, f.origin) for f in ruled), self.module_rule)


class Sink:
    """Receives the observed ops; by default it ignores them."""

    def cast(self, source: Tensor, result: Tensor, where: Where, /) -> None:
        """Receive a conversion from one floating-point dtype to another."""

    def moved(self, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        """Receive an op that only copies or creates floating-point tensors."""

    def ran(self, op: Overload, inputs: list[Tensor], outputs: list[Tensor], where: Where) -> None:
        """Receive an op that computes floating-point results from floating-point inputs, except casts."""

    def framed(self, frame: Frame, inputs: list[Tensor], outputs: list[Tensor], where: Where) -> None:
        """Receive an op with a frame after it returns; `where` is its context."""

    def multiplied(self, product: ScaledProduct, where: Where, /) -> None:
        """Receive a product of quantised operands, before `ran` receives it as an op."""

    def communicated(
        self, kind: str, of: str, inputs: list[Tensor], outputs: list[Tensor], where: Where
    ) -> None:
        """Receive a collective: `kind` and `of` as in `CollectiveKey`. The outputs may not be there yet."""


class _Muted(threading.local):
    on = False


_MUTED = _Muted()


@contextlib.contextmanager
def muted() -> Iterator[None]:
    """Report nothing that this thread runs in a block, to any tap: what one tool measures is no work."""
    earlier, _MUTED.on = _MUTED.on, True
    try:
        yield
    finally:
        _MUTED.on = earlier


class _Eager:
    """Compiled functions run eagerly, in all threads, while any tap is on: taps may end in any order."""

    def __init__(self) -> None:
        self._lock, self._taps = threading.Lock(), 0
        self._stance: Any = None

    def enter(self) -> None:
        with self._lock:
            if not self._taps:
                self._stance = torch.compiler.set_stance("force_eager")
            self._taps += 1

    def leave(self) -> None:
        with self._lock:
            self._taps -= 1
            if not self._taps:
                self._stance.__exit__(None, None, None)


_EAGER = _Eager()


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
        self._ops = frozenset(ops)
        self._frames: list[Frame] = []
        self._reasons: dict[tuple[int, str], tuple[OpPolicy, str, str]] = {}
        self._stack = ExitStack()
        self._collectives = Collectives()
        self.met_compiled = False

    muted = staticmethod(muted)

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            # Dynamo permanently skips every frame that it encounters under one of our modes.
            _EAGER.enter()
            stack.callback(_EAGER.leave)
            self.places.attach()
            stack.callback(self.places.detach)
            for device_type in _device_types():
                stack.callback(self._watch(engine(device_type)))
            stack.callback(observe(Observer(muted, self._multiplied)))
            stack.callback(_observe_ops(self._observe))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._stack.__exit__(*exc)

    def _watch(self, here: Engine) -> Callable[[], None]:
        native = OpPolicy.default(here.device_type).rules
        return here.watch(
            {*native, *self._ops}, lambda op, call, args, kwargs: self._frame(here, op, call, args, kwargs)
        )

    def _frame(self, here: Engine, op: str, call: Callable[[], Any], args: Any, kwargs: Any) -> Any:
        if _MUTED.on:
            return call()
        inputs = floats_in((args, kwargs))
        rule, origin = self._reason(here, op)
        overload = names.find(op)
        if overload is not None and threshold(rule) is not None:
            rule += f": {as_work(work(overload, args, kwargs))}"
        frame = Frame(op, dtypes_of(inputs), rule, origin)
        self._frames.append(frame)
        try:
            result = call()
        finally:
            self._frames.pop()
        with self.muted():
            self._sink.framed(frame, inputs, floats_in(result), self._where())
        return result

    def _multiplied(self, product: ScaledProduct) -> None:
        """Report a product of quantised operands as one op: its parts are no ops of the program."""
        if _MUTED.on:
            return
        with muted():
            where = self._where()
            formats = "+".join(sorted({each.quantization.element.name for each in product.operands}))
            where = replace(where, formats=formats, module_rule=(str(product.rule), _FORWARD_OP))
            self._sink.multiplied(product, where)
            op = _aten.mm.default if product.result.dim() == 2 else _aten.bmm.default
            self._sink.ran(op, list(product.factors), [product.result], where)

    def _reason(self, here: Engine, op: str) -> tuple[str, str]:
        policy = here.policy or default_policy(get_backend(here.device_type))
        key = id(policy), op
        if key not in self._reasons:
            explanation = policy.explain(names.find(op))[0]
            # Keep the policy alive so that its id is not reused.
            self._reasons[key] = policy, explanation.rule, explanation.origin
        return self._reasons[key][1:]

    def _where(self) -> Where:
        node = _torch.current_autograd_node()
        if node is None and _torch.in_backward() and not self.places.in_module:
            return Where(BACKWARD, NOWHERE, tuple(self._frames))
        if node is None or self.places.in_module:  # a module call in a node: a checkpoint being recomputed
            rule = _MODULE_RULE if self.places.in_float32 else None
            return Where(FORWARD, self.places.here, tuple(self._frames), rule)
        self.met_compiled |= node.name().startswith("CompiledFunction")
        return Where(BACKWARD, self.places.of_node(node), tuple(self._frames))

    def _observe(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if _MUTED.on or not isinstance(func, Overload):
            return
        kind = kind_of(func)
        if kind is not None:
            self._communicated(func, kind, args, result)
            return
        self._collectives.note(func, result)
        for source, copy in _copied(func, args, result):
            if source.dtype is not copy.dtype and source.is_floating_point() and copy.is_floating_point():
                self._sink.cast(source, copy, self._where())
        inputs, outputs = floats_in((args, kwargs)), floats_in(result)
        if _only_moves(func) or not inputs:
            self._sink.moved(inputs, outputs)
        elif outputs:
            self._sink.ran(func, inputs, outputs, self._where())

    def _communicated(self, op: Overload, kind: str, args: tuple[Any, ...], result: Any) -> None:
        where, inputs = self._where(), given(op, args)
        of = self._collectives.purpose(inputs, where.phase == BACKWARD, self.places.in_module)
        outputs = [*tensors_in(result)] or [*tensors_in(args)]
        self._sink.communicated(kind, of, inputs, outputs, where)


class _Mode(_torch.TorchDispatchMode):  # type: ignore[no-untyped-call]
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.observers: tuple[Callable[..., None], ...] = ()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(_torch.is_dtensor_type(kind) for kind in types):
            with _InsideDTensors(self):
                result = func(*args, **(kwargs or {}))
        else:
            result = func(*args, **(kwargs or {}))
        self.tell(func, args, kwargs or {}, result)
        return result

    def tell(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Report an op to all observers."""
        for each in self.observers:
            each(func, args, kwargs, result)


class _InsideDTensors(_torch.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Reports the collectives of which an op on DTensors consists; the op itself is reported as one."""

    def __init__(self, mode: _Mode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._mode = mode

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(_torch.is_dtensor_type(kind) for kind in types):
            return NotImplemented  # DTensor's own comes next, with this mode on
        result = func(*args, **(kwargs or {}))
        if isinstance(func, Overload) and kind_of(func) is not None:
            self._mode.tell(func, args, kwargs or {}, result)
        return result


class _Thread(threading.local):
    mode: _Mode | None = None


_THREAD = _Thread()


def _observe_ops(observe: Callable[..., None]) -> Callable[[], None]:
    """Call `observe` after each op of this thread; return a function that ends it.

    All taps of a thread share one mode: torch's modes must end in the order of a stack, and taps may not.
    """
    mode = _THREAD.mode
    if mode is None:
        mode = _THREAD.mode = _Mode()
        mode.__enter__()  # type: ignore[no-untyped-call]
    mode.observers = (*mode.observers, observe)

    def end() -> None:
        mode.observers = tuple(other for other in mode.observers if other is not observe)
        if not mode.observers:
            _THREAD.mode = None
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    return end


def _copied(func: Overload, args: tuple[Any, ...], result: Any) -> Iterable[tuple[Tensor, Tensor]]:
    """Return (source, copy) for each tensor that the op copies and possibly casts."""
    if func in _CASTS:
        return [(args[0], result)]
    if func is _aten.copy_.default:
        return [(args[1], args[0])]
    return zip(args[1], args[0], strict=True) if func is _torch.copy_lists else ()


_MOVES = {
    "_foreach_copy_",
    "_to_copy",
    "_unsafe_view",
    "convert_element_type",
    "clone",
    "copy_",
    "detach",
    "empty_like",
    "fill_",
    "full_like",
    "new_empty",
    "new_empty_strided",
    "new_full",
    "new_ones",
    "new_zeros",
    "ones_like",
    "set_",
    "wait_tensor",
    "_wrap_tensor_autograd",
    "zero_",
    "zeros_like",
}


@functools.cache
def _only_moves(op: Overload) -> bool:
    """Return whether the op computes nothing and only creates a view, a copy or a new tensor."""
    return is_view(op) or op.namespace in ("fsdp", "profiler") or short_name(op) in _MOVES


def short_name(op: Overload) -> str:
    """Return the op's name without namespace and overload."""
    return dispatcher_name(op).rpartition("::")[2].partition(".")[0]


def dtypes_of(tensors: Iterable[Tensor]) -> tuple[torch.dtype, ...]:
    """Return the distinct dtypes of the tensors, narrowest first."""
    return tuple(sorted({t.dtype for t in tensors}, key=lambda d: (d.itemsize, str(d))))


def is_low(dtype: torch.dtype) -> bool:
    """Return whether a floating-point dtype has fewer than 32 bits."""
    return dtype.itemsize < 4


def floats_in(value: Any) -> list[Tensor]:
    """Return the floating-point tensors in arguments or results."""
    return [tensor for tensor in tensors_in(value) if tensor.is_floating_point()]


def _device_types() -> list[str]:
    """Return the CPU, the accelerator and each device with autocast enabled, if they have backends."""
    accelerator = torch.accelerator.current_accelerator()
    device_types = {"cpu", *_torch.autocast_devices_enabled()}
    if accelerator is not None:
        device_types.add(accelerator.type)
    return sorted(d for d in device_types if _has_backend(d))


def _has_backend(device_type: str) -> bool:
    try:
        get_backend(device_type)
    except AmpError:
        return False
    return True
