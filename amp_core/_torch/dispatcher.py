"""Undocumented torch names for ops and the dispatcher.

Each one says what it is for and what breaks if a torch release drops it.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar, cast

import torch

K = TypeVar("K")

Overload = torch._ops.OpOverload
"""One op as the dispatcher knows it. For: types and ``isinstance``."""

Packet = torch._ops.OpOverloadPacket
"""All overloads of one op; what ``torch.ops.aten.mm`` is."""


def dispatcher_name(op: Overload) -> str:
    """The op as the dispatcher names it: ``aten::mm`` (the default overload), ``aten::softmax.int``."""
    return str(op.name())  # type: ignore[no-untyped-call]


def entry_of(op: Overload) -> Callable[..., Any]:
    """The function that enters the dispatcher with `op`.

    For: sparing a frame of Python at each call. If it goes: `op` itself does the same.
    """
    return op._op


def overloads_of(packet: Packet) -> dict[str, Overload]:
    """The overloads of a packet by name; the default one is ``"default"``."""
    names: list[str] = packet.overloads()  # type: ignore[no-untyped-call]
    found = {name: getattr(packet, name) for name in names if not _takes_dimension_names(name)}
    return {name: op for name, op in found.items() if _is_dispatched(op)}


def _takes_dimension_names(overload: str) -> bool:
    """Whether the overload called so is one of the named tensors that torch 2.13 has given up.

    They keep the rules that torch compiled in; no policy of amp-core's speaks of them.
    """
    return "imname" in overload or overload.startswith("names")


def _is_dispatched(op: Overload) -> bool:
    """Whether the dispatcher has the op; a few exist for TorchScript alone (``index_put_.hacked_twin``)."""
    name, _, overload = dispatcher_name(op).partition(".")
    try:
        torch._C._dispatch_find_schema_or_throw(name, overload)
    except RuntimeError:
        return False
    return True


def autocast_key(device_type: str) -> str:
    """The dispatch key on which `device_type` has its autocast kernels.

    For: every rule that differs from torch's. If the naming changes: op policies fail when installed.
    """
    if device_type == torch._C._get_privateuse1_backend_name():
        return "AutocastPrivateUse1"
    return f"Autocast{device_type.upper()}"


def autograd_key(device_type: str) -> str:
    """The dispatch key right below `autocast_key`. For: observing the rules of ops."""
    return autocast_key(device_type).replace("Autocast", "Autograd")


def has_dispatch_key(name: str) -> bool:
    """Whether the dispatcher knows the key `name`."""
    try:
        torch._C._dispatch_key_parse(name)
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
        return [n for n in names if n != "privateuseone" and has_dispatch_key(f"Autocast{n.upper()}")]
    return []


def all_op_names() -> list[str]:
    """Every op that is registered now, as ``namespace::name.overload``.

    For: near names and globs. If it goes: errors lose their suggestions, globs stop working.
    """
    return torch._C._dispatch_get_all_op_names()


def registered(key: str) -> frozenset[str]:
    """The ops that have a kernel of their own on dispatch key `key`, C++ and Python alike.

    For: knowing torch's native rules. If it goes: no policy can tell what it would change.
    """
    found = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    overloads = {op: op.rpartition("::")[2].partition(".")[2] for op in found}
    return frozenset(op for op in found if not _takes_dimension_names(overloads[op]))


def has_kernel(op_name: str, key: str) -> bool:
    """Whether the op has a kernel of its own on `key`."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op_name, key))


def arguments(op: Overload) -> list[Any]:
    """The arguments of the op's schema: ``name``, ``real_type``, ``kwarg_only``, ``alias_info``, ``is_out``.

    For: which arguments a rule casts. If it goes: no rule works.
    """
    return op._schema.arguments


def is_mutable(op: Overload) -> bool:
    """Whether the op writes to one of its arguments, by its schema."""
    return op._schema.is_mutable


def is_view(op: Overload) -> bool:
    """Whether the op returns a view of an argument, by its schema."""
    return bool(op.is_view)


def op_text(op: object) -> str | None:
    """The qualified name of an overload, a packet, or what `torch.library.custom_op` returns."""
    if isinstance(op, Overload):
        return dispatcher_name(op)
    name = getattr(op, "_qualified_op_name", None) or getattr(op, "_qualname", None)
    return name if isinstance(name, str) else None


def key_set(key: str) -> Any:
    """A set of one dispatch key. For: `excluded`."""
    return torch._C.DispatchKeySet(torch._C._dispatch_key_parse(key))


excluded: Callable[[Any], AbstractContextManager[None]] = torch._C._ExcludeDispatchKeyGuard
"""Run a block with the keys of a `key_set` switched off, as torch's own autocast kernels do.

For: running an op below its autocast kernel. If it goes: the kernels recurse.
"""


def native_kernel(op_name: str, key: str) -> Callable[..., Any]:
    """The kernel that `op_name` has on `key` now, to be called as ``kernel(keyset, *args, **kwargs)``.

    For: threads that run by torch's rules while another thread has a policy on. If it goes: a policy in
    one thread would change what another computes.
    """
    kernel = torch.library.get_kernel(op_name, cast("Any", key))
    return cast("Callable[..., Any]", kernel.call_boxed)


_warned_of_override = False


def install(op_name: str, key: str, kernel: Callable[..., Any]) -> Callable[[], None]:
    """Put `kernel` on `op_name` at `key`; return what takes it off and puts the earlier one back.

    For: rules that differ from torch's. If it goes: no policy but the native one. ``torch.library.Library``
    does the same at a higher cost per op. The dispatcher warns once per process of a kernel that is
    overridden; here that is the point, so that one warning is swallowed.
    """
    global _warned_of_override  # noqa: PLW0603  # once per process, as the dispatcher's own flag
    namespace, _, name = op_name.partition("::")
    library = torch._C._dispatch_library("IMPL", namespace, "", __file__, 1)
    if _warned_of_override or not has_kernel(op_name, key):
        library.impl(name, key, kernel, True)  # type: ignore[call-arg]
        return library.reset
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library.impl(name, key, kernel, True)  # type: ignore[call-arg]
    _warned_of_override = True
    return library.reset


def install_fallthrough(key: str) -> None:
    """Let ops without a rule fall through `key`, for good, if the key has no fallback yet.

    For: PrivateUse1, hpu and xla, whose autocast keys torch leaves bare. If it goes: every op without a
    rule fails under autocast on such a device.
    """
    if key in _fallthrough or "[backend fallback]" in _line(key):
        return
    library = torch._C._dispatch_library("IMPL", "_", key, __file__, 1)
    library.fallback(key, torch.library.fallthrough_kernel)
    _fallthrough[key] = library


_fallthrough: dict[str, Any] = {}


def _line(key: str) -> str:
    table = torch._C._dispatch_dump_table("aten::add.Tensor").splitlines()
    return next((line for line in table if line.startswith(f"{key}:")), "")


def value_for_dynamo(kind: type[K]) -> type[K]:
    """Let Dynamo take an object of this class for a constant, by its equality, when it traces.

    For: policies as arguments of compiled functions. If it goes: they compile from torch 2.13 on alone.
    """
    torch.utils._pytree.register_constant(kind)
    return kind


def constant_for_dynamo(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let Dynamo call `function` while it traces and take the result as a constant.

    The same as ``torch.compiler.assume_constant_result``, which would import all of Dynamo (2 s).
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
