"""Ops between a tensor and a number under rules that cast neither, against torch without them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from amp_core import OpPolicy, autocast, record

from ..drawn import programs

Call = Callable[[Any, Any], Any]
CALLS: dict[str, Call] = {
    name: getattr(operator, name)
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and_", "lshift", "gt", "eq")
} | {
    "fmod": torch.fmod,
    "xlogy": torch.xlogy,
    "floor": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "add_": lambda a, b: a.clone().add_(b),
    "mul_": lambda a, b: a.clone().mul_(b),
    "sub_": lambda a, b: a.clone().sub_(b),
    "div_": lambda a, b: a.clone().div_(b),
    "masked_fill": lambda a, b: a.masked_fill(a > 0, b),
    "clamp": lambda a, b: a.clamp(b),
    "where": lambda a, b: torch.where(a > 0, a, b),
}
OPS = """
__and__ __lshift__ add add_ bitwise_and bitwise_left_shift clamp div div_ eq floor_divide fmod gt masked_fill
mul mul_ pow remainder rsub sub sub_ where xlogy
"""
POLICIES = {
    "promote_types": OpPolicy("cpu").override(dict.fromkeys(OPS.split(), "promote_types")),
    "fp32_if_mixed": OpPolicy("cpu").override(dict.fromkeys(OPS.split(), "fp32_if_mixed")),
    "unchanged": OpPolicy("cpu").override(dict.fromkeys(OPS.split(), "unchanged")),
}
NUMBERS = (0, 1, 2, -1, 300, True, False, 0.0, 1.5, -2.5, 1j)
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64)


def recorded(call: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def run(tensor: Tensor) -> Any:
        with record():
            return call(tensor)

    return run


WAYS: dict[str, Callable[[Callable[[Any], Any]], Callable[[Any], Any]]] = {
    "plain": lambda call: call,
    "vmap": torch.func.vmap,
    "functionalize": torch.func.functionalize,
    "record": recorded,
}


def outcome(call: Callable[[Any], Any], tensor: Tensor, *, text: bool = True) -> Any:
    try:
        result = call(tensor)
    except (RuntimeError, TypeError) as error:
        return type(error), text and str(error).partition("\n")[0]
    return result.dtype, result.shape, result.tolist()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("rule", POLICIES)
@pytest.mark.parametrize("way", WAYS)
def test_what_torch_refuses(rule: str, way: str) -> None:
    """A division of whole numbers by 0 gives NaN and inf in place of an error, or a bool is subtracted."""
    whole, fractions = torch.arange(6).view(2, 3), torch.ones(2, 3)
    for tensor, name, number in [(whole, "floordiv", 0), (fractions, "sub", True), (whole, "floor", 0)]:
        wanted = outcome(WAYS[way](lambda t: CALLS[name](t, number)), tensor)  # noqa: B023 - called at once
        with autocast("cpu", policy=POLICIES[rule]):
            got = outcome(WAYS[way](lambda t: CALLS[name](t, number)), tensor)  # noqa: B023
        assert issubclass(wanted[0], RuntimeError)
        assert got == wanted


@pytest.mark.filterwarnings("ignore")
def test_numbers_by_chance() -> None:
    """A number is taken for another kind of number, so that a result or an error is not torch's."""
    compared: set[str] = set()
    for choose in programs(5.0, number="numbers"):
        name, number, rule = choose.choice([*CALLS]), choose.choice(NUMBERS), choose.choice([*POLICIES])
        way = choose.choice([*WAYS])
        shape = choose.choice([(2, 3), (3,), (3, 0)])
        tensor = torch.tensor([choose.choice([0, 1, 2, 3]) for _ in range(6)])
        tensor = tensor[: torch.Size(shape).numel()].reshape(shape).to(choose.choice(DTYPES))
        left = choose.random() < 0.3 and name in vars(operator)

        def call(tensor: Tensor, of: Call = CALLS[name], number: Any = number, left: bool = left) -> Any:
            return of(number, tensor) if left else of(tensor, number)

        text = way in ("plain", "record")  # transforms name other dtypes in some
        wanted = outcome(WAYS[way](call), tensor, text=text)
        with autocast("cpu", policy=POLICIES[rule]):
            got = outcome(WAYS[way](call), tensor, text=text)
        case = (name, number, rule, way, tensor, left, wanted, got)
        assert str(got) == str(wanted), case  # NaN is not equal to itself
        compared.add(name)
    assert len(compared) > 10
