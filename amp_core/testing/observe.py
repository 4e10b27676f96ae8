"""Observe what an autocast rule does to an op: call the op and inspect its arguments below autocast.

A recorder replaces the op on the device's Autograd key, so the arguments need neither valid shapes nor a
kernel: the tensors may even be fake ones for a device that is not available.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from amp_core._torch.dispatcher import Overload, autograd_key, dispatcher_name
from amp_core._torch.dispatcher import arguments as schema_arguments
from amp_core._torch.op_kernels import install
from amp_core.policy import names, rules

MakeTensor = Callable[[torch.dtype], torch.Tensor]
"""dtype -> a tensor of that dtype on the device that is observed."""


class Arrived(Exception):  # noqa: N818  # not an error: it carries the arguments
    """The op, or its overload that takes a dtype, was called with these arguments."""

    def __init__(self, op: Overload, arguments: dict[str, Any]) -> None:
        super().__init__(dispatcher_name(op))
        self.op = op
        self.arguments = arguments

    def dtypes(self) -> list[torch.dtype]:
        """Return the floating dtypes of the tensors, in order."""
        values = [v if isinstance(v, (list, tuple)) else [v] for v in self.arguments.values()]
        tensors = [t for some in values for t in some if isinstance(t, torch.Tensor)]
        return [t.dtype for t in tensors if t.is_floating_point()]


def consistent(op_name: str, rule: str, device_type: str, make: MakeTensor, low: torch.dtype) -> str:
    """Compare the effect of the current region on the op with `rule`.

    Args:
        op_name: the full name, such as ``aten::mm.default``.
        rule: its rule in the active policy.
        device_type: the device type of the region.
        make: creates the arguments.
        low: the dtype of the region.

    Returns:
        A description of the departure; empty if the op follows `rule`.
    """
    op = names.find(op_name)
    assert op is not None, f"torch has no op {op_name}"
    with _recorded(op, device_type), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some rules come with a hint
        results = {pair: _call(op, make, pair) for pair in ((low, low), (HIGH, HIGH), (low, HIGH))}
    for pair, result in results.items():
        wrong = _departure(op, rule, pair, result, low)
        if wrong:
            return f"{op_name} ({rule}) of {pair[0]} and {pair[1]}: {wrong}"
    return ""


HIGH = torch.float32


def _departure(
    op: Overload,
    rule: str,
    given: tuple[torch.dtype, torch.dtype],
    result: Arrived | Exception,
    low: torch.dtype,
) -> str:
    if rule == rules.BANNED:
        return "it runs" if isinstance(result, Arrived) else ""
    if not isinstance(result, Arrived):
        return f"{type(result).__name__}: {result}"
    if rule in (rules.FP32_APPEND_DTYPE, rules.FP32_SET_OPT_DTYPE):
        argument = rules.dtype_argument(op) if rule == rules.FP32_SET_OPT_DTYPE else None
        dtype = result.arguments.get("dtype" if argument is None else argument[1])
        return "" if dtype in (HIGH, _HIGH_AS_INT) else f"it is given dtype={dtype}"
    actual = result.dtypes()
    wanted = _expected(rule, given, actual, low)
    return "" if set(actual) <= wanted else f"it runs on {sorted(map(str, set(actual)))}"


_HIGH_AS_INT = 6  # torch.float32 where a schema has an int, c10::ScalarType::Float


def _expected(
    rule: str, given: tuple[torch.dtype, torch.dtype], actual: list[torch.dtype], low: torch.dtype
) -> set[torch.dtype]:
    if rule == rules.LOWER_PRECISION_FP:
        return {low}
    if rule in (rules.FP32, rules.FP32_WITH_HINT):
        return {HIGH}
    if rule == rules.MATCH_DESTINATION:
        return {given[0]}
    if rule == rules.UNCHANGED:
        return set(given)
    return {HIGH} if HIGH in given and len(actual) > 1 else set(given)


def _recorder(op: Overload) -> Callable[..., Any]:
    arguments = schema_arguments(op)

    def record(_keyset: Any, *args: Any, **kwargs: Any) -> None:
        given = {a.name: value for a, value in zip(arguments, args, strict=False)}
        raise Arrived(op, {**given, **kwargs})

    return record


@contextmanager
def _recorded(op: Overload, device_type: str) -> Iterator[None]:
    key = autograd_key(device_type)
    with ExitStack() as stack:
        for overload in {op, rules.dtype_overload(op) or op}:
            name = dispatcher_name(overload)
            stack.callback(install(name, key, _recorder(overload)))
        yield


def _call(op: Overload, make: MakeTensor, dtypes: tuple[torch.dtype, torch.dtype]) -> Arrived | Exception:
    args, kwargs = [], {}
    first = True
    for argument in schema_arguments(op):
        kind = str(argument.real_type)
        value = _value(argument, make, dtypes, dtypes[0] if first else dtypes[1])
        first = first and not ("Tensor" in kind and not kind.startswith("List"))
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    try:
        op(*args, **kwargs)
    except Exception as arrived:  # an Arrived, or the op's own refusal
        return arrived
    return RuntimeError("it returned without passing the Autograd key")


_FILLER = {"int": 0, "SymInt": 0, "bool": False, "float": 1.0, "number": 1, "str": "fro"}


def _value(
    argument: Any, make: MakeTensor, dtypes: tuple[torch.dtype, torch.dtype], dtype: torch.dtype
) -> Any:
    kind = str(argument.real_type)
    if kind == "List[Optional[Tensor]]":  # the indices of index_put
        return [torch.zeros(2, dtype=torch.int64)]
    if kind.startswith("List") and "Tensor" in kind:
        return [make(d) for d in dtypes]
    if "Tensor" in kind and not kind.startswith("Optional"):
        return make(dtype)
    if argument.has_default_value():
        return argument.default_value
    if kind.startswith("Optional"):
        return None
    return [_FILLER[kind[5:-1]]] * 3 if kind.startswith("List") else _FILLER[kind]
