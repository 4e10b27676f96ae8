"""Random programs over one model, in a scope and without: each thing that they compute is the same."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from amp_core import autocast, cached_casts, master_weights
from amp_core.casts import accumulating, bulk

from ..drawn import examples


class Net(nn.Module):
    """Weights that ops take in each way: as they are, as a view, shared, by both precisions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.norm = nn.Embedding(7, 6), nn.LayerNorm(6)
        self.linear, self.conv = nn.Linear(6, 6), nn.Conv1d(6, 6, 3, padding=1)
        self.free, self.slope = nn.Parameter(torch.randn(6, 6)), nn.PReLU(6)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embedding.weight

    def body(self, x: Tensor) -> Tensor:
        x = x + self.norm(self.linear(x)) @ self.free
        x = x + self.conv(x.transpose(1, 2)).transpose(1, 2)
        x = self.slope(x.transpose(1, 2)).transpose(1, 2)
        return x + nn.functional.linear(x, self.linear.weight.t())

    def forward(self, tokens: Tensor, again: bool = False) -> Tensor:
        x = self.embedding(tokens)
        return self.head(checkpoint(self.body, x, use_reentrant=False) if again else self.body(x))


TOKENS = torch.arange(10).reshape(2, 5) % 7
DTYPES = st.sampled_from([torch.bfloat16, torch.float16])


class Program:
    """A model, its optimizer, and what was computed with them."""

    def __init__(self) -> None:
        self.net = Net()
        self.seen: list[Tensor | None] = []
        self.renew()

    def renew(self) -> None:
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01, fused=True)

    def train(self, dtype: torch.dtype, micro_batches: int, again: bool) -> None:
        for _ in range(micro_batches):
            with autocast("cpu", dtype=dtype):
                loss = self.net(TOKENS, again).float().square().mean()
            if loss.requires_grad:
                loss.backward()
        self.seen += [None if p.grad is None else p.grad.clone() for p in self.net.parameters()]
        self.optimizer.step()
        self.optimizer.zero_grad()

    def infer(self, dtype: torch.dtype, mode: Callable[[], AbstractContextManager[Any]]) -> None:
        with mode(), autocast("cpu", dtype=dtype):
            self.seen.append(self.net(TOKENS).clone())

    def write(self, how: str, twice: bool) -> None:
        """Change a weight within a region, after its first use there."""
        weight = self.net.linear.weight
        with autocast("cpu"), torch.no_grad():
            self.seen.append(self.net(TOKENS))
            for _ in range(1 + twice):
                WRITES[how](weight)
            torch.clear_autocast_cache()  # torch's own goes on with the old casts
            self.seen.append(self.net(TOKENS))

    def load(self, assign: bool) -> None:
        self.net.load_state_dict({k: v * 0.9 for k, v in self.net.state_dict().items()}, assign=assign)
        self.renew()

    def replace(self) -> None:
        self.net.linear.weight = nn.Parameter(self.net.linear.weight.detach() * 0.9)
        self.renew()

    def freeze(self, frozen: bool) -> None:
        self.net.linear.requires_grad_(not frozen)

    def hook(self) -> None:
        self.net.free.register_hook(lambda grad: grad * 0.5)

    def visit(self) -> None:
        """Run with the weights of another, as an average of weights is run, and go back."""
        own = [p.data for p in self.net.parameters()]
        for changed in ([data * 0.9 for data in own], own):
            for param, data in zip(self.net.parameters(), changed, strict=True):
                param.data = data
            self.infer(torch.bfloat16, nullcontext)


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "in place": lambda w: w.mul_(0.9),
    "a row": lambda w: w[0].fill_(0.1),
    "data": lambda w: setattr(w, "data", w.data * 0.9),
    "transposed": lambda w: setattr(w, "data", w.data.t()),
    "all at once": lambda w: torch._foreach_mul_([w], 0.9),
}
MODES = st.sampled_from([torch.no_grad, torch.inference_mode, nullcontext])
ACTIONS = st.one_of(
    st.tuples(st.just("train"), DTYPES, st.integers(1, 2), st.booleans()),
    st.tuples(st.just("infer"), DTYPES, MODES),
    st.tuples(st.just("write"), st.sampled_from(sorted(WRITES)), st.booleans()),
    st.tuples(st.just("load"), st.booleans()),
    st.tuples(st.just("freeze"), st.booleans()),
    st.tuples(st.sampled_from(["replace", "hook", "visit"])),
)


def run(actions: list[tuple[Any, ...]], scope: Callable[[nn.Module], AbstractContextManager[Any]]) -> Program:
    program = Program()
    with scope(program.net):
        for name, *arguments in actions:
            getattr(program, name)(*arguments)
    program.seen += [p.detach() for p in program.net.parameters()]
    return program


@pytest.mark.parametrize("scope", [cached_casts, master_weights])
@examples(60)
@given(
    actions=st.lists(ACTIONS, min_size=1, max_size=8),
    limits=st.tuples(st.sampled_from([0, 100, 2**22]), st.sampled_from([0, 100, 2**18])),
)
def test_the_same_with_and_without(
    scope: Any, actions: list[tuple[Any, ...]], limits: tuple[int, int]
) -> None:
    """A cast outlives what it was made of, in some order of changes that no test of one change has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bulk, "SMALL_ON_HOST", limits[0])
        patch.setattr(accumulating, "_BY_AUTOGRAD", limits[1])
        plain, ours = (run(actions, kind).seen for kind in (lambda _: nullcontext(), scope))
    for one, other in zip(plain, ours, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            exact = {"rtol": 0.0, "atol": 0.0} if scope is cached_casts else {"rtol": 0.02, "atol": 0.02}
            torch.testing.assert_close(other, one, equal_nan=True, **exact)
