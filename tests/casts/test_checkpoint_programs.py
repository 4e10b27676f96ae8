"""Random models whose blocks are checkpointed in each way: gradients are those without a checkpoint."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from amp_core import (
    OpPolicy,
    Recipe,
    apply_policy,
    autocast,
    cached_casts,
    custom_bwd,
    custom_fwd,
    delayed_scales,
    master_weights,
)

from ..drawn import programs

DEFAULT = OpPolicy.default("cpu")
POLICIES = {
    "none": None,
    "low": DEFAULT.override({"softmax": "lower_precision_fp", "layer_norm": "lower_precision_fp"}),
    "exact": DEFAULT.override({"linear": "fp32", "matmul": "lower_precision_fp"}),
    "recipe": DEFAULT.override({"linear": Recipe.mxfp8()}),
    "delayed": DEFAULT.override({"linear": Recipe.fp8_delayed(history=4)}),
    "uniform": OpPolicy.uniform("cpu"),
}
SCOPES = {"cached": cached_casts, "master": master_weights}
REGIONS: tuple[dict[str, Any], ...] = (
    {"enabled": False},
    {"dtype": torch.float32},
    {"dtype": torch.float16},
    {"policy": POLICIES["low"]},
    {"policy": POLICIES["exact"]},
    {"cache_enabled": False},
)
OPS = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._softmax.default,
    torch.ops.aten.native_layer_norm.default,
    torch.ops.aten._to_copy.default,
]
SELECTIVE = ("by rule", "by list", "nested by rule")
X = 4, 6


def product(cast_inputs: torch.dtype | None) -> type[torch.autograd.Function]:
    class Product(torch.autograd.Function):
        @staticmethod
        @custom_fwd(device_type="cpu", cast_inputs=cast_inputs)
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            return x.mm(weight)

        @staticmethod
        @custom_bwd(device_type="cpu")
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
            x, weight = ctx.saved_tensors
            return grad.mm(weight.t()).to(x.dtype), x.t().mm(grad.to(x.dtype)).to(weight.dtype)

    return Product


PRODUCTS = [product(cast_inputs) for cast_inputs in (None, torch.float32, torch.bfloat16)]


class Part(nn.Module):
    """One op, with a weight of its own."""

    def __init__(self, kind: str, detail: int) -> None:
        super().__init__()
        self.kind, self.detail = kind, detail
        self.inner = nn.LayerNorm(6) if kind == "norm" else nn.Linear(6, 6)
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self, self.kind)(x)  # type: ignore[no-any-return]

    def linear(self, x: Tensor) -> Tensor:
        return self.inner(x)  # type: ignore[no-any-return]

    norm = linear

    def twice(self, x: Tensor) -> Tensor:
        return self.inner(torch.relu(self.inner(x)))  # type: ignore[no-any-return]

    def mm(self, x: Tensor) -> Tensor:
        return x.float() @ self.weight

    def custom(self, x: Tensor) -> Tensor:
        return PRODUCTS[self.detail % 3].apply(x.float(), self.weight)  # type: ignore[no-any-return]

    def region(self, x: Tensor) -> Tensor:
        with autocast("cpu", **REGIONS[self.detail]):
            return self.inner(x.float())  # type: ignore[no-any-return]

    def softmax(self, x: Tensor) -> Tensor:
        return torch.softmax(x, -1)

    def dropout(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.5)

    def mixed(self, x: Tensor) -> Tensor:
        return torch.relu(x) + torch.sigmoid(x.float())

    def created(self, x: Tensor) -> Tensor:
        return x * (torch.zeros(6) + 1)


KINDS = ["linear", "norm", "mm", "custom", "region", "softmax", "dropout", "mixed", "created", "twice"]
HOWS = ["none", "plain", "reentrant", "nested", *SELECTIVE, *SELECTIVE]


def block(draw: random.Random) -> dict[str, Any]:
    parts = [(draw.choice(KINDS), draw.randrange(len(REGIONS))) for _ in range(draw.randint(1, 5))]
    return {
        "parts": parts,
        "how": draw.choice(HOWS),
        "number": draw.random(),
        "early_stop": draw.random() < 0.5,
        "determinism_check": draw.choice(["default", "none"]),
        "rules": draw.choice([None, None, "fp32", {"linear": "fp32"}, {"softmax": "fp32"}]),
        "split": draw.randint(0, len(parts)),
    }


def program(draw: random.Random) -> dict[str, Any]:
    drawn: dict[str, Any] = {
        "blocks": [block(draw) for _ in range(draw.randint(1, 3))],
        "policy": draw.choice([*POLICIES]),
        "dtype": draw.choice([torch.bfloat16, torch.float16]),
        "scope": draw.choice([None, *SCOPES]),
        "small": draw.choice([0, 2**22]),
        "cache": draw.choice([None, None, False]),
        "inside": draw.random() < 0.3,
        "steps": draw.choice([1, 2, 3]),
        "micro_batches": draw.choice([1, 1, 2]),
        "frozen": draw.random() < 0.2,
        "seed": draw.randrange(1000),
    }
    hows = {each["how"] for each in drawn["blocks"]}
    # As torch has it: nothing gives a reentrant checkpoint the policy, and a repeated block casts anew.
    drawn["inside"] |= "reentrant" in hows and drawn["policy"] != "none"
    drawn["cache"] = False if drawn["inside"] and hows & {*SELECTIVE} else drawn["cache"]
    for each in drawn["blocks"]:
        anew = each["how"] in SELECTIVE and (drawn["scope"] or drawn["policy"] != "none")
        if anew or (
            drawn["scope"] and drawn["cache"] is False
        ):  # the uses of a weight may share a cast or not
            each["parts"] = [("mm" if kind == "twice" else kind, detail) for kind, detail in each["parts"]]
    return drawn


def choose(number: float, _ctx: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    of_dropout = str(op).startswith(
        ("aten.empty", "aten.bernoulli", "aten.div_")
    )  # it writes to what is saved
    chosen = random.Random(f"{number} {op}").choice([*CheckpointPolicy])
    return CheckpointPolicy.MUST_RECOMPUTE if of_dropout else chosen


Region = Callable[[], AbstractContextManager[Any]]


@contextmanager
def both(region: Region, context: AbstractContextManager[Any]) -> Iterator[None]:
    with region(), context:
        yield


def run(module: nn.Sequential, x: Tensor, drawn: dict[str, Any], region: Region) -> Tensor:
    """Call `module` under the checkpoint that was drawn for it."""
    how, split = drawn["how"], drawn["split"]
    if how == "none":
        return module(x)  # type: ignore[no-any-return]
    if how == "reentrant":
        return checkpoint(module, x, use_reentrant=True)  # type: ignore[no-any-return]
    ops = random.Random(drawn["number"]).sample(OPS, 3) if how == "by list" else None
    rule = ops or functools.partial(choose, drawn["number"])

    def contexts(selective: bool) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        first, again = (
            create_selective_checkpoint_contexts(rule) if selective else (nullcontext(), nullcontext())
        )
        return first, both(region, again)

    def checkpointed(function: Callable[[Tensor], Tensor], x: Tensor, selective: bool) -> Tensor:
        return checkpoint(  # type: ignore[no-any-return]
            function,
            x,
            use_reentrant=False,
            context_fn=functools.partial(contexts, selective),
            determinism_check=drawn["determinism_check"],
            early_stop=drawn["early_stop"],
        )

    def nested(x: Tensor) -> Tensor:
        return module[split:](checkpointed(module[:split], x, False))  # type: ignore[no-any-return]

    return checkpointed(nested if how.startswith("nested") else module, x, how in SELECTIVE)


def results(drawn: dict[str, Any], checkpoints: bool) -> list[Tensor | None]:
    """Return what a training computes: outputs, gradients, weights and the state of random numbers."""
    torch.manual_seed(drawn["seed"])
    net = nn.ModuleList(nn.Sequential(*[Part(*part) for part in each["parts"]]) for each in drawn["blocks"])
    net[0].requires_grad_(not drawn["frozen"])
    region = functools.partial(
        autocast, "cpu", drawn["dtype"], True, drawn["cache"], POLICIES[drawn["policy"]]
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    seen: list[Tensor | None] = []
    with ExitStack() as stack:
        for each, module in zip(drawn["blocks"], net, strict=True):
            if each["rules"] is not None:
                stack.enter_context(apply_policy(module, {"0": each["rules"]}))
        if drawn["scope"]:
            stack.enter_context(SCOPES[drawn["scope"]](net))
        stack.enter_context(delayed_scales(net))
        for number in range(drawn["steps"] * drawn["micro_batches"]):
            torch.manual_seed(number)
            x = y = torch.randn(X, requires_grad=True)
            with ExitStack() as around:
                around.enter_context(region())
                for each, module in zip(drawn["blocks"], net, strict=True):
                    y = run(module, y, each if checkpoints else {**each, "how": "none"}, region)
                loss = (y.float() * torch.arange(24.0).reshape(X)).sum()
                if not drawn["inside"]:
                    around.close()
                loss.backward()
            seen += [
                y.detach(),
                x.grad,
                *(None if p.grad is None else p.grad.clone() for p in net.parameters()),
            ]
            if (number + 1) % drawn["micro_batches"] == 0:
                optimizer.step()
                optimizer.zero_grad()
    return [*seen, *(p.detach() for p in net.parameters()), torch.get_rng_state()]


def equal(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.dtype is b.dtype and torch.equal(a.nan_to_num(), b.nan_to_num())


@pytest.mark.filterwarnings("ignore:Recipes are emulated")
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_checkpoints_change_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A repeated block is computed by other rules, or takes the saved result of another op for its own."""
    for draw in programs(seconds=6.0, number="checkpoints"):
        drawn = program(draw)
        monkeypatch.setattr("amp_core.casts.bulk.SMALL_ON_HOST", drawn["small"])
        pairs = list(zip(results(drawn, True), results(drawn, False), strict=True))
        wrong = [number for number, (got, expected) in enumerate(pairs) if not equal(got, expected)]
        assert not wrong, f"results {wrong} of {len(pairs)} differ: {drawn}"
