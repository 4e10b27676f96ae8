"""The private torch names that regions, scalers, casts and recordings use.

Only this package touches names that torch does not document. Each use belongs to a `Feature`, which says what
a user loses if a torch release drops the name; everything else then goes on. Admitting a new torch release
means to read this page and run the tests.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from amp_core._torch.features import Feature, resolve
from amp_core.common.containers import map_tensors
from amp_core.errors import TorchFeatureError

F = TypeVar("F", bound=Callable[..., Any])

# torch's own, bound here once: `amp_compat.install` may put ours under these names.
torch_autocast = torch.autocast
autocast_known = torch.amp.is_autocast_available

# ---- device types: documented names only -------------------------------------------------------------


def is_device_type(name: str) -> bool:
    """Whether torch would parse `name` as the type of a ``torch.device``."""
    try:
        return torch.device(name).type == name
    except RuntimeError:
        return False


def privateuse1_name() -> str:
    """Return the present name of the PrivateUse1 device type."""
    return torch.device("privateuseone").type  # torch parses the slot's own name and gives the new one


def autocast_off(device_type: str) -> AbstractContextManager[Any]:
    """Return a context in which autocast is off, as in ``torch.autocast(device_type, enabled=False)``.

    torch's own asks a PrivateUse1 device for the dtypes of regions even here, which not every one can say.
    """
    if not torch.compiler.is_compiling() and device_type == privateuse1_name():
        return _switched_off(device_type)
    return cast("AbstractContextManager[Any]", torch_autocast(device_type, enabled=False))


@contextmanager
def _switched_off(device_type: str) -> Iterator[None]:
    before = torch.is_autocast_enabled(device_type)
    torch.set_autocast_enabled(device_type, False)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device_type, before)


def privateuse1_amp_dtypes(device_type: str) -> list[torch.dtype]:
    """Return the dtypes that a PrivateUse1 device says autocast may use.

    Raises:
        AssertionError: with torch's text, when the device's module is missing or lacks the function.
    """
    text = (
        f"Tried to use AMP with the `{device_type}` backend, but the backend has not registered a "
        "module or  the module miss some necessary funcs. The backend should register a module by "
        "`torch._register_device_module`, and the module must have these funcs: \n"
        "`get_amp_supported_dtype() -> List[torch.dtype]`. \n"
    )
    module = getattr(torch, device_type, None)
    assert module is not None, text
    assert hasattr(module, "get_amp_supported_dtype"), (
        text + "But the func `get_amp_supported_dtype` is missing. \n"
    )
    return cast("list[torch.dtype]", module.get_amp_supported_dtype())


_DEVICES = Feature(
    "all_devices", "amp_core.disable and amp_core.record cover only the device types that amp-core knows"
)
_KNOWN_DEVICES = ("cpu", "cuda", "hpu", "ipu", "maia", "mps", "mtia", "xla", "xpu")
_autocast_devices = _DEVICES.function(
    "torch._C._autocast_supported_devices",
    lambda: [*_KNOWN_DEVICES, privateuse1_name()],
    check=lambda f: [torch.is_autocast_enabled(device) for device in f()],
)


def autocast_devices_enabled() -> list[str]:
    """Return the device types for which autocast is on in this thread."""
    return [d for d in _autocast_devices() if torch.is_autocast_enabled(d)]


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is sharded over processes, without importing ``torch.distributed.tensor``."""
    return is_dtensor_type(type(tensor))


def is_dtensor_type(kind: type) -> bool:
    """Whether `kind` is the class ``DTensor``."""
    return kind.__name__ == "DTensor"  # the import takes a second


def part_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a DTensor, which shares its memory; another tensor as it is."""
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():  # otherwise it is a new view
        part: torch.Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return part


# ---- tensors -----------------------------------------------------------------------------------------

_VERSIONS = Feature(
    "versions",
    "cached_casts and master_weights cast weights at every use, GradScaler(overlap=True) reads gradients "
    "twice, and recordings tell every cast apart, which is slower",
)
_version: Any = _VERSIONS.value("torch.Tensor._version", None)
_unlike_any = itertools.count()

# The number that every write in place moves. Bound to the C getter: a call costs no Python frame.
version_of: Callable[[torch.Tensor], int] = (
    _VERSIONS.fallback(lambda _tensor: next(_unlike_any)) if _version is None else _version.__get__
)
is_tensor_view: Callable[[torch.Tensor], bool] = Feature(
    "tensor_views",
    "cached_casts and master_weights cast weights at every use, and AccumulationWindow copies gradients, "
    "which is slower",
).function("torch.Tensor._is_view", lambda _tensor: True, check=lambda f: f(torch.ones(1)))

_BASES = Feature("view_bases", "delayed scales of a weight that ops get as a view start anew in each call")
_base_of: Any = _BASES.value("torch.Tensor._base", None)


def base_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that `tensor` is a view of; `tensor` itself if it is none."""
    base: torch.Tensor | None = _base_of.__get__(tensor) if _BASES.works_or_warn() else None
    return tensor if base is None else base


# ---- the casts of `cached_casts` ---------------------------------------------------------------------


_SHARDS = Feature(
    "fsdp_shards",
    "gradients of FullyShardedDataParallel are taken for whole ones: pass process_group=model.process_group",
    "torch.distributed.fsdp._common_utils.FSDP_FLATTENED",
    "torch.distributed.fsdp._flat_param.FlatParameter._init_metadata",
    probed=("FlatParameter._fsdp_flattened", "FlatParameter._unpadded_unsharded_size"),
)


@_SHARDS.probe
def _check_shards() -> None:
    from torch.distributed.fsdp._common_utils import FSDP_FLATTENED
    from torch.distributed.fsdp._flat_param import FlatParameter

    attributes = {FSDP_FLATTENED, *FlatParameter._init_metadata.__code__.co_names}
    if not {"_fsdp_flattened", "_unpadded_unsharded_size"} <= attributes:
        raise RuntimeError("FSDP marks its parameters in another way")


def is_fsdp_shard(param: torch.Tensor) -> bool:
    """Whether `param` is a flattened piece of a ``FullyShardedDataParallel`` (FSDP1) model.

    With ``NO_SHARD`` every rank has the whole parameter.
    """
    if "torch.distributed.fsdp" not in sys.modules:
        return False
    # Dynamo cannot trace the probe, which takes a lock.
    if not (torch.compiler.is_dynamo_compiling() or _SHARDS.works_or_warn()):
        return False
    if not getattr(param, "_fsdp_flattened", False):
        return False
    whole = getattr(param, "_unpadded_unsharded_size", None)  # of a FlatParameter
    return param.dim() < 2 if whole is None else param.numel() < whole.numel()


_MEMORY = Feature(
    "reused_memory",
    "cached_casts and master_weights allocate fresh memory for every cast, which is slower",
    "torch.UntypedStorage._cdata",
)
_use_count = _MEMORY.function("torch._C._storage_Use_Count")


@_MEMORY.probe
def _check_use_count() -> None:
    storage = torch.UntypedStorage(4)  # type: ignore[no-untyped-call]
    counts = [_use_count(storage._cdata)]
    tensor = torch.empty(0, dtype=torch.uint8).set_(storage)
    counts.append(_use_count(tensor.untyped_storage()._cdata))
    if counts != [1, 2]:
        raise RuntimeError(f"it counts {counts} users of memory without and with a tensor")


def is_in_use(storage: torch.UntypedStorage) -> bool:
    """Whether a tensor uses `storage`, of which the caller holds the one Python object."""
    return not _MEMORY.works_or_warn() or bool(_use_count(storage._cdata) > 1)


class StrongStorage:
    """Keeps memory alive, so that its address cannot come back for another tensor."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.cdata = storage


_WEAK = Feature("weak_storages", "cached_casts keeps the memory of weights alive as long as their casts")
_weak_storage = _WEAK.value("torch.multiprocessing.reductions.StorageWeakRef", None)
_is_expired = _WEAK.value("torch.UntypedStorage._expired", None)
_WEAK.attempt(lambda: _is_expired(_weak_storage(torch.UntypedStorage(0)).cdata))  # type: ignore[no-untyped-call]

# A weak reference to memory: tells that the memory of a weight was freed, though its address is in use again.
if TYPE_CHECKING:
    from torch.multiprocessing.reductions import StorageWeakRef

    WeakStorage = StorageWeakRef
else:
    WeakStorage = _weak_storage if _WEAK.complete else _WEAK.fallback(StrongStorage)
is_freed: Callable[[Any], bool] = _is_expired if _WEAK.complete else lambda _storage: False

_HOOKS = Feature(
    "gradient_hooks", "cached_casts and master_weights cast each weight by itself, which is slower"
)
_HOOKS.value("torch.Tensor._backward_hooks", None)
_HOOKS.value("torch.Tensor._post_accumulate_grad_hooks", None)


def _has_gradient_hooks(tensor: torch.Tensor) -> bool:
    hooks: Any = tensor
    return bool(hooks._backward_hooks) or bool(hooks._post_accumulate_grad_hooks)


# Whether a hook waits for the gradient of a leaf. Each weight that has one is cast by itself.
has_gradient_hooks = _has_gradient_hooks if _HOOKS.complete else _HOOKS.fallback(lambda _tensor: True)

_ORDER = Feature(
    "backward_order",
    "cached_casts casts gradients back after the whole backward pass, which is slower",
    "torch._C._FunctionBase._set_sequence_nr",
)


@_ORDER.probe
def _check_set_sequence_number() -> None:
    torch.ones(1, requires_grad=True).clone().grad_fn._set_sequence_nr(2**63)  # type: ignore[union-attr]


def run_as_soon_as_ready(output: torch.Tensor) -> None:
    """Let a backward pass run the node that made `output` before all others that are ready.

    Autograd goes by age, and casts are older than the forward pass that uses them.
    """
    node: Any = output.grad_fn
    if _ORDER.works_or_warn():
        node._set_sequence_nr(2**63)


_LEAVES = Feature(
    "leaf_gradients", "master_weights cannot tell which gradients a backward pass adds to .grad"
)
_will_run = _LEAVES.function("torch._C._will_engine_execute_node")


def gradient_is_accumulated(node: Any) -> bool:
    """Whether the backward pass that runs now will add a gradient to ``.grad`` through the leaf's `node`.

    It does not where ``autograd.grad`` only returns the gradient.

    Raises:
        TorchFeatureError: torch no longer says so.
    """
    _LEAVES.require()
    try:
        return bool(_will_run(node))
    except RuntimeError:  # how torch says that the gradient is only returned
        return False
    except Exception:
        _LEAVES.attempt(_will_run, node)
        raise TorchFeatureError(_LEAVES.reason) from None


_DDP = Feature(
    "ddp_forward", "master_weights treats every model as part of a DistributedDataParallel, which is slower"
)
_ddp_class = _DDP.value("torch.nn.parallel.DistributedDataParallel._active_ddp_module", None)


def inside_ddp() -> bool:
    """Whether the forward of a DistributedDataParallel is running, whose reducer waits for the gradients."""
    if not _DDP.complete:
        return _in_process_group()
    return torch.nn.parallel.DistributedDataParallel._active_ddp_module is not None


def _in_process_group() -> bool:
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        _DDP.warn()
        return True
    return False


# ---- torch.export and torch.compile ------------------------------------------------------------------

_EXPORT = Feature(
    "export",
    "programs that torch.export traces without strict=True lose their regions",
    "torch.fx.experimental.proxy_tensor.PreDispatchTorchFunctionMode",
)

# Whether a ``TorchFunctionMode`` is active. Asked each time that a region is entered or left.
function_modes_are_on: Callable[[], bool] = _EXPORT.function(
    "torch._C._is_torch_function_mode_enabled", lambda: False, check=lambda f: f()
)
_function_modes = _EXPORT.function(
    "torch.overrides._get_current_function_mode_stack", list, check=lambda f: list(f())
)
_REGIONS = Feature("enter_autocast", "amp_core._enter_autocast and amp_core._exit_autocast are not there")
enter_autocast = _REGIONS.function("torch.amp.autocast_mode._enter_autocast")
exit_autocast = _REGIONS.function("torch.amp.autocast_mode._exit_autocast")


def record_enter(device: str, dtype: torch.dtype, enabled: bool, cache_enabled: bool) -> None:
    """Tell `torch.export`'s pre-dispatch tracer that a region begins; the modes of users see nothing."""
    mode = _pre_dispatch_mode()
    if mode is not None:
        mode.__torch_function__(enter_autocast, (), (device, dtype, enabled, cache_enabled))


def record_exit() -> None:
    """Tell `torch.export`'s pre-dispatch tracer that a region ends."""
    mode = _pre_dispatch_mode()
    if mode is not None:
        mode.__torch_function__(exit_autocast, (), ())


def _pre_dispatch_mode() -> Any:
    # Whoever traces has imported the tracer; to import it takes a second.
    tracer = sys.modules.get("torch.fx.experimental.proxy_tensor")
    if tracer is None or not _EXPORT.works_or_warn():
        return None
    kind = tracer.PreDispatchTorchFunctionMode
    return next((mode for mode in _function_modes() if isinstance(mode, kind)), None)


_COMPILE = Feature(
    "compile", "steps inside torch.compile always run outside the graph, and policies need fullgraph=False"
)

# What Dynamo does with the next function that is called; None where nothing is being compiled.
frames_are_compiled: Callable[[], Any] = _COMPILE.function(
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

# ---- steps and kernels -------------------------------------------------------------------------------

_FUSED = Feature(
    "fused_steps",
    "GradScaler unscales gradients before a fused optimizer steps, and waits for the device, which is slower",
    probed=("Optimizer._step_supports_amp_scaling",),
)


@_FUSED.probe
def _check_fused() -> None:
    if not takes_scale(torch.optim.SGD([torch.ones(1, device="cpu")], lr=0.0, fused=True)):
        raise RuntimeError("fused optimizers do not say that they take grad_scale and found_inf")


def takes_scale(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `optimizer` says that its step takes ``grad_scale`` and ``found_inf``."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `optimizer` takes ``grad_scale`` and ``found_inf``; warns if torch's no longer say so."""
    if takes_scale(optimizer):
        return True
    if getattr(optimizer, "defaults", {}).get("fused"):
        _FUSED.works_or_warn()
    return False


_FOREACH = Feature("foreach", "the portable kernels handle tensors one by one, which is slower")


def _copy_each(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def _multiply_each(tensors: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    for tensor in tensors:
        tensor.mul_(factor)


def _norm_of_each(
    tensors: Sequence[torch.Tensor], order: float, dtype: torch.dtype | None = None
) -> list[torch.Tensor]:
    return [torch.linalg.vector_norm(tensor, order, dtype=dtype) for tensor in tensors]


def _divide_each(tensors: Sequence[torch.Tensor], by: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor / divisor for tensor, divisor in zip(tensors, by, strict=True)]


def _one() -> torch.Tensor:
    return torch.ones((), device="cpu")


foreach_copy_ = _FOREACH.function("torch._foreach_copy_", _copy_each, lambda f: f([_one()], [_one()]))
foreach_div = _FOREACH.function("torch._foreach_div", _divide_each, lambda f: f([_one()], [_one()]))
foreach_mul_ = _FOREACH.function("torch._foreach_mul_", _multiply_each, lambda f: f([_one()], _one()))
foreach_norm = _FOREACH.function(
    "torch._foreach_norm", _norm_of_each, lambda f: f([_one()], 2.0, dtype=torch.float64)
)

# The memory of a lazily negated tensor, without a copy.
neg_view = Feature("negated_gradients", "a GradScaler refuses gradients that are lazily negated").function(
    "torch._neg_view"
)

# Whether two tensors have one memory; without it, the portable kernels write back what they need not.
is_alias_of: Callable[[torch.Tensor, torch.Tensor], bool] = Feature(
    "alias", "the portable kernels copy complex gradients once more"
).function("torch._C._is_alias_of", lambda *_: False, lambda f: f(_one(), _one()))

# Whether ``torch.func`` is transforming what runs now: its tensors are plain by type but have no memory.
functorch_is_at_work: Callable[[], bool] = Feature(
    "functorch", "portable kernels take the place of compiled ones, which is slower"
).function("torch._C._are_functorch_transforms_active", lambda: True, check=lambda f: f())

_CAPTURE = Feature(
    "capture", "cached_casts and master_weights cast every weight at every use, which is slower"
)
_jit_tracing_state = _CAPTURE.function("torch._C._get_tracing_state", lambda: "unknown", check=lambda f: f())
_dispatch_mode = _CAPTURE.function("torch._C._get_dispatch_mode", lambda _key: "unknown")
_PROXY_MODE = _CAPTURE.value("torch._C._TorchDispatchModeKey.PROXY", None)
_CAPTURE.attempt(lambda: _dispatch_mode(_PROXY_MODE))


_FAKES = Feature(
    "fake_weights",
    "torch.compile refuses recipes with delayed scales",
    "torch._subclasses.fake_tensor.is_fake",
)


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether `tensor` stands for another one while a graph is traced, and has no values."""
    return _FAKES.works_or_warn() and bool(resolve("torch._subclasses.fake_tensor.is_fake")(tensor))


def calls_are_captured() -> bool:
    """Whether ops that run now are transformed by ``torch.func`` or traced into a graph of any kind.

    A cached cast would be a constant of such a graph, or a tensor of another level of ``torch.func``.
    """
    if not _CAPTURE.complete:
        _CAPTURE.warn()
        return True
    return (
        functorch_is_at_work() or _jit_tracing_state() is not None or _dispatch_mode(_PROXY_MODE) is not None
    )


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


_LAYOUT = Feature("gradient_layout", "GradScaler inspects every gradient in every step, which is slower")
_tensor_guards = _LAYOUT.value("torch._C._dynamo.guards.TensorGuards", None)


@_LAYOUT.probe
def _check_layout() -> None:
    same = _layout_guard([torch.ones(2)])
    if [same(torch.ones(2)), same(torch.ones(3)), same(torch.ones(2).half())] != [True, False, False]:
        raise RuntimeError("it does not tell tensors apart by shape and dtype")


def same_layout(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """Return a guard that checks that tensors match these.

    They match if, in this order, they have the same class, dispatch keys (so neither sparse nor a lazy
    negative where these are not), dtype, device, shape and strides. The guard holds no reference to them.
    It is 20 times as fast as inspecting each gradient in every step.
    """
    return _layout_guard(tensors) if _LAYOUT.works_or_warn() else lambda *_: False


def _layout_guard(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    sizes = [list(t.size()) for t in tensors]
    strides = [list(t.stride()) for t in tensors]
    guards = _tensor_guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    return cast("Callable[..., bool]", guards.check)


# ---- recordings --------------------------------------------------------------------------------------

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

_BACKWARD = Feature(
    "backward_places",
    "amp_core.record counts ops of the backward pass as forward, outside modules",
    "torch._C._FunctionBase._sequence_nr",
)
_current_node = _BACKWARD.function("torch._C._current_autograd_node", check=lambda f: f())

# The number that the next autograd node gets.
next_sequence_number: Callable[[], int] = _BACKWARD.function(
    "torch._C._autograd._get_sequence_nr", lambda: 0, check=lambda f: f() + 0
)


def current_autograd_node() -> Any:
    """Return the autograd node that runs now; None outside a backward pass."""
    return _current_node() if _BACKWARD.works_or_warn() else None


_graph_task = _BACKWARD.function("torch._C._current_graph_task_id", lambda: -1, check=lambda f: f() + 0)
_AFTER_GRADIENTS = ("torch::autograd::AccumulateGrad", "RegisterPostBackwardFunctionBackward")


def in_backward() -> bool:
    """Whether this thread runs a backward pass, including callbacks between or after its nodes."""
    return bool(_graph_task() != -1)


def at_weight_gradients() -> bool:
    """Whether the backward pass is where DDP and FSDP2 handle gradients of weights, in no op's node."""
    node = current_autograd_node()
    return node is None or node.name() in _AFTER_GRADIENTS


def sequence_number(node: Any) -> int:
    """Return the number of an autograd node: nodes count up, per thread, as they are created."""
    return int(node._sequence_nr())


def _map_only(kind: type, function: Callable[[Any], Any], tree: Any) -> Any:
    return map_tensors(tree, lambda tensor: function(tensor) if isinstance(tensor, kind) else tensor)


# For casting what a module is given and returns.
tree_map_only = Feature(
    "module_casts", "apply_policy casts the inputs of modules only in lists, tuples and mappings"
).function("torch.utils._pytree.tree_map_only", _map_only, lambda f: f(torch.Tensor, torch.clone, ([1],)))

_KEEPING = Feature("kept_buffers", "PrecisionPlan.apply cannot keep buffers in float32")
_apply_to_tensors = _KEEPING.value("torch.nn.Module._apply", None)


@_KEEPING.probe
def _check_apply() -> None:
    seen: list[torch.Tensor] = []
    module = torch.nn.Module()
    module.register_buffer("each", torch.zeros(1))

    def see(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor)
        return tensor

    _apply_to_tensors(module, see)
    if not seen:
        raise RuntimeError("it passes no buffer to its function")


def require_module_casts() -> None:
    """Raise unless ``Module.to`` and the like go through one method that a module can replace.

    Raises:
        TorchFeatureError: they do not.
    """
    _KEEPING.require()


def apply_to_tensors(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call the method of the module's class through which ``Module.to`` and the like go."""
    method: Any = type(module)._apply
    return method(module, *args, **kwargs)
