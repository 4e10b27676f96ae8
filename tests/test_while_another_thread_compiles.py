"""What a thread computes while another one compiles or exports: torch says to all threads that they do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import amp_core
from amp_core import OpPolicy, autocast

X = torch.linspace(-1, 1, 9).reshape(3, 3)
EXACT = OpPolicy.default("cpu").override({"mm": "fp32"})


class Product(torch.autograd.Function):
    """Multiplies in both passes by the rules of the region around the forward pass."""

    @staticmethod
    @amp_core.custom_fwd(device_type="cpu")
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a.mm(b)

    @staticmethod
    @amp_core.custom_bwd(device_type="cpu")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return grad.mm(b.t()).float(), a.t().mm(grad).float()


def backward_pass() -> Tensor:
    weight = X.clone().requires_grad_()
    with autocast("cpu", policy=EXACT):
        loss = Product.apply(X, weight).sin().sum()
    return torch.autograd.grad(loss, weight)[0]


def transformed() -> Tensor:
    def product(a: Tensor) -> Tensor:
        with autocast("cpu", policy=EXACT):
            return a.mm(X)

    return torch.func.vmap(product)(X[None])


def faked() -> Tensor:
    with FakeTensorMode(), autocast("cpu", policy=EXACT):
        dtype = torch.ones(2, 2).mm(torch.ones(2, 2)).dtype
    return torch.tensor(dtype.itemsize)


def guarded() -> Tensor:
    model = nn.Linear(3, 3)
    with torch.no_grad():
        model.weight.fill_(torch.inf)
    with amp_core.guard(model), pytest.raises(amp_core.NonFiniteError):
        model(X).sum().backward()
    return X


def refused_copy() -> Tensor:
    model = nn.Sequential(nn.Linear(3, 3))
    amp_core.apply_policy(model, {"0": "fp32"})
    other = copy.copy(model[0])
    other._parameters = dict(other._parameters)
    with pytest.raises(amp_core.PolicyError):
        other(X)
    return X


def under_a_mode() -> Tensor:
    with torch.device("cpu"), autocast("cpu", dtype=torch.float32):
        return X.mm(X)


JOBS = [backward_pass, transformed, faked, guarded, refused_copy, under_a_mode]


@pytest.mark.parametrize("job", JOBS)
def test_this_thread_goes_on(job: Callable[[], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients lose the policy, guards see no inf, copies use other weights, or regions raise."""
    expected = job()
    for flag in ("_is_compiling_flag", "_is_exporting_flag"):
        monkeypatch.setattr(torch.compiler, flag, True)
    assert torch.equal(job(), expected)
