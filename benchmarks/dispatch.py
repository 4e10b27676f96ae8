"""What an op costs under a policy; `ours` less `theirs` is what the policy adds to one call."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.nn import functional

import amp_core
from amp_core._torch.op_kernels import dispatch_key, install, set_excluded
from benchmarks.ab import Ratio, compare

_CALLS = 2000
Op = Callable[[], torch.Tensor]


def run() -> Iterator[Ratio]:
    """Compare ops that no policy changes, then changed ones with the same casts written by hand.

    The limit is what the least kernel in Python takes in place of the rule's. On one thread: ops on 8x8 are
    as long as it takes to wake another.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield from _unchanged()
        yield from _changed()
        yield from _limits()
    finally:
        torch.set_num_threads(threads)


def _unchanged() -> Iterator[Ratio]:
    x, w = torch.randn(8, 8), torch.randn(8, 8)
    ops: dict[str, Op] = {
        "mm": lambda: torch.mm(x, w),
        "linear": lambda: functional.linear(x, w),
        "softmax": lambda: torch.softmax(x, -1),
        "add": lambda: x + w,
    }
    other = amp_core.OpPolicy.default("cpu").override({"layer_norm": "lower_precision_fp"})
    for name, op in ops.items():
        for policy, text in ((None, "native policy"), (other, "another op overridden")):
            ours = _inside(amp_core.autocast("cpu", policy=policy), op)
            yield _row(f"{name} 8x8, {text}", _inside(torch.autocast("cpu"), op), ours)


def _changed() -> Iterator[Ratio]:
    x, w = torch.randn(8, 8), torch.randn(8, 8)
    low, norm = x.bfloat16(), torch.ones(8)
    ones = norm.bfloat16()
    by_hand: dict[tuple[str, str], tuple[Op, Op]] = {
        ("mm", "fp32"): (lambda: torch.mm(x, w), lambda: torch.mm(x, w)),
        ("linear", "fp32"): (lambda: functional.linear(x, w), lambda: functional.linear(x, w)),
        ("softmax", "lower_precision_fp"): (
            lambda: torch.softmax(x, -1),
            lambda: torch.softmax(x.bfloat16(), -1),
        ),
        ("softmax", "fp32"): (lambda: torch.softmax(low, -1), lambda: torch.softmax(low.float(), -1)),
        ("softmax", "fp32_set_opt_dtype"): (
            lambda: torch.softmax(low, -1),
            lambda: torch.softmax(low, -1, dtype=torch.float32),
        ),
        ("layer_norm", "fp32"): (
            lambda: functional.layer_norm(low, (8,), ones, ones),
            lambda: functional.layer_norm(low.float(), (8,), ones.float(), ones.float()),
        ),
        ("add", "promote_types"): (lambda: low + x, lambda: low.float() + x),
        ("cat", "promote"): (lambda: torch.cat([low, x]), lambda: torch.cat([low.float(), x])),
    }
    for (name, rule), (op, hand) in by_hand.items():
        policy = amp_core.OpPolicy.default("cpu").override({name: rule})
        disabled = _inside(torch.autocast("cpu", enabled=False), hand)
        yield _row(f"{name} 8x8 by {rule}", disabled, _inside(amp_core.autocast("cpu", policy=policy), op))


def _limits() -> Iterator[Ratio]:
    x, low = torch.randn(8, 8), torch.randn(8, 8).bfloat16()
    key = dispatch_key("AutocastCPU")

    def softmax(_: object, of: torch.Tensor, *rest: int | torch.dtype | None) -> torch.Tensor:
        set_excluded(key, True)
        result = torch.softmax(of.float(), *rest)
        set_excluded(key, False)
        return result

    def add(_: object, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        set_excluded(key, True)
        result = torch.add(one.float(), other.float())
        set_excluded(key, False)
        return result

    kernels: dict[str, tuple[str, Callable[..., torch.Tensor], Op, Op]] = {
        "softmax 8x8 by fp32": (
            "aten::softmax.int",
            softmax,
            lambda: torch.softmax(low, -1),
            lambda: torch.softmax(low.float(), -1),
        ),
        "add 8x8 by promote_types": ("aten::add.Tensor", add, lambda: low + x, lambda: low.float() + x),
    }
    for name, (op_name, kernel, op, hand) in kernels.items():
        disabled = _inside(torch.autocast("cpu", enabled=False), hand)
        remove = install(op_name, "AutocastCPU", kernel)
        try:
            yield _row(f"{name}: limit", disabled, _inside(torch.autocast("cpu"), op))
        finally:
            remove()


def _row(name: str, theirs: Callable[[], None], ours: Callable[[], None]) -> Ratio:
    found = compare(name, theirs, ours)
    return Ratio(name, found.theirs / _CALLS, found.ours / _CALLS, found.ratio)


def _inside(region: torch.autocast, op: Op) -> Callable[[], None]:
    def run() -> None:
        with region:
            for _ in range(_CALLS):
                op()

    return run
