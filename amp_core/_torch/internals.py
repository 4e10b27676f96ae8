"""The only module that touches names which torch does not document.

Each one says what it is for and what breaks if a torch release drops it, so that admitting a new
torch minor version is a matter of reading this page and running the tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch.multiprocessing.reductions import StorageWeakRef

# For: seeing every operation of a step, its casts and its memory. If it goes: `amp demo` cannot count them.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # noqa: PLC0414 (re-export)


def autocast_known(device_type: str) -> bool:
    """Whether torch has an autocast dispatch key for `device_type`.

    For: choosing the generic backend. If it goes: mps, mtia, hpu, maia, xla and PrivateUse1 devices
    without a package of their own are no longer found.
    """
    return bool(torch._C._is_autocast_available(device_type))


def is_device_type(name: str) -> bool:
    """Whether torch would parse `name` as the type of a ``torch.device``.

    Public API only; here because the answer is an exception.
    """
    try:
        return torch.device(name).type == name
    except RuntimeError:
        return False


def privateuse1_name() -> str:
    """The present name of the PrivateUse1 device type.

    For: torch's ``get_amp_supported_dtype`` protocol. If it goes: renamed devices lose their dtype list.
    """
    return torch._C._get_privateuse1_backend_name()


def privateuse1_amp_dtypes(device_type: str) -> list[torch.dtype]:
    """The dtypes that a PrivateUse1 device says autocast may use.

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


def autocast_devices_enabled() -> list[str]:
    """The device types for which autocast is on in this thread.

    For: `amp_core.disable`. If it goes: a region of each device must be disabled by name.
    """
    return [d for d in torch._C._autocast_supported_devices() if torch.is_autocast_enabled(d)]


# Whether a ``TorchFunctionMode`` is active, as cheap as a test can be: it is on a hot path.
# For: `torch.export`'s non-strict tracing of regions. If it goes: such programs lose their regions.
function_modes_are_on = torch._C._is_torch_function_mode_enabled


def record_enter(device: str, dtype: torch.dtype, enabled: bool, cache_enabled: bool) -> None:
    """Tell `torch.export`'s pre-dispatch tracer that a region begins; the modes of users see nothing.

    If it goes: see ``function_modes_are_on``.
    """
    mode = _pre_dispatch_mode()
    if mode is not None:
        mode.__torch_function__(enter_autocast, (), (device, dtype, enabled, cache_enabled))


def record_exit() -> None:
    """Tell `torch.export`'s pre-dispatch tracer that a region ends."""
    mode = _pre_dispatch_mode()
    if mode is not None:
        mode.__torch_function__(exit_autocast, (), ())


def _pre_dispatch_mode() -> Any:
    from torch.fx.experimental.proxy_tensor import PreDispatchTorchFunctionMode

    stack = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return next((m for m in stack if isinstance(m, PreDispatchTorchFunctionMode)), None)


# For: libraries that import them from here, as they do from torch.amp. If they go: they are not exported.
enter_autocast = torch.amp.autocast_mode._enter_autocast
exit_autocast = torch.amp.autocast_mode._exit_autocast


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is sharded over processes, without importing ``torch.distributed.tensor``.

    Public API only, asked of the class by name: the import takes a second.
    """
    return type(tensor).__name__ == "DTensor"


def is_fsdp_shard(param: torch.Tensor) -> bool:
    """Whether `param` is a flattened piece of a ``FullyShardedDataParallel`` (FSDP1) model.

    With ``NO_SHARD`` every rank has the whole parameter. For: refusing to take a shard for the whole. If it
    goes: ranks disagree on overflow and norm unless the scaler has a process group.
    """
    if not getattr(param, "_fsdp_flattened", False):
        return False
    whole = getattr(param, "_unpadded_unsharded_size", None)  # of a FlatParameter
    return param.dim() < 2 if whole is None else param.numel() < whole.numel()


# For: reading, casting and multiplying many tensors in one call. If they go: one call a tensor.
foreach_copy_ = torch._foreach_copy_
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm

# For: the memory of a lazily negated tensor, without a copy. If it goes: such gradients are refused.
neg_view = torch._neg_view

# The autograd node that runs now, None outside a backward pass; the number that the next one will get.
# For: the module path of an op in a backward pass. If they go: `amp_core.record` shows none for those.
current_autograd_node = torch._C._current_autograd_node
next_sequence_number = torch._C._autograd._get_sequence_nr

# Whether ``torch.func`` is transforming what runs now: its tensors are plain by type but have no memory.
# For: choosing kernels that do not need it. If it goes: custom_fwd fails under ``torch.func.vmap``.
functorch_is_at_work = torch._C._are_functorch_transforms_active

_jit_tracing_state = torch._C._get_tracing_state
_dispatch_mode = torch._C._get_dispatch_mode
_PROXY_MODE = torch._C._TorchDispatchModeKey.PROXY


def calls_are_captured() -> bool:
    """Whether ops that run now are transformed by ``torch.func`` or traced into a graph of any kind.

    For: keeping cached casts out of graphs and transforms. If it goes: a graph holds a weight's cast as a
    constant, and ``torch.func`` meets tensors of another level.
    """
    return (
        functorch_is_at_work() or _jit_tracing_state() is not None or _dispatch_mode(_PROXY_MODE) is not None
    )


# For: casting what a module is given and returns. If it goes: `map_tensors` does it, for fewer types.
tree_map_only = torch.utils._pytree.tree_map_only


def same_layout(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """Return a test of as many tensors: are they, in this order, such as `tensors`?

    That is of the same class, dispatch keys (so neither sparse nor a lazy negative where these are not),
    dtype, device, shape and strides. It holds no reference to them. For: not looking at each gradient
    again in every step, 20 times as fast. If it goes: each is looked at.
    """
    try:
        from torch._C._dynamo.guards import TensorGuards
    except ImportError:
        return lambda *_: False
    sizes: Any = [list(t.size()) for t in tensors]
    strides: Any = [list(t.stride()) for t in tensors]
    guards = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    return cast("Callable[..., bool]", guards.check)


# For: what `torch.compile` cannot trace; calling it breaks the graph. The same as ``torch.compiler.disable``,
# which would import all of Dynamo (2 s). If it goes: torch's optimizers make Dynamo fail under `GradScaler`.
outside_graphs = torch._compile._disable_dynamo

# What Dynamo does with the next function that is called; None where nothing is being compiled. For and if it
# goes: as ``outside_graphs``.
frames_are_compiled = torch._C._dynamo.eval_frame.get_eval_frame_callback


def inside_ddp() -> bool:
    """Whether the forward of a DistributedDataParallel is running.

    For: leaving the gradients of weights to the graph that it watches. If it goes: `master_weights`
    hides gradients from its reducer.
    """
    return torch.nn.parallel.DistributedDataParallel._active_ddp_module is not None


def has_gradient_hooks(tensor: torch.Tensor) -> bool:
    """Whether a hook waits for the gradient of the leaf `tensor`.

    For: leaving the gradients of such weights to autograd, each to its own. If it goes: `master_weights`
    has their hooks not called, `cached_casts` has them called with None for weights that were not used.
    """
    hooks: Any = tensor
    return bool(hooks._backward_hooks) or bool(hooks._post_accumulate_grad_hooks)


def gradient_is_accumulated(node: Any) -> bool:
    """Whether the backward pass that runs now will add a gradient to ``.grad`` through the leaf's `node`.

    It does not where ``autograd.grad`` only returns the gradient. For: adding it before autograd does. If it
    goes: `master_weights` must leave gradients to autograd, which takes more memory.
    """
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # how torch says that the gradient is only returned
        return False


def is_in_use(storage: torch.UntypedStorage) -> bool:
    """Whether a tensor uses `storage`, of which the caller holds the one Python object.

    For: using the memory of casts and gradients again. If it goes: each is allocated anew.
    """
    return torch._C._storage_Use_Count(storage._cdata) > 1


# For: noticing that the memory of a weight was freed, though its address is in use again. If it goes:
# `cached_casts` can take a weight that was put there for the one that was there before.
WeakStorage = StorageWeakRef
is_freed = cast("Callable[[int], bool]", torch.UntypedStorage._expired)


def run_as_soon_as_ready(output: torch.Tensor) -> None:
    """Let a backward pass run the node that made `output` before all others that are ready.

    Autograd goes by age, and casts are older than the forward pass that uses them.
    For: casting gradients back while they are in the processor's cache. If it goes: `cached_casts` casts
    them back after the whole backward pass; slower, and nothing overlaps with communication.
    """
    node: Any = output.grad_fn
    node._set_sequence_nr(2**63)
