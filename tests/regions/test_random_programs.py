"""Random programs of regions, policies, breaks and exceptions, against a model of what each op must give."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import amp_core
from amp_core.dispatch.activate import pushed

from ..drawn import programs

X = torch.eye(2)
HALF = X.half()
POLICIES = {
    None: None,
    "exact": amp_core.OpPolicy.default("cpu").override({"mm": "fp32"}),
    "as given": amp_core.OpPolicy.default("cpu").override({"mm": "unchanged"}),
}
RULE = {None: "lower_precision_fp", "exact": "fp32", "as given": "unchanged"}
DTYPES = (None, torch.bfloat16, torch.float16, torch.float32)


Node = tuple[Any, ...]


class State(NamedTuple):
    """The autocast state that the model tracks."""

    enabled: bool = False
    dtype: torch.dtype = torch.bfloat16
    policy: str | None = None

    def result(self, given: torch.dtype) -> torch.dtype:
        """Return the dtype of ``mm`` of tensors of dtype `given`."""
        if not self.enabled:
            return given
        return {"lower_precision_fp": self.dtype, "fp32": torch.float32, "unchanged": given}[
            RULE[self.policy]
        ]

    def inside(self, dtype: torch.dtype | None, enabled: bool, policy: str | None) -> State:
        """Return the state inside a region."""
        kept = self.policy if policy is None or not enabled else policy
        return State(enabled, self.dtype if dtype is None else dtype, kept)


def random_block(choose: random.Random, depth: int, breaks: bool) -> tuple[Node, ...]:
    kinds = (
        ["op", "op", "half"] + ["region", "raise", "disable", "decorated"] * (depth > 0) + ["break"] * breaks
    )
    block = []
    for _ in range(choose.randint(1, 3)):
        kind = choose.choice(kinds)
        if kind in ("op", "half", "break"):
            block.append((kind,))
            continue
        body = random_block(choose, depth - 1, breaks)
        region = (choose.choice(DTYPES), choose.random() < 0.8, choose.choice(list(POLICIES)))
        block.append((kind, region, body))
    return tuple(block)


def expected(block: tuple[Node, ...], state: State) -> list[torch.dtype]:
    dtypes: list[torch.dtype] = []
    for node in block:
        if node[0] == "op":
            dtypes.append(state.result(torch.float32))
        elif node[0] == "half":
            dtypes.append(state.result(torch.float16))
        elif node[0] == "disable":
            dtypes += expected(node[2], state._replace(enabled=False))
        elif node[0] != "break":
            dtypes += expected(node[2], state.inside(*node[1]))
    return dtypes


class PlannedError(Exception):
    """What a program raises inside a region and catches outside of it."""


def run(block: tuple[Node, ...], x: torch.Tensor, half: torch.Tensor, results: list[torch.Tensor]) -> None:
    for node in block:
        kind = node[0]
        if kind == "op":
            results.append(torch.mm(x, x))
        elif kind == "half":
            results.append(torch.mm(half, half))
        elif kind == "break":
            torch._dynamo.graph_break()
        elif kind == "disable":
            with amp_core.disable():
                run(node[2], x, half, results)
        else:
            run_region(kind, node, x, half, results)


def run_region(
    kind: str, node: Node, x: torch.Tensor, half: torch.Tensor, results: list[torch.Tensor]
) -> None:
    dtype, enabled, policy = node[1]
    region = amp_core.autocast("cpu", dtype=dtype, enabled=enabled, policy=POLICIES[policy])
    if kind == "region":
        with region:
            run(node[2], x, half, results)
    elif kind == "decorated":
        region(run)(node[2], x, half, results)
    else:
        try:
            with region:
                run(node[2], x, half, results)
                raise PlannedError
        except PlannedError:
            pass


def dtypes_of(block: tuple[Node, ...], call: Callable[..., Any] = run) -> list[torch.dtype]:
    results: list[torch.Tensor] = []
    call(block, X, HALF, results)
    return [result.dtype for result in results]


def check_eager(seed: int, seconds: float, failures: list[Any]) -> int:
    """Run programs until the time is over; return how many."""
    count = 0
    for choose in programs(seconds, number=seed):
        count += 1
        block = random_block(choose, 4, breaks=False)
        if dtypes_of(block) != expected(block, State()):
            failures.append(block)
        if failures:
            break
    return count


def test_eager_programs() -> None:
    """Some nesting of regions, policies, disable and exceptions runs an op in a wrong dtype."""
    failures: list[Any] = []
    assert check_eager(0, 4.0, failures) > 50
    assert not failures


def test_regions_left_in_any_order() -> None:
    """A region that is left before a later one takes the policy or dtype of the later one with it."""
    count = 0
    for choose in programs(4.0):
        count += 1
        entered: list[tuple[Any, State]] = []
        for _ in range(choose.randint(2, 12)):
            if entered and choose.random() < 0.5:
                region, _ = entered.pop(choose.randrange(len(entered)))
                region.__exit__(None, None, None)
            else:
                policy = choose.choice(["exact", "as given"])
                settings = choose.choice(DTYPES[1:]), choose.random() < 0.8, policy
                region = amp_core.autocast("cpu", settings[0], settings[1], policy=POLICIES[policy])
                region.__enter__()
                below = entered[-1][1] if entered else State()
                entered.append((region, below.inside(*settings)))
            state = entered[-1][1] if entered else State()
            if all(each.enabled for _, each in entered):  # a disabled region pushes no policy
                assert torch.mm(HALF, HALF).dtype is state.result(torch.float16)
            assert torch.is_autocast_enabled("cpu") is state.enabled
        while entered:
            entered.pop(choose.randrange(len(entered)))[0].__exit__(None, None, None)
        assert (torch.is_autocast_enabled("cpu"), pushed()) == (False, 0)
    assert count > 50


def test_programs_in_threads() -> None:
    """A region or policy of one thread reaches the ops of another."""
    failures: list[Any] = []
    threads = [threading.Thread(target=check_eager, args=(seed, 4.0, failures)) for seed in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_compiled_programs_with_breaks(backend: str) -> None:
    """A graph break, or a compiled exception, loses a region or a policy, or keeps one too long."""
    count = 0
    for choose in programs(12.0, 60, backend):
        count += 1
        block = random_block(choose, 3, breaks=True)

        def program(
            x: torch.Tensor, half: torch.Tensor, block: tuple[Node, ...] = block
        ) -> list[torch.Tensor]:
            results: list[torch.Tensor] = []
            run(block, x, half, results)
            return results

        torch._dynamo.reset()
        compiled = torch.compile(program, backend=backend)
        for _ in range(2):
            assert [r.dtype for r in compiled(X, HALF)] == expected(block, State()), block
        assert not torch.is_autocast_enabled("cpu")
    assert count > 3
