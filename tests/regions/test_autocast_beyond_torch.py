"""What torch 2.13 gets wrong about regions and amp-core does not; each test shows both sides."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import torch

import amp_core

ONE = torch.ones(2, 2)


def on() -> bool:
    return torch.is_autocast_enabled("cpu")


def dtype() -> torch.dtype:
    return torch.mm(ONE, ONE).dtype


def left_on(run: Callable[[Any], object], cls: Any) -> bool:
    """Run in a thread of its own, so that a leak stays there, and say whether autocast is on after it."""
    seen: list[bool] = []

    def body() -> None:
        run(cls)
        seen.append(on())

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    return seen[0]


def reenter(cls: Any) -> None:
    region = cls("cpu")
    with region, region:
        pass


def recurse(cls: Any) -> None:
    @cls("cpu")
    def down(n: int) -> None:
        if n:
            down(n - 1)

    down(3)


@pytest.mark.parametrize("run", [reenter, recurse])
def test_entering_one_instance_again_leaves_nothing_on(run: Callable[[Any], object]) -> None:
    """Re-entering an instance, or recursing through a decorated function, leaves autocast on for ever."""
    assert left_on(run, torch.autocast)
    assert not left_on(run, amp_core.autocast)


def test_one_decorated_function_in_two_threads() -> None:
    """A function that one thread is in restores that thread's state in another."""

    def state_in_region(cls: Any) -> list[bool]:
        inside, leave, seen = threading.Event(), threading.Event(), []

        @cls("cpu")
        def body(wait: bool) -> None:
            if wait:
                inside.set()
                leave.wait(10)

        def other() -> None:
            body(True)
            seen.append(on())

        thread = threading.Thread(target=other)
        thread.start()
        inside.wait(10)
        with torch.autocast("cpu"):
            body(False)
        leave.set()
        thread.join()
        return seen

    assert state_in_region(torch.autocast) == [True]  # a thread that was never in a region
    assert state_in_region(amp_core.autocast) == [False]


def test_decorated_generator() -> None:
    """The body of a decorated generator runs in float32."""

    def run(cls: Any) -> list[Any]:
        @cls("cpu")
        def body() -> Iterator[Any]:
            got = yield dtype()
            yield got, dtype()

        generator = body()
        first = next(generator)
        assert not on()
        return [first, generator.send("sent")]

    assert run(torch.autocast) == [torch.float32, ("sent", torch.float32)]
    assert run(amp_core.autocast) == [torch.bfloat16, ("sent", torch.bfloat16)]


def test_decorated_generator_passes_errors_and_close_through() -> None:
    """throw() and close() do not reach the body, or its return value is lost."""
    seen = []

    @amp_core.autocast("cpu")
    def body() -> Iterator[Any]:
        try:
            yield 1
        except KeyError:
            seen.append(dtype())
        try:
            yield 2
        finally:
            seen.append("closed")

    generator = body()
    assert next(generator) == 1
    assert generator.throw(KeyError("x")) == 2
    generator.close()
    assert seen == [torch.bfloat16, "closed"]

    @amp_core.autocast("cpu")
    def returns() -> Any:
        yield 1
        return "result"

    def outer() -> Any:
        assert (yield from returns()) == "result"

    assert list(outer()) == [1]


def test_decorated_coroutine() -> None:
    """A decorated coroutine runs in float32, or leaks its region into other tasks while it waits."""

    async def main(cls: Any) -> list[Any]:
        @cls("cpu")
        async def body() -> list[Any]:
            before = dtype()
            await asyncio.sleep(0)
            return [before, dtype()]

        task = asyncio.create_task(body())
        await asyncio.sleep(0)
        assert not on()
        return await task

    assert asyncio.run(main(torch.autocast)) == [torch.float32] * 2
    assert asyncio.run(main(amp_core.autocast)) == [torch.bfloat16] * 2


def test_decorated_async_generator() -> None:
    """A decorated async generator runs in float32, or leaks to who iterates it."""

    async def main(cls: Any) -> list[Any]:
        @cls("cpu")
        async def body() -> AsyncIterator[Any]:
            for _ in range(2):
                await asyncio.sleep(0)
                yield dtype()

        return [(item, on()) async for item in body()]

    assert asyncio.run(main(torch.autocast)) == [(torch.float32, False)] * 2
    assert asyncio.run(main(amp_core.autocast)) == [(torch.bfloat16, False)] * 2


def test_regions_left_in_another_order_than_entered() -> None:
    """Two generators that are closed in the wrong order leave autocast on."""

    def run(cls: Any) -> None:
        def body() -> Iterator[None]:
            with cls("cpu"):
                yield

        first, second = body(), body()
        next(first)
        next(second)
        first.close()
        if cls is amp_core.autocast:
            assert on()  # the second is still inside
        second.close()

    assert left_on(run, torch.autocast)
    assert not left_on(run, amp_core.autocast)


def test_leaving_without_entering_says_so() -> None:
    """The error is an AttributeError on a private name."""

    def leave(cls: Any) -> None:
        with pytest.raises(AttributeError):
            cls("cpu").__exit__(None, None, None)

    left_on(leave, torch.autocast)
    with pytest.raises(RuntimeError, match="left without having been entered in this thread"):
        amp_core.autocast("cpu").__exit__(None, None, None)


TWO_DTYPES_OVER_ONE_WEIGHT = """
import torch
layer, x = torch.nn.Linear(4, 4), torch.ones(2, 4)
def run(region):
    with region("cpu", dtype=torch.bfloat16):
        outer = layer(x).dtype
        with region("cpu", dtype=torch.float16):
            inner = layer(x).dtype
        return [outer, inner, layer(x).dtype]
try:
    run(torch.autocast)
except RuntimeError as error:
    assert "dtype" in str(error), error
else:
    raise AssertionError("torch has learnt it: amend docs/reference/differences.md")
import amp_core
wanted = [torch.bfloat16, torch.float16, torch.bfloat16]
assert run(amp_core.autocast) == wanted
with amp_core.record():  # its kernels keep the casts, for regions of torch, too
    assert run(torch.autocast) == run(amp_core.autocast) == wanted
"""


def test_two_dtypes_over_one_weight() -> None:
    """A float16 region inside a bfloat16 one is given the bfloat16 cast of the weight, and fails."""
    # In a process of its own: kernels that other tests have installed stay.
    subprocess.run([sys.executable, "-c", TWO_DTYPES_OVER_ONE_WEIGHT], check=True, timeout=120)


def test_an_optimizer_step_inside_a_region_is_seen() -> None:
    """A training loop inside one region goes on with the weights of its first step."""
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(4, 1), torch.ones(8, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
    seen = []
    with amp_core.autocast("cpu"):
        for _ in range(3):
            optimizer.zero_grad()
            loss = layer(x).float().square().mean()
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
    assert seen[0] > seen[1] > seen[2]


def test_an_error_in_compiled_code_does_not_outlive_the_region_around_it() -> None:
    """An exception in a compiled region leaves the nesting count up, autocast on, or casts of old weights."""

    @torch.library.custom_op("amp_core_tests::explode", mutates_args=())
    def explode(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("boom")

    @explode.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    def run(cls: Any) -> None:
        @torch.compile(backend="eager", fullgraph=True)
        def compiled(x: torch.Tensor) -> torch.Tensor:
            with cls("cpu", dtype=torch.float16):
                return explode(torch.mm(x, x))

        weight = torch.nn.Parameter(ONE.clone())
        with cls("cpu", dtype=torch.bfloat16):
            torch.mm(ONE, weight)
            with pytest.raises(ValueError, match="boom"):
                compiled(ONE)
        depth = torch.autocast_increment_nesting()
        torch.autocast_decrement_nesting()
        with torch.no_grad():
            weight.zero_()
        with cls("cpu", dtype=torch.bfloat16):
            found.append((depth, bool(torch.mm(ONE, weight).any())))

    found: list[tuple[int, bool]] = []
    left_on(run, torch.autocast)
    left_on(run, amp_core.autocast)
    assert found[0][0] > 1
    assert found == [(found[0][0], True), (1, False)]


def test_disable_without_naming_a_device() -> None:
    """A block that must run in float32 has to know which devices are in mixed precision."""
    with amp_core.autocast("cpu"), torch.autocast("xpu"):
        with amp_core.disable():
            assert dtype() is torch.float32
            assert not torch.is_autocast_enabled("xpu")
        assert dtype() is torch.bfloat16
        assert amp_core.disable()(dtype)() is torch.float32
        assert torch.is_autocast_enabled("xpu")


def test_a_rule_of_torch_library_loses_the_write_but_a_policy_keeps_it() -> None:
    """The table of differences says so of the plain region; a policy is the way out."""

    @torch.library.custom_op("amp_region_test::add_two_", mutates_args=("x",))
    def add_two_(x: torch.Tensor) -> None:
        x.add_(2)

    torch.library.register_autocast("amp_region_test::add_two_", "cpu", torch.bfloat16)
    ruled = amp_core.OpPolicy.default("cpu").override({add_two_: "lower_precision_fp"})
    policies = {"plain": None, "rule": ruled}
    results = {}
    for name, policy in policies.items():
        x = torch.zeros(1)
        with amp_core.autocast("cpu", policy=policy):
            add_two_(x)
        results[name] = x.item()
    assert results == {"plain": 0, "rule": 2}
