"""The private torch names for ops and the dispatcher."""

from __future__ import annotations

import functools
import re
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from amp_core._torch.autocast import autocast_known
from amp_core._torch.features import Feature

K = TypeVar("K")

POLICIES = Feature(
    "policies",
    "policies, apply_policy, cached_casts, master_weights and record cannot change or watch how ops are "
    "cast, so regions run by torch's own rules",
    "torch.ops.aten.mm.default._schema",
)
_key_of_name = POLICIES.function("torch._C._dispatch_key_parse")
_keys = POLICIES.function("torch._C.DispatchKeySet")
_all_names = POLICIES.function("torch._C._dispatch_get_all_op_names")
_registrations = POLICIES.function("torch._C._dispatch_get_registrations_for_dispatch_key")
_schema = POLICIES.function("torch._C._dispatch_find_schema_or_throw")
_has_kernel = POLICIES.function("torch._C._dispatch_has_kernel_for_dispatch_key")
_library = POLICIES.function("torch._C._dispatch_library")
_has_fallback = POLICIES.function("torch._C._dispatch_has_backend_fallback")
_get_kernel = POLICIES.function("torch.library.get_kernel")
_dump = POLICIES.function("torch._C._dispatch_dump")
_without_modes = POLICIES.function("torch.utils._python_dispatch._disable_current_modes")

# One op as the dispatcher knows it; all overloads of one op.
if TYPE_CHECKING:
    Overload = torch._ops.OpOverload
    Packet = torch._ops.OpOverloadPacket
else:
    Overload = type(torch.ops.aten.mm.default)
    Packet = type(torch.ops.aten.mm)


def dispatcher_name(op: Overload) -> str:
    """Return the op as the dispatcher names it; the default overload has no suffix (``aten::mm``)."""
    return str(op.name())  # type: ignore[no-untyped-call]


_ENTRY = Feature(
    "dispatcher_entry",
    "policies cost one more Python call per op, which is slower",
    "torch.ops.aten.mm.default._op",
)


def entry_of(op: Overload) -> Callable[..., Any]:
    """Return the function that enters the dispatcher with `op`: it saves a Python frame at each call."""
    return op._op if _ENTRY.works_or_warn() else op


def overloads_of(packet: Packet) -> dict[str, Overload]:
    """Return the overloads of a packet by name; the default one is ``"default"``."""
    POLICIES.require()
    names: list[str] = packet.overloads()  # type: ignore[no-untyped-call]
    overloads = {name: getattr(packet, name) for name in names if not _takes_dimension_names(name)}
    return {name: op for name, op in overloads.items() if _is_dispatched(op)}


def _takes_dimension_names(overload: str) -> bool:
    """Whether the overload is one for named tensors, which torch 2.13 has given up.

    They keep the rules that torch compiled in; no policy of amp-core's covers them.
    """
    return "imname" in overload or overload.startswith("names")


def _is_dispatched(op: Overload) -> bool:
    """Whether the dispatcher has the op; a few exist for TorchScript alone (``index_put_.hacked_twin``)."""
    name, _, overload = dispatcher_name(op).partition(".")
    try:
        _schema(name, overload)
    except RuntimeError:
        return False
    return True


def autocast_key(device_type: str) -> str:
    """Return the dispatch key on which `device_type` has its autocast kernels."""
    if device_type == torch.device("privateuseone").type:
        return "AutocastPrivateUse1"
    return f"Autocast{device_type.upper()}"


def autograd_key(device_type: str) -> str:
    """The dispatch key right below `autocast_key`. For: observing the rules of ops."""
    return autocast_key(device_type).replace("Autocast", "Autograd")


def has_dispatch_key(name: str) -> bool:
    """Whether the dispatcher knows the key `name`."""
    POLICIES.require()
    try:
        _key_of_name(name)
    except RuntimeError:
        return False
    return True


def autocast_device_types() -> list[str]:
    """Every device type that torch's own source names and can autocast.

    torch lists its device types in the text of an exception alone. If the text changes: `amp_core.backends`
    no longer lists devices that have no package.
    """
    try:
        torch.device("no_such_device")
    except RuntimeError as error:
        names = re.findall(r"\w+", str(error).partition("one of ")[2].partition(" device type ")[0])
        return [n for n in names if n not in ("mkldnn", "privateuseone") and autocast_known(n)]
    return []


def all_op_names() -> list[str]:
    """Return every op that is registered now, as ``namespace::name.overload``."""
    POLICIES.require()
    return cast("list[str]", _all_names())


def registered(key: str) -> frozenset[str]:
    """Return the ops that have a kernel on dispatch key `key`, C++ and Python alike, without `install`."""
    POLICIES.require()
    ops: list[str] = [op for op in _registrations(key) if (op, key) not in _added]
    overloads = {op: op.rpartition("::")[2].partition(".")[2] for op in ops}
    return frozenset(op for op in ops if not _takes_dimension_names(overloads[op]))


def has_kernel(op_name: str, key: str) -> bool:
    """Whether the op is defined and has a kernel of its own on `key`."""
    POLICIES.require()
    try:
        return bool(_has_kernel(op_name, key))
    except RuntimeError:
        return False


def arguments(op: Overload) -> list[Any]:
    """Return the arguments of the op's schema.

    Each has ``name``, ``real_type``, ``kwarg_only``, ``alias_info``, ``is_out``.
    """
    return op._schema.arguments


def is_mutable(op: Overload) -> bool:
    """Whether the op writes to one of its arguments, by its schema."""
    return op._schema.is_mutable


def is_view(op: Overload) -> bool:
    """Whether the op returns a view of an argument, by its schema."""
    return bool(op.is_view)


def op_text(op: object) -> str | None:
    """Return the qualified name of an overload, a packet, or what `torch.library.custom_op` returns."""
    if isinstance(op, Overload):
        return dispatcher_name(op)
    if isinstance(op, Packet):
        return dispatcher_name(getattr(op, op.overloads()[0])).partition(".")[0]  # type: ignore[no-untyped-call]
    if isinstance(op, _custom_op):
        _CUSTOM.require()
        return str(op._qualname)
    return None


_CUSTOM = Feature(
    "custom_ops",
    "policies take an op of torch.library.custom_op by its name only",
    probed=("CustomOpDef._qualname",),
)
_custom_op: Any = _CUSTOM.value("torch.library.CustomOpDef", ())


@_CUSTOM.probe
def _check_custom_op() -> None:
    if "_qualname" not in _custom_op.__init__.__code__.co_names:
        raise RuntimeError("it keeps its name elsewhere")


def redispatch_below(op: Overload, key: str) -> Callable[..., Any]:
    """Return a function of a keyset and arguments that runs `op` as if it had no kernel on `key`.

    Ops that it calls in turn see `key` as before. For: ops without a rule. If it goes: no policy.
    """
    # Python's dispatcher, which Dynamo switches on, would start again from all keys of the thread.
    own = key_set(key)
    passed = own | key_set("PythonDispatcher")

    def run(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return op.redispatch(keyset - passed, *args, **kwargs)
        except RuntimeError:
            with excluded(own):
                return run_with_numbers(op, args, kwargs)

    return run


def run_with_numbers(op: Overload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run `op` after a call has failed: raise the error again unless a number stands where a tensor belongs.

    A kernel in Python receives the 2 of ``x % 2`` as a number; the schema has a tensor.
    """
    is_tensor = [str(a.real_type) == "Tensor" and not a.kwarg_only for a in arguments(op)]
    numbers = [isinstance(a, _NUMBERS) and tensor for a, tensor in zip(args, is_tensor, strict=False)]
    if not any(numbers):
        raise  # noqa: PLE0704  # the caller handles an exception
    try:
        return op.overloadpacket(*args, **kwargs)  # finds the overload that takes a number there
    except RuntimeError:
        tensors = [torch.scalar_tensor(a) if number else a for a, number in zip(args, numbers, strict=True)]
        return entry_of(op)(*tensors, **kwargs)


_NUMBERS = (bool, int, float, complex, torch.SymInt, torch.SymFloat, torch.SymBool)


def key_set(key: str) -> Any:
    """Return a set of one dispatch key, for `excluded`."""
    POLICIES.require()
    return _keys(_key_of_name(key))


# Runs a block with the keys of a `key_set` switched off, as torch's own autocast kernels do.
excluded: Callable[[Any], AbstractContextManager[None]] = POLICIES.function(
    "torch._C._ExcludeDispatchKeyGuard"
)


def native_kernel(op_name: str, key: str) -> Callable[..., Any]:
    """Return the kernel that `op_name` has on `key` now; call it as ``kernel(keyset, *args, **kwargs)``."""
    POLICIES.require()
    kernel = cast("Callable[..., Any]", _get_kernel(op_name, key).call_boxed)
    if not is_python_kernel(op_name, key):
        return kernel

    def call(*args: Any, **kwargs: Any) -> Any:
        with _without_modes():
            return kernel(*args, **kwargs)

    return call


def is_python_kernel(op_name: str, key: str) -> bool:
    """Whether the kernel of `op_name` on `key` is a Python function, as those of ``torch.library`` are.

    Under a `TorchDispatchMode`, the dispatcher calls the Python function that was registered last, even if it
    has been removed since.
    """
    found = re.search(rf"^{key}: registered at (.*):\d+ ::", _dump(op_name), re.MULTILINE)
    return found is not None and found[1].endswith(".py")


_installing = threading.Lock()
"""Held while `install` changes the warning filters, which all threads share."""
_warned_of_override = False
_added: set[tuple[str, str]] = set()
"""Each op that had no kernel on a dispatch key before `install` added one, with the key."""


def install(op_name: str, key: str, kernel: Callable[..., Any]) -> Callable[[], None]:
    """Put `kernel` on `op_name` at `key`; return a function that removes it and restores the earlier one.

    ``torch.library.Library`` does the same at a higher cost per op. The dispatcher warns once per process
    that a kernel is overridden; here that is the point, so that warning is swallowed.

    Raises:
        TorchFeatureError: torch no longer supports it.
    """
    POLICIES.require()
    with _installing:
        return _install(op_name, key, kernel)


def _install(op_name: str, key: str, kernel: Callable[..., Any]) -> Callable[[], None]:
    global _warned_of_override  # noqa: PLW0603  # once per process, as the dispatcher's own flag
    namespace, _, name = op_name.partition("::")
    library = _library("IMPL", namespace, "", __file__, 1)
    if not has_kernel(op_name, key):
        _added.add((op_name, key))
        library.impl(name, key, kernel, True)
        return functools.partial(_remove, library, (op_name, key))
    if _warned_of_override:
        library.impl(name, key, kernel, True)
        return cast("Callable[[], None]", library.reset)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library.impl(name, key, kernel, True)
    _warned_of_override = True
    return cast("Callable[[], None]", library.reset)


def _remove(library: Any, added: tuple[str, str]) -> None:
    library.reset()
    _added.discard(added)


@POLICIES.probe
def _check_policies() -> None:
    """Put a kernel on a scratch op and remove it; calls no op, which a mode of the user's could see."""
    scratch = _library("FRAGMENT", "amp_core_probe", "", __file__, 1)
    scratch.define("probe(Tensor x) -> Tensor", "")
    library = _library("IMPL", "amp_core_probe", "", __file__, 1)
    library.impl("probe", "AutocastCPU", lambda keyset, x: x, True)  # noqa: ARG005
    installed = _has_kernel("amp_core_probe::probe", "AutocastCPU")
    known = is_python_kernel("amp_core_probe::probe", "AutocastCPU")
    library.reset()
    if not installed or _has_kernel("amp_core_probe::probe", "AutocastCPU"):
        raise RuntimeError("a kernel cannot be put on an autocast key and removed again")
    if not known:
        raise RuntimeError("the dispatcher does not say which kernels are Python functions")
    with _without_modes(), excluded(_keys(_key_of_name("AutocastCPU"))):
        _get_kernel("aten::mm", "AutocastCPU")
    if not (_registrations("AutocastCPU") and _all_names() and _has_fallback(_key_of_name("AutocastCPU"))):
        raise RuntimeError("the dispatcher does not list its ops")
    _schema("aten::mm", "")
    if [a.name for a in arguments(torch.ops.aten.mm.default)] != ["self", "mat2"]:
        raise RuntimeError("the schema of aten::mm cannot be read")


def install_fallthrough(key: str) -> None:
    """Let ops without a rule fall through `key`, for good, if the key has no fallback yet.

    For PrivateUse1, hpu and xla, whose autocast keys torch leaves bare.
    """
    POLICIES.require()
    if _has_fallback(_key_of_name(key)):
        return
    library = _library("IMPL", "_", key, __file__, 1)
    library.fallback(key, torch.library.fallthrough_kernel)
    _fallthrough.append(library)


_fallthrough: list[Any] = []  # keeps them alive


# ---- Dynamo ------------------------------------------------------------------------------------------


_VALUES = Feature("compiled_policies", "policies cannot be arguments of functions that torch.compile traces")
_register_constant = _VALUES.value("torch.utils._pytree.register_constant", None)


def value_for_dynamo(kind: type[K]) -> type[K]:
    """Let Dynamo take an object of this class for a constant, by its equality, when it traces."""
    if _register_constant is not None:
        _VALUES.attempt(_register_constant, kind)
    return kind
