"""The private torch names for what traces, transforms or records ops."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from amp_core._torch.autocast import autocast_devices_enabled, privateuse1_name
from amp_core._torch.dispatcher import Overload, autocast_key, dispatcher_name
from amp_core._torch.dynamo import never_compile
from amp_core._torch.features import Feature, resolve
from amp_core._torch.op_kernels import dispatch_key, has_kernel, set_excluded, without_modes
from amp_core.common.call_site import callers
from amp_core.errors import TorchFeatureError

F = TypeVar("F", bound=Callable[..., Any])

_COMPILE = Feature(
    "compile", "steps inside torch.compile always run outside the graph, and policies need fullgraph=False"
)

# What Dynamo does with the next function that is called; None for nothing.
dynamo_callback: Callable[[], Any] = _COMPILE.function(
    "torch._C._dynamo.eval_frame.get_eval_frame_callback", lambda: "unknown", check=lambda f: f()
)


def _run_outside_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.cache
    def disabled() -> Callable[..., Any]:
        return cast("Callable[..., Any]", torch.compiler.disable(function))  # type: ignore[no-untyped-call]

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return disabled()(*args, **kwargs)

    return run


# For what `torch.compile` cannot trace: a call breaks the graph. Does what ``torch.compiler.disable`` does,
# which would import all of Dynamo (2 s).
_LAZY = Feature("lazy_compile", "the first step of a GradScaler imports torch.compile, which takes seconds")
outside_graphs: Callable[[F], F] = _LAZY.function(
    "torch._compile._disable_dynamo", _run_outside_graphs, check=lambda f: f(privateuse1_name)
)


def untraced(function: F) -> F:
    """Let compiled functions call `function` between graphs.

    Unlike `outside_graphs`, it does not import Dynamo when other programs call the function.
    """
    outside = outside_graphs(function)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return (outside if torch.compiler.is_dynamo_compiling() else function)(*args, **kwargs)

    never_compile(run)  # what runs between graphs calls it, too
    return cast("F", run)


_WRAPPERS = "torch._dynamo.eval_frame"


def is_in_compiled_call() -> bool:
    """Whether a call of a compiled function is running, perhaps between its graphs.

    When it returns, it sets back whether dispatch modes are on, so none may begin or end within it alone.
    """
    return any(
        frame.f_code.co_name == "compile_wrapper" and frame.f_globals["__name__"] == _WRAPPERS
        for frame in callers()
    )


# Whether ``torch.func`` is transforming what runs now: its tensors are plain by type but have no memory.
_FUNCTORCH = Feature("functorch", "portable kernels take the place of compiled ones, which is slower")
functorch_is_at_work: Callable[[], bool] = _FUNCTORCH.function(
    "torch._C._are_functorch_transforms_active", lambda: True, check=lambda f: f()
)
_is_batched = _FUNCTORCH.function("torch._C._functorch.is_legacy_batchedtensor", lambda _tensor: False)


def are_batches(grads: Iterable[torch.Tensor]) -> bool:
    """Whether gradients are batches: of ``autograd.grad(is_grads_batched=True)``, or of ``torch.func``."""
    return functorch_is_at_work() or any(map(_is_batched, grads))


_CAPTURE = Feature(
    "capture", "cached_casts and master_weights cast every weight at every use, which is slower"
)
_jit_tracing_state = _CAPTURE.function("torch._C._get_tracing_state", lambda: "unknown", check=lambda f: f())
_dispatch_mode = _CAPTURE.function("torch._C._get_dispatch_mode", lambda _key: "unknown")
_PROXY_MODE = _CAPTURE.value("torch._C._TorchDispatchModeKey.PROXY", None)
_FAKE_MODE = _CAPTURE.value("torch._C._TorchDispatchModeKey.FAKE", None)
_CAPTURE.attempt(lambda: (_dispatch_mode(_PROXY_MODE), _dispatch_mode(_FAKE_MODE)))


def _check_mode_at(mode_at: Callable[[int], object]) -> None:
    with suppress(RuntimeError):  # no mode is on
        mode_at(0)


_count_modes = _CAPTURE.function("torch._C._len_torch_dispatch_stack", lambda: 0, check=lambda f: f() + 0)
_mode_at = _CAPTURE.function("torch._C._get_dispatch_stack_at", check=_check_mode_at)
_COMPARING = tuple(
    _CAPTURE.value(f"torch.utils.checkpoint.{name}", object)
    for name in ("_CachingTorchDispatchMode", "_CachedTorchDispatchMode")
)

_EXPORT = Feature("export_hooks", "torch.export fails on models that guard or watch is attached to")
_EXPORT.value("torch.compiler._is_exporting_flag", False)


def is_exporting() -> bool:
    """Whether ``torch.export`` traces what runs now: its own flag is set for all threads.

    torch 2.11's function says so whenever Dynamo traces.
    """
    if not getattr(torch.compiler, "_is_exporting_flag", False):
        return False
    return torch.compiler.is_dynamo_compiling() or any(map(_is_of_export, callers()))


def _is_of_export(frame: FrameType) -> bool:
    module = frame.f_globals.get("__name__")
    return module in _EXPORTERS or (module == _WRAPPERS and frame.f_code.co_name == "inner")


_EXPORTERS = ("torch.export._trace", "torch._dynamo.functional_export")


_FAKES = Feature(
    "fake_weights",
    "torch.compile refuses recipes with delayed scales",
    "torch._subclasses.fake_tensor.is_fake",
)


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether `tensor` stands for another one while a graph is traced, and has no values."""
    return _FAKES.works_or_warn() and bool(resolve("torch._subclasses.fake_tensor.is_fake")(tensor))


def calls_are_captured() -> bool:
    """Whether ops that run now are transformed by ``torch.func``, traced into a graph of any kind, or faked.

    A cached cast would be a constant of such a graph, a tensor of another level of ``torch.func``, or fake.
    """
    if not _CAPTURE.complete:
        _CAPTURE.warn()
        return True
    return (
        functorch_is_at_work()
        or _jit_tracing_state() is not None
        or _dispatch_mode(_PROXY_MODE) is not None
        or _dispatch_mode(_FAKE_MODE) is not None
    )


def has_proxies() -> bool:
    """Whether ops that run now are traced into an FX graph, as ``torch.utils.checkpoint`` asks."""
    return _CAPTURE.complete and _dispatch_mode(_PROXY_MODE) is not None


def is_compiling() -> bool:
    """Whether ``torch.compile`` or ``torch.export`` traces what runs now: the flag is set for all threads."""
    return torch.compiler.is_compiling() and (torch.compiler.is_dynamo_compiling() or calls_are_captured())


def may_hold(condition: bool) -> bool:
    """Whether a condition on sizes holds, or a graph is traced for sizes that only its calls know."""
    if not (torch.compiler.is_dynamo_compiling() or isinstance(condition, torch.SymBool)):
        return condition
    from torch.fx.experimental.symbolic_shapes import guard_or_true  # imports SymPy

    return guard_or_true(condition)


def calls_are_compared() -> bool:
    """Whether selective checkpointing numbers the ops that run now, to find them again when it recomputes."""
    count = _count_modes()
    return bool(count) and any(isinstance(_mode_at(index), _COMPARING) for index in range(count))


def uncompared() -> AbstractContextManager[None]:
    """Keep ops that are not the program's, and that write or run once, from selective checkpointing."""
    return without_modes() if calls_are_compared() else nullcontext()


def dispatch_modes() -> list[Any]:
    """Return the dispatch modes that are on, the innermost last."""
    return [_mode_at(index) for index in range(_count_modes())] if _CAPTURE.complete else []


def outside_modes(but: object) -> AbstractContextManager[None]:
    """Keep ops that are not the program's from its dispatch modes but `but`, unless a graph is traced."""
    others = any(mode is not but for mode in dispatch_modes())
    return without_modes() if others and not calls_are_captured() else nullcontext()


_FUNCTIONS = Feature(
    "torch_functions",
    "guard, watch, compare and advise fail on subclasses of tensors whose __torch_function__ refuses a call",
)
# A context in which no ``__torch_function__`` is called, of a subclass or of a mode.
without_torch_functions: Callable[[], AbstractContextManager[Any]] = _FUNCTIONS.function(
    "torch._C.DisableTorchFunction", nullcontext
)


@contextmanager
def modes_above(mode: object) -> Iterator[None]:
    """Leave the dispatch modes that are above `mode`, or all if it is not on, for a block."""
    with ExitStack() as stack:
        for each in itertools.takewhile(lambda other: other is not mode, reversed(dispatch_modes())):
            # By the methods of the base class: a mode's own may print, or end more.
            TorchDispatchMode.__exit__(each, None, None, None)  # type: ignore[no-untyped-call]
            stack.callback(TorchDispatchMode.__enter__, each)
        yield


_FAKE = Feature(
    "fake_tensors",
    "the conformance kit does not check kernels under FakeTensorMode",
    "torch._subclasses.fake_tensor.FakeTensorMode",
)


def fake_tensor_mode() -> Any:
    """Return a FakeTensorMode, in which tensors have a shape and a dtype but no values.

    Raises:
        TorchFeatureError: torch has no such mode.
    """
    _FAKE.require()
    return resolve("torch._subclasses.fake_tensor.FakeTensorMode")()


_RECORD = Feature(
    "record", "amp_core.record, amp_core.compare, amp_core.advise and `amp demo` cannot see ops"
)

# The op that casts, and the one that copies lists of tensors.
to_copy: Any = _RECORD.value("torch.ops.aten._to_copy.default", None)
copy_lists: Any = _RECORD.value("torch.ops.aten._foreach_copy_.default", None)

_CHECKS = Feature("dtype_checks", "amp_core.materialize leaves the checks of dtypes that tracing adds")
_dtype_check: Any = _CHECKS.value("torch.ops.aten._assert_tensor_metadata.default", None)


def checks_dtype(op: object) -> bool:
    """Whether `op` is the one by which a traced graph checks a dtype."""
    return _CHECKS.works_or_warn() and op is _dtype_check


class _NoDispatchMode:
    def __init__(self) -> None:
        raise TorchFeatureError(_RECORD.reason)


if TYPE_CHECKING:
    TorchDispatchMode = torch.utils._python_dispatch.TorchDispatchMode
else:
    _mode = _RECORD.value("torch.utils._python_dispatch.TorchDispatchMode", None)
    TorchDispatchMode = _mode if _RECORD.complete else _NoDispatchMode


_PARTS = Feature(
    "record_parts",
    "amp_core.record runs the ops that kernels of other ops call without autocast",
    "torch.ops.aten.mm.default._op_dk",
)
_COMPOSITE, _VIEWS = "CompositeImplicitAutograd", "ADInplaceOrView"
_COMPOSITE_KEY = _PARTS.value(f"torch._C.DispatchKey.{_COMPOSITE}", None)
_as_called = _PARTS.value("torch._C._RestorePythonTLSSnapshot", None)
_any_is_on = _PARTS.function("torch._C._is_any_autocast_enabled", lambda: True, check=lambda f: f())


def regions_as_called() -> list[str]:
    """Return the device types in whose regions a dispatch mode was called; torch runs it outside of them."""
    if not _PARTS.works_or_warn():
        return []
    with _as_called():
        return autocast_devices_enabled() if _any_is_on() else []


@contextmanager
def back_in_regions(device_types: Iterable[str]) -> Iterator[None]:
    """Run a block in the regions that a dispatch mode was called in."""
    keys = [*map(_autocast_key, device_types)]
    try:
        for key in keys:
            set_excluded(key, False)
        yield
    finally:
        for key in keys:
            set_excluded(key, True)


@functools.cache
def _autocast_key(device_type: str) -> Any:
    return dispatch_key(autocast_key(device_type))


def consists_of_others(op: object) -> bool:
    """Whether `op` consists of others; a dispatch mode receives it whole in inference mode and in kernels."""
    if not (isinstance(op, Overload) and _PARTS.works_or_warn()):
        return False
    name = dispatcher_name(op)  # ops with a kernel for views, such as chunk, expect results that are none yet
    return has_kernel(name, _COMPOSITE) and not has_kernel(name, _VIEWS)


def run_in_parts(mode: Any, op: Any, args: Any, kwargs: Any, *, in_regions: bool) -> Any:
    """Run the ops of which `op` consists under `mode`, perhaps in the regions that the mode was called in."""
    with _as_called() if in_regions else nullcontext(), mode:
        return op._op_dk(_COMPOSITE_KEY, *args, **kwargs)
