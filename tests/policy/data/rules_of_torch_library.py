"""Ops with a rule by ``torch.library.register_autocast``, under modes, recordings, traces and a policy."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from amp_core import OpPolicy, autocast, materialize, record


@torch.library.custom_op("amp_core_rules::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    """Return twice `x`."""
    return x * 2


double.register_fake(lambda x: x * 2)
torch.library.register_autocast("amp_core_rules::double", "cpu", torch.bfloat16)
torch.library.define("amp_core_rules::triple", "(Tensor x) -> Tensor")
torch.library.impl("amp_core_rules::triple", "CompositeExplicitAutograd", lambda x: x * 3)
torch.library.register_autocast("amp_core_rules::triple", "cpu", torch.bfloat16)
triple = torch.ops.amp_core_rules.triple.default
X = torch.ones(4)


class Both(torch.nn.Module):
    """Calls both ops."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return twice and three times `x`."""
        return double(x), triple(x)


def check() -> None:
    """Run the ops in regions: alone, under modes, recorded, traced."""
    model = Both()
    for region in (torch.autocast("cpu"), autocast("cpu")):
        with region:
            assert {y.dtype for y in model(X)} == {torch.bfloat16}
        with region, FlopCounterMode(display=False):
            assert {y.dtype for y in model(X)} == {torch.bfloat16}
        with region:
            graph = make_fx(model, tracing_mode="fake")(X)
        assert len(graph.graph.find_nodes(op="call_function", target=triple)) == 1
        with record(), region:
            assert {y.dtype for y in model(X)} == {torch.bfloat16}
        with FakeTensorMode(allow_non_fake_inputs=True), region:
            assert {y.dtype for y in model(X)} == {torch.bfloat16}


check()
override = OpPolicy.default("cpu").override({double: "fp32", triple: "fp32"})
with autocast("cpu", policy=override), FlopCounterMode(display=False):
    assert {y.dtype for y in Both()(X.bfloat16())} == {torch.float32}
check()
for policy, dtype in (
    (OpPolicy.uniform("cpu"), torch.bfloat16),  # as for ops that are defined after the policy
    (OpPolicy("cpu"), torch.bfloat16),
    (OpPolicy.from_toml(OpPolicy.uniform("cpu").to_toml()), torch.bfloat16),
    (OpPolicy.float32("cpu"), torch.float32),
):
    with autocast("cpu", policy=policy):
        assert {y.dtype for y in Both()(X)} == {dtype}, policy
torch.library.define("amp_core_rules::square", "(Tensor x) -> Tensor")  # of others, after policies
torch.library.impl("amp_core_rules::square", "CompositeImplicitAutograd", lambda x: x.mm(x))
torch.library.register_autocast("amp_core_rules::square", "cpu", torch.float16)


class Square(torch.nn.Module):
    """Calls the op."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the square of `x`."""
        return torch.ops.amp_core_rules.square(x)


for policy in (OpPolicy.default("cpu"), OpPolicy.uniform("cpu")):
    assert materialize(Square(), (torch.eye(4),), policy=policy)(torch.eye(4)).dtype is torch.float16
