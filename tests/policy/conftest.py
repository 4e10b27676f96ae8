"""How the rule of an op is observed: run its autocast kernel and look at what arrives below it.

A recorder on the Autograd key of the device takes the place of the op, so the arguments need no valid
shapes and no kernel of the device is needed: real tensors for cpu, fake ones for a device that is not here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from amp_core import OpPolicy, _torch_dispatch, get_backend
from amp_core.dispatch import activation
from amp_core.dispatch.engine import engine
from amp_core.policy import names, rules

LOW = torch.bfloat16


class Arrived(Exception):
    """What the recorder raises: the op (or its sibling) was called with these arguments."""

    def __init__(self, op: Any, arguments: dict[str, Any]) -> None:
        super().__init__(op.name())
        self.op = op
        self.arguments = arguments


def _recorder(op: Any) -> Callable[..., Any]:
    arguments = _torch_dispatch.arguments(op)

    def record(_keyset: Any, *args: Any, **kwargs: Any) -> None:
        given = {a.name: value for a, value in zip(arguments, args, strict=False)}
        raise Arrived(op, {**given, **kwargs})

    return record


@contextmanager
def _recorded(op: Any, device: str) -> Iterator[None]:
    key = "Autograd" + _torch_dispatch.autocast_key(device).removeprefix("Autocast")
    with ExitStack() as stack:
        for overload in {op, rules.dtype_overload(op) or op}:
            stack.callback(_torch_dispatch.install(overload.name(), key, _recorder(overload)))
        yield


def _tensor(device: str, dtype: torch.dtype) -> torch.Tensor:
    if device == "cpu":
        return torch.ones(2, dtype=dtype)
    with FakeTensorMode():
        return torch.empty(2, dtype=dtype, device=device)


_FILLER = {"int": 0, "SymInt": 0, "bool": False, "float": 1.0, "number": 1, "str": "fro"}


def _value(argument: Any, device: str, dtype: torch.dtype, first: torch.dtype) -> Any:
    kind = str(argument.real_type)
    if kind == "List[Optional[Tensor]]":  # the indices of index_put
        return [torch.zeros(2, dtype=torch.int64)]
    if "Tensor" in kind and not kind.startswith("Optional"):
        tensor = _tensor(device, dtype)
        return [_tensor(device, first), tensor] if kind.startswith("List") else tensor
    if argument.has_default_value():
        return argument.default_value
    if kind.startswith("Optional"):
        return None
    if kind.startswith("List"):
        return [_FILLER[kind[5:-1]]] * 3
    return _FILLER[kind]


def _call(op: Any, device: str, dtypes: tuple[torch.dtype, ...]) -> Arrived | Exception:
    left = list(dtypes)
    args, kwargs = [], {}
    for argument in _torch_dispatch.arguments(op):
        is_tensor = "Tensor" in str(argument.real_type)
        single = is_tensor and not str(argument.real_type).startswith("List")
        dtype = left.pop(0) if single and len(left) > 1 else left[-1]
        value = _value(argument, device, dtype, dtypes[0])
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    try:
        op(*args, **kwargs)
    except Exception as arrived:  # an Arrived, or the op's own refusal
        return arrived
    raise AssertionError(f"{op.name()} returned without passing the Autograd key of {device}")


def _seen(result: Arrived | Exception) -> set[torch.dtype]:
    assert isinstance(result, Arrived), repr(result)
    found = set()
    for value in result.arguments.values():
        for tensor in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                found.add(tensor.dtype)
    return found


def observe_rule(op_name: str, device: str) -> str:
    """Return the rule by which autocast on `device` treats the op, from what its kernel does."""
    op = names.find(op_name)
    torch.set_autocast_dtype(device, LOW)
    torch.set_autocast_enabled(device, True)
    try:
        with _recorded(op, device):
            low = _call(op, device, (LOW,))
            high = _call(op, device, (torch.float32,))
            mixed = _call(op, device, (LOW, torch.float32))
    finally:
        torch.set_autocast_enabled(device, False)
        torch.clear_autocast_cache()
    return _classify(op, low, high, mixed)


def _classify(op: Any, low: Any, high: Any, mixed: Any) -> str:
    if not isinstance(low, Arrived):
        return rules.BANNED
    if low.op is not op:
        assert low.arguments["dtype"] in (torch.float32, 6)
        return rules.FP32_APPEND_DTYPE
    dtype = rules.dtype_argument(op)
    if dtype is not None and low.arguments.get(dtype[1]) in (torch.float32, 6):
        return rules.FP32_SET_OPT_DTYPE
    seen = (*_seen(low), *_seen(high))
    return {
        (LOW, LOW): rules.LOWER_PRECISION_FP,
        (torch.float32, torch.float32): rules.FP32,
        (LOW, torch.float32): rules.PROMOTE if _seen(mixed) == {torch.float32} else rules.UNCHANGED,
    }[seen]


@pytest.fixture
def observe() -> Callable[[str, str], str]:
    return observe_rule


@pytest.fixture
def region() -> Callable[..., Any]:
    """``region(policy)``: autocast under a policy, by the seam that `amp_core.autocast` uses."""

    @contextmanager
    def enter(policy: OpPolicy | None = None, dtype: torch.dtype | None = None) -> Iterator[None]:
        active = activation(get_backend("cpu"), policy)
        with torch.autocast("cpu", dtype):
            if active is not None:
                active.push()
            try:
                yield
            finally:
                if active is not None:
                    active.pop()

    return enter


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Compare the dispatcher's table and the engine's state before and after."""

    def kernels() -> list[list[str]]:
        return [sorted(torch._C._dispatch_dump(op).splitlines()) for op in ("aten::mm", "aten::softmax.int")]

    before = _torch_dispatch.registered("AutocastCPU")
    before_kernels = kernels()
    yield
    assert _torch_dispatch.registered("AutocastCPU") == before
    assert kernels() == before_kernels
    assert engine("cpu").depth == 0
    assert not engine("cpu").installed
    x = torch.ones(2, 2)
    with torch.autocast("cpu"):
        assert torch.mm(x, x).dtype is torch.bfloat16
        assert torch.softmax(x.bfloat16(), -1).dtype is torch.bfloat16
