"""The backward pass of compiled functions that are called inside a region, and in which rules hold."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from amp_core import OpPolicy, apply_policy, autocast

FLOAT32 = OpPolicy.default("cpu").override({"linear": "fp32"})
X = torch.linspace(-1, 1, 8).reshape(2, 4)
Function = Callable[[Tensor], Tensor]


def in_region(model: nn.Sequential) -> Function:
    def run(x: Tensor) -> Tensor:
        first = model[1](model[0](x))
        with autocast("cpu", policy=FLOAT32):
            return model[2](first)

    return run


def in_nested_region(model: nn.Sequential) -> Function:
    def run(x: Tensor) -> Tensor:
        with autocast("cpu"):
            return in_region(model)(x)

    return run


def after_a_break(model: nn.Sequential) -> Function:
    def run(x: Tensor) -> Tensor:
        first = model[1](model[0](x))
        with autocast("cpu", policy=FLOAT32):
            torch._dynamo.graph_break()
            return model[2](first)

    return run


def float32_module(model: nn.Sequential) -> Function:
    apply_policy(model, {"2": "fp32"})
    return model


def float32_op(model: nn.Sequential) -> Function:
    apply_policy(model, {"0": {"linear": "fp32"}})
    return model


def in_checkpoint(model: nn.Sequential) -> Function:
    apply_policy(model, {"2": "fp32"})
    return lambda x: checkpoint(model, x, use_reentrant=False)


@pytest.mark.parametrize("around", [None, autocast, torch.autocast], ids=["none", "ours", "torch"])
@pytest.mark.parametrize(
    "make", [in_region, in_nested_region, after_a_break, float32_module, float32_op, in_checkpoint]
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # by torch, when it compiles
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # by Dynamo, of results between graphs
def test_gradients_of_rules_in_a_compiled_function(
    make: Callable[[nn.Sequential], Function], around: Any
) -> None:
    """The gradients of a module or an op that a rule keeps in float32 are multiplied in low precision."""

    def gradients(compile: Callable[[Function], Function]) -> list[Tensor]:  # noqa: A002
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        function = compile(make(model))
        with nullcontext() if around is None else around("cpu"):
            result = function(X)
        result.float().square().sum().backward()
        return [result, *(parameter.grad for parameter in model.parameters())]

    torch._dynamo.reset()
    compiled = gradients(torch.compile(backend="aot_eager"))  # inductor rounds less often
    for one, other in zip(gradients(lambda function: function), compiled, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
