"""`checkpoint_contexts`: repeated forward passes compute as the first one did."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

import amp_core
from amp_core import OpPolicy, autocast, checkpoint_contexts

POLICY = OpPolicy.default("cpu")
EXACT = POLICY.override({"tanh": "fp32", "exp": "lower_precision_fp"})
COARSE = POLICY.override({"linear": "recipe mxfp8"})
XPU = OpPolicy.default("xpu").override({"tanh": "fp32"})
again = functools.partial(checkpoint, use_reentrant=False, context_fn=checkpoint_contexts)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)).exp())


class Stack(nn.Module):
    """Blocks of which each is repeated, as `call` does."""

    def __init__(self, call: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.call(block, x)
        return x


def directly(block: Any, x: Tensor) -> Tensor:
    return block(x)


def within_another(block: Any, x: Tensor) -> Tensor:
    return again(lambda x: again(block, x), x)


def wrapped(block: Any, x: Tensor) -> Tensor:
    return checkpoint_wrapper(block, context_fn=checkpoint_contexts)(x)


def nothing(_: nn.Module) -> AbstractContextManager[Any]:
    return nullcontext()


def with_rules(model: nn.Module) -> AbstractContextManager[Any]:
    return amp_core.apply_policy(model, {"blocks.0.down": "fp32", "blocks.1": {"tanh": "fp32"}})


exact = functools.partial(autocast, "cpu", policy=EXACT)
coarse = functools.partial(autocast, "cpu", policy=COARSE)
plain = functools.partial(autocast, "cpu")
CASES: dict[str, tuple[Callable[[nn.Module], AbstractContextManager[Any]], list[Callable[[], Any]]]] = {
    "no region": (nothing, []),
    "plain": (nothing, [plain]),
    "rules": (nothing, [exact]),
    "recipe": (nothing, [coarse]),
    "float16": (nothing, [functools.partial(exact, dtype=torch.float16)]),
    "no cache": (nothing, [functools.partial(exact, cache_enabled=False)]),
    "float32": (nothing, [plain, functools.partial(plain, dtype=torch.float32)]),
    "disabled inside": (nothing, [exact, amp_core.disable]),
    "inside another": (nothing, [coarse, exact]),
    "two devices": (nothing, [functools.partial(autocast, "xpu", policy=XPU), exact]),
    "rules of modules": (with_rules, [plain]),
    "rules of both": (with_rules, [exact]),
    "cached casts": (amp_core.cached_casts, [exact]),
}
"""What holds for the whole step, and the regions of its forward pass."""


def here(run: Callable[[], None]) -> None:
    run()


def in_a_region(run: Callable[[], None]) -> None:
    with autocast("cpu", dtype=torch.float16, policy=COARSE):
        run()


def in_a_thread(run: Callable[[], None]) -> None:
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def results(call: Any, case: str, backward: Any = here, *, compiler: Any = None, times: int = 1) -> list[Any]:
    """Return loss and gradients of a step whose backward pass runs outside of the forward's regions."""
    around, regions = CASES[case]
    model, x = Stack(call), torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()
    run = torch.compile(model, backend=compiler) if compiler else model
    with around(model):
        with ExitStack() as entered:
            for region in regions:
                entered.enter_context(region())
            loss = run(x).float().square().sum()
        for _ in range(times):
            backward(lambda: loss.backward(retain_graph=True))
    return [loss.detach(), x.grad, *(p.grad for p in model.parameters())]


def same(got: list[Any], wanted: list[Any]) -> bool:
    return len(got) == len(wanted) and all(map(torch.equal, got, wanted))


pytestmark = [
    pytest.mark.filterwarnings("ignore::amp_core.EmulationWarning"),
    pytest.mark.filterwarnings("ignore:In CPU autocast, but the target dtype"),  # torch's restored float32
    pytest.mark.filterwarnings("ignore:.*but XPU is not available"),
]


@pytest.mark.parametrize("backward", [here, in_a_region, in_a_thread])
@pytest.mark.parametrize("call", [again, within_another, wrapped])
@pytest.mark.parametrize("case", CASES)
def test_a_repeated_forward_has_the_regions_of_the_first(case: str, call: Any, backward: Any) -> None:
    """The repeated pass computes by torch's own rules: torch raises an error, or gradients are others."""
    assert same(results(call, case, backward), results(directly, case, backward))


@pytest.mark.parametrize("case", ["rules", "rules of both"])
def test_a_graph_may_run_backward_again(case: str) -> None:
    """The contexts serve one repetition, and the next one fails, or has no policy."""
    assert same(results(again, case, times=3), results(directly, case, times=3))


def test_the_state_after_the_backward_pass_is_that_before() -> None:
    """Regions of the repeated pass stay in force in the thread that ran it."""
    for region in (exact, plain):
        with region():
            y = Stack(again)(torch.ones(2, 8)).sum()
        y.backward()
        assert not torch.is_autocast_enabled("cpu")
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32


def test_an_error_of_the_repeated_pass_ends_its_regions() -> None:
    """A block that raises when it is repeated leaves the thread in a region."""
    calls: list[Tensor] = []

    def block(x: Tensor) -> Tensor:
        calls.append(x)
        if len(calls) > 1:
            raise KeyError("on purpose")
        return torch.tanh(x @ x)

    with exact():
        loss = again(block, torch.ones(4, 4, requires_grad=True)).sum()
    with pytest.raises(KeyError):
        loss.backward()
    assert not torch.is_autocast_enabled("cpu")
    with plain():
        assert torch.ones(2, 2, dtype=torch.bfloat16).tanh().dtype is torch.bfloat16


@pytest.mark.parametrize("compiler", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("case", ["plain", "rules", "rules of modules"])
def test_compiled_models(case: str, compiler: str) -> None:
    """torch.compile refuses the contexts, or its graph repeats ops in other dtypes."""
    got = results(again, case, compiler=compiler)
    wanted = results(again if compiler == "inductor" else directly, case)
    if compiler == "inductor":  # it may fuse
        torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-2)
    else:
        assert same(got, wanted)


def test_a_compiled_backward_repeats_the_ops() -> None:
    """The graph keeps the activations, and the memory that checkpoints save is lost."""
    tanhs: list[int] = []

    def count(graph: torch.fx.GraphModule, _: Any) -> Any:
        tanhs.append(sum(n.target is torch.ops.aten.tanh.default for n in graph.graph.nodes))
        return make_boxed_func(graph.forward)

    torch.compiler.reset()
    compiler = aot_autograd(
        fw_compiler=count, bw_compiler=count, partition_fn=min_cut_rematerialization_partition
    )
    results(again, "rules", compiler=compiler)
    assert tanhs == [2, 2]


@pytest.mark.parametrize("strict", [False, True])
def test_exported_models(strict: bool) -> None:
    """torch.export refuses a model that has checkpoints with the contexts."""
    x = torch.linspace(-1, 1, 32).view(4, 8)
    program = torch.export.export(Stack(again), (x,), strict=strict).module()
    assert torch.equal(program(x), Stack(directly)(x))


def test_materialized_models() -> None:
    """A model with checkpoints cannot be written out with the casts of its region."""
    x = torch.linspace(-1, 1, 32).view(4, 8)
    model = amp_core.materialize(Stack(again).eval(), (x,), policy=EXACT)
    with exact(), torch.no_grad():
        assert torch.equal(model(x), Stack(directly)(x))
