"""torch.export refuses what an exported program cannot keep, whatever it wraps the error in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp_core
from amp_core import AmpWarning, OpPolicy, PolicyError, apply_policy, autocast

X = torch.ones(2, 2)
POLICY = OpPolicy.default("cpu").override({"mm": "fp32"})
OUTSIDE = autocast("cpu", policy=POLICY)


class Built(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        with autocast("cpu", policy=POLICY):
            return torch.mm(x, x)


class Stored(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        with OUTSIDE:
            return torch.mm(x, x)


class Decorated(nn.Module):
    @autocast("cpu", policy=POLICY)
    def forward(self, x: Tensor) -> Tensor:
        return torch.mm(x, x)


class Float32(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        with autocast("cpu", dtype=torch.float32):
            return torch.mm(x, x)


def ruled() -> nn.Module:
    """A module with rules of its own, called in a region."""
    inner = nn.Sequential(nn.Linear(2, 2))
    apply_policy(inner, {"0": {"linear": "fp32"}})

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Any:
            with autocast("cpu"):
                return self.inner(x)

    return Outer()


def chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
@pytest.mark.parametrize("model", [Built, Stored, Decorated, Float32, ruled])
def test_the_reason_reaches_the_user(model: Any, strict: bool) -> None:
    """A program loses its policy in silence, or the user reads of an internal fault of Dynamo."""
    with pytest.raises(Exception, match=r"torch\.export cannot keep") as caught:
        torch.export.export(model(), (X,), strict=strict)
    assert any(isinstance(error, PolicyError) for error in chain(caught.value))
    assert not torch.is_autocast_enabled("cpu")
    with autocast("cpu"):
        assert torch.mm(X, X).dtype is torch.bfloat16
    program = torch.export.export(nn.Linear(2, 2), (X,), strict=strict)  # and torch goes on
    assert program.module()(X).dtype is torch.float32


@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
def test_a_policy_around_the_export(strict: bool) -> None:
    """A program is traced under a policy that it does not have when it runs."""

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with amp_core.autocast("cpu"):
                return torch.mm(x, x)

    program = torch.export.export(Model(), (X,), strict=strict)
    assert program.module()(X).dtype is torch.bfloat16


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("policy", [None, POLICY], ids=["plain", "policy"])
def test_an_export_inside_a_region_warns(policy: OpPolicy | None, strict: bool) -> None:
    """The exported program silently computes in float32 what the model computed in low precision."""

    class Plain(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.mm(x, x)

    with autocast("cpu", policy=policy):
        with pytest.warns(AmpWarning, match=r"does not keep autocast\('cpu'.*forward of the model") as caught:
            exported = torch.export.export(Plain(), (X,), strict=strict)
        assert [warning.filename for warning in caught if warning.category is AmpWarning] == [__file__]
    assert exported.module()(X).dtype is torch.float32
