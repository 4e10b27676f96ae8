"""The private torch names for ops and the dispatcher."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from types import BuiltinFunctionType
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from amp_core._torch.autocast import autocast_known, privateuse1_name
from amp_core._torch.features import Feature
from amp_core._torch.op_kernels import (
    POLICIES,
    dispatch_key,
    excluded,
    is_defined,
    key_set,
    takes_dimension_names,
    traced_kernel,
)

K = TypeVar("K")

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


def short_name(op: Overload) -> str:
    """Return the op's name without namespace and overload."""
    return dispatcher_name(op).rpartition("::")[2].partition(".")[0]


_ENTRY = Feature(
    "dispatcher_entry",
    "policies cost one more Python call per op, which is slower",
    "torch.ops.aten.mm.default._op",
)


def entry_of(op: Overload) -> Callable[..., Any]:
    """Return the fastest function that enters the dispatcher with `op`."""
    binding = _binding(op)
    if binding is not None:
        return binding
    return op._op if _ENTRY.works_or_warn() else op


def _binding(op: Overload) -> Callable[..., Any] | None:
    """Return torch's own Python function for `op`, which parses arguments in half the time.

    It chooses an overload by the arguments, so it must know `op` by them.
    """
    name = short_name(op)
    if name.startswith("_") or op.namespace != "aten" or binding_differs(op):
        return None
    found = [vars(module).get(name) for module in (torch, torch.nn.functional)]
    own = {("torch", name), ("torch._C._nn", name)}  # a program may have put another function there
    builtin = [f for f in found if isinstance(f, BuiltinFunctionType) and (f.__module__, f.__name__) in own]
    others = [other for other in overloads_of(op.overloadpacket).values() if other is not op]
    known = all(_differ(op, other) for other in others)
    return builtin[0] if builtin and known else None


def binding_differs(op: Overload) -> bool:
    """Whether torch's function for `op` has another default `reduction`, or lists that take no None."""
    return any(a.name == "reduction" or "List[Optional" in str(a.real_type) for a in arguments(op))


def _differ(op: Overload, other: Overload) -> bool:
    """Return whether torch's own Python functions know a call of `op` from one of `other`.

    They do by the number of arguments and by keywords that `other` requires, and they try tensors before
    numbers.
    """
    own = {a.name for a in arguments(op)}
    if any(a.kwarg_only and not a.has_default_value() and a.name not in own for a in arguments(other)):
        return True
    mine, theirs = _positional(op), _positional(other)
    least, fewest = (sum(not a.has_default_value() for a in each) for each in (mine, theirs))
    if len(mine) < fewest or least > len(theirs):
        return True
    kinds = [(str(a.real_type), str(b.real_type)) for a, b in zip(mine[:least], theirs, strict=False)]
    return ("Tensor", "number") in kinds


def _positional(op: Overload) -> list[Any]:
    return [a for a in arguments(op) if not a.kwarg_only]


def overloads_of(packet: Packet) -> dict[str, Overload]:
    """Return the overloads of a packet by name; the default one is ``"default"``."""
    POLICIES.require()
    names: list[str] = packet.overloads()  # type: ignore[no-untyped-call]
    overloads = {name: getattr(packet, name) for name in names if not takes_dimension_names(name)}
    return {name: op for name, op in overloads.items() if is_defined(dispatcher_name(op))}


def autocast_key(device_type: str) -> str:
    """Return the dispatch key on which `device_type` has its autocast kernels."""
    if device_type == privateuse1_name():
        return "AutocastPrivateUse1"
    return f"Autocast{device_type.upper()}"


def autograd_key(device_type: str) -> str:
    """Return the dispatch key right below `autocast_key`."""
    return autocast_key(device_type).replace("Autocast", "Autograd")


def autocast_device_types() -> list[str]:
    """Return every device type that torch's own source names and can autocast.

    torch lists them only in the text of an exception; if that text changes, the list is empty.
    """
    try:
        torch.device("no_such_device")
    except RuntimeError as error:
        names = re.findall(r"\w+", str(error).partition("one of ")[2].partition(" device type ")[0])
        return [n for n in names if n not in ("mkldnn", "privateuseone") and autocast_known(n)]
    return []


def arguments(op: Overload) -> list[Any]:
    """Return the arguments of the op's schema.

    Each has ``name``, ``real_type``, ``kwarg_only``, ``alias_info``, ``is_out``.
    """
    return op._schema.arguments


def by_name(op: Overload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of `op` by their names in its schema."""
    return {**dict(zip((a.name for a in arguments(op)), args, strict=False)), **kwargs}


def is_mutable(op: Overload) -> bool:
    """Whether the op writes to one of its arguments, by its schema."""
    return op._schema.is_mutable


def written(op: Overload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments of a call to which `op` writes, by its schema."""
    given = by_name(op, args, kwargs)
    return [
        given[a.name] for a in arguments(op) if a.name in given and a.alias_info and a.alias_info.is_write
    ]


def has_out(op: Overload) -> bool:
    """Whether the op writes its result to ``out=``, and does not read what was there."""
    return any(argument.is_out for argument in arguments(op))


def is_view(op: Overload) -> bool:
    """Whether the op returns a view of an argument, by its schema."""
    return bool(op.is_view)


def returns_tensors(op: Overload) -> bool:
    """Whether the op returns tensors, by its schema; ``sym_size`` and its like return numbers."""
    return any("Tensor" in str(result.type) for result in op._schema.returns)


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

    Ops that it calls in turn see `key` as before.
    """
    # Python's dispatcher, which Dynamo switches on, would start again from all keys of the thread.
    own = key_set(key)
    tracing = dispatch_key("PythonDispatcher")
    passed = own | key_set("PythonDispatcher")

    def run(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        below = keyset - passed
        traced = traced_kernel(op, below, key) if keyset.has(tracing) else None
        try:
            return op.redispatch(below, *args, **kwargs) if traced is None else traced(*args, **kwargs)
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
        tensors = [_as_tensor(a) if number else a for a, number in zip(args, numbers, strict=True)]
        return entry_of(op)(*tensors, **kwargs)


_NUMBERS = (bool, int, float, complex, torch.SymInt, torch.SymFloat, torch.SymBool)


def _as_tensor(number: Any) -> torch.Tensor:
    dtype = None  # the default one, which `scalar_tensor` has for numbers of any kind
    if isinstance(number, (bool, torch.SymBool)):
        dtype = torch.bool
    elif isinstance(number, (int, torch.SymInt)):
        dtype = torch.int64
    elif isinstance(number, complex):
        dtype = torch.get_default_dtype().to_complex()
    return torch.scalar_tensor(number, dtype=dtype)


# ---- Dynamo ------------------------------------------------------------------------------------------


_VALUES = Feature("compiled_policies", "policies cannot be arguments of functions that torch.compile traces")
_register_constant = _VALUES.value("torch.utils._pytree.register_constant", None)


def value_for_dynamo(kind: type[K]) -> type[K]:
    """Let Dynamo take an object of this class for a constant, by its equality, when it traces."""
    if _register_constant is not None and _VALUES.attempt(_register_constant, kind):
        _values.add(kind)
    return kind


_values: set[type] = set()


def is_value_for_dynamo(value: object) -> bool:
    """Whether Dynamo can guard on what `value` equals, and not only on the object itself."""
    return type(value) in _values
