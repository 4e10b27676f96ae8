"""Delayed scales in policies: which history each product has, when it moves, and that it resumes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import amp_core
from amp_core import OpPolicy, PolicyError, Recipe, autocast, delayed_scales, quantize
from amp_core.dispatch.sources import history_sources
from amp_core.formats import AmaxHistory, from_transformer_engine

RECIPE = Recipe.fp8_delayed(history=3)
POLICY = OpPolicy.default("cpu").override({"linear": RECIPE})
LOW = torch.bfloat16


def region(policy: OpPolicy = POLICY) -> autocast:
    return autocast("cpu", dtype=LOW, policy=policy)


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 4))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def batch(step: int) -> Tensor:
    return torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(step)) * (1 + step)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[Tensor]:
    """Return the outputs of steps with two micro-batches each."""
    outputs = []
    for step in steps:
        for part in batch(step):
            with region():
                y = model(part)
            y.float().square().mean().backward()
            outputs.append(y.detach())
        optimizer.step()
        optimizer.zero_grad()
    return outputs


class Wrapping(torch.optim.Optimizer):
    """Steps parts of its parameters by optimizers of its own, as ZeroRedundancyOptimizer and Lookahead do."""

    def __init__(self, *inner: torch.optim.Optimizer, outermost: bool = True) -> None:
        super().__init__([group for each in inner for group in each.param_groups], {})
        self.first, self.last = inner[0], inner[-1]
        self.outer = Wrapping(*inner, outermost=False) if outermost else None

    def step(self, closure: Any = None) -> None:
        if self.outer is None:
            self.first.step()
            self.last.step()
        else:
            self.outer.step()


def test_optimizers_that_step_others() -> None:
    """Each step ends twice, so that half of a history is zeros, or ranks agree on different weights."""
    states = []
    for wraps in (False, True):
        model, optimizer = model_and_optimizer()
        if wraps:
            parts = [torch.optim.SGD(model[at].parameters(), lr=0.1, momentum=0.9) for at in (0, 2)]
            optimizer = Wrapping(*parts)
        with delayed_scales(model) as scales:
            train(model, optimizer, range(4))
            states.append(scales.state_dict())
    torch.testing.assert_close(states[1], states[0], rtol=0, atol=0)


def test_products_written_out() -> None:
    """A scale follows from another tensor, another step, or one micro-batch of the last."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(24, 16))
    optimizer = torch.optim.SGD([weight], lr=0.01)
    histories = {role: AmaxHistory(getattr(RECIPE, role).found, "cpu") for role in ("input", "weight")}
    with delayed_scales(nn.ParameterList([weight])):
        for step in range(5):
            for x in batch(step):
                operands = {"input": x.to(LOW), "weight": weight.detach().to(LOW)}
                near = {}
                for role, tensor in operands.items():
                    quantized = quantize(tensor, getattr(RECIPE, role), amax=histories[role].amax)
                    histories[role].record(quantized.amax)
                    near[role] = quantized.dequantize()
                with region():
                    y = F.linear(x, weight)
                assert torch.equal(y, (near["input"] @ near["weight"].t()).to(LOW))
                y.float().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            for history in histories.values():
                history.step()


def test_a_run_resumes_bit_for_bit() -> None:
    """After a checkpoint, scales start anew, or those of another weight or role are used."""
    model, optimizer = model_and_optimizer()
    with delayed_scales(model):
        wanted = train(model, optimizer, range(6))
    model, optimizer = model_and_optimizer()
    with delayed_scales(model) as scales:
        first = train(model, optimizer, range(3))
    saved = copy.deepcopy([model.state_dict(), optimizer.state_dict(), scales.state_dict()])
    assert {*saved[2]} == {"0.weight", "2.weight"}
    model, optimizer = model_and_optimizer()
    scales = delayed_scales(model)
    for target, state in zip((model, optimizer, scales), saved, strict=True):
        target.load_state_dict(state)
    before = scales.state_dict()
    assert all(
        torch.equal(before[name][role][key], value)
        for name, roles in saved[2].items()
        for role, state in roles.items()
        for key, value in state.items()
    )
    with scales:
        rest = train(model, optimizer, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(first + rest, wanted, strict=True))
    with scales:  # over what is in use
        scales.load_state_dict(saved[2])
    assert torch.equal(
        scales.state_dict()["0.weight"]["input"]["seen"], saved[2]["0.weight"]["input"]["seen"]
    )


@pytest.mark.parametrize("saved_within", [False, True])
def test_a_layer_that_rests_after_a_checkpoint(saved_within: bool) -> None:
    """Its history misses the steps until it is used again, or the micro-batches before the checkpoint."""
    model, optimizer = model_and_optimizer()
    with delayed_scales(model) as going_on:
        train(model, optimizer, range(2))
        if saved_within:
            with region():
                model(batch(9)[0]).sum().backward()
        saved = going_on.state_dict()
        optimizer.param_groups[0]["lr"] = 0.0
        with delayed_scales(copy.deepcopy(model)) as resumed:
            resumed.load_state_dict(saved)
            other = torch.optim.SGD(resumed.model.parameters(), lr=0.0)
            for _ in range(2):
                with region():
                    for scales in (going_on, resumed):
                        scales.model[0](batch(5)[0]).sum().backward()
                optimizer.step()
                other.step()
            torch.testing.assert_close(resumed.state_dict(), going_on.state_dict(), rtol=0, atol=0)


def test_scopes_checkpoints_and_views_keep_the_bits() -> None:
    """A cached cast, a recomputation or a transposed weight has no history, or counts twice."""
    torch.manual_seed(0)
    plain, model = (nn.Linear(16, 16) for _ in range(2))
    model.load_state_dict(plain.state_dict())
    both = OpPolicy.default("cpu").override({"linear": RECIPE, "matmul": RECIPE})
    results = []
    for net, around in ((plain, amp_core.disable), (model, amp_core.cached_casts)):
        scope = around(net) if around is amp_core.cached_casts else delayed_scales(nn.Linear(1, 1))
        with delayed_scales(net) as scales, scope:
            for step in range(2):
                x = batch(step)[0]
                with region(both):

                    def body(x: Tensor, net: nn.Module = net) -> Tensor:
                        return net(x) @ net.weight.t()

                    again = around is amp_core.cached_casts
                    y = torch.utils.checkpoint.checkpoint(body, x, use_reentrant=False) if again else body(x)
                    y.float().square().mean().backward()
                scales.step()
        results.append([y.detach(), net.weight.grad, scales.state_dict()["weight"]["grad_output"]["seen"]])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_only_the_weights_of_an_optimizer_step() -> None:
    """Histories move twice per step, or with the optimizer of another part."""
    model, _ = model_and_optimizer()
    one, two = (torch.optim.SGD(model[i].parameters(), lr=0.1) for i in (0, 2))
    with delayed_scales(model) as scales:
        with region():
            model(batch(0)[0]).sum().backward()
        one.step()
        seen = {name: roles["input"]["seen"][-1] for name, roles in scales.state_dict().items()}
        assert seen["0.weight"] > 0 == seen["2.weight"]
        two.step()
        assert scales.state_dict()["2.weight"]["input"]["seen"][-1] > 0
    before = scales.state_dict()["0.weight"]["input"]["seen"]
    one.step()
    assert torch.equal(scales.state_dict()["0.weight"]["input"]["seen"], before), "the scope has ended"


class Plain:
    """Steps as SGD does, but is no torch optimizer, so torch's hooks miss it."""

    def __init__(self, inner: torch.optim.Optimizer, error: Exception | None = None) -> None:
        self.param_groups, self.state, self.error = inner.param_groups, inner.state, error

    @torch.no_grad()
    def step(self) -> None:
        if self.error is not None:
            raise self.error
        for group in self.param_groups:
            for param in group["params"]:
                param -= group["lr"] * param.grad


def test_an_optimizer_that_is_not_torchs_steps_the_histories() -> None:
    """With an optimizer that torch's hooks miss, all scales stay those of the first step."""
    model, inner = model_and_optimizer()
    scaler, seen = amp_core.GradScaler("cpu", init_scale=1.0), []
    with delayed_scales(model) as scales:
        for optimizer in (Plain(inner), Plain(inner), Plain(inner, RuntimeError("stopped"))):
            with region():
                loss = model(batch(0)[0]).square().mean()
            scaler.scale(loss).backward()
            if optimizer.error is None:
                scaler.step(optimizer)
            else:
                with pytest.raises(RuntimeError, match="stopped"):
                    scaler.step(optimizer)
            scaler.update()
            inner.zero_grad()
            seen.append(int(scales.state_dict()["0.weight"]["input"]["seen"].count_nonzero()))
    assert seen == [1, 2, 2]


def test_an_overflow_leaves_no_trace() -> None:
    """One inf makes all later scales NaN."""
    model, optimizer = model_and_optimizer()
    scaler = amp_core.GradScaler("cpu", init_scale=1.0)
    with delayed_scales(model) as scales:
        for factor in (1.0, torch.inf, 1.0):
            with region():
                loss = model(batch(0)[0] * factor).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            assert scaler.last_step[optimizer].skipped is (factor == torch.inf)
            scaler.update()
            optimizer.zero_grad()
    for roles in scales.state_dict().values():
        assert all(state["seen"].isfinite().all() for state in roles.values())


def test_state_of_transformer_engine() -> None:
    """Converted histories do not fit the scope that goes on with them."""
    state: dict[str, Any] = {
        "scale_fwd": torch.full((3,), 4.0),
        "scale_bwd": torch.full((2,), 8.0),
        "amax_history_fwd": torch.full((3, 3), 112.0),
        "amax_history_bwd": torch.full((3, 2), 7168.0),
    }
    (roles,) = from_transformer_engine(state, RECIPE)
    scales = delayed_scales(nn.Linear(16, 4))
    scales.load_state_dict({"weight": roles})
    x = torch.randn(8, 16)
    with scales, region():
        y = F.linear(x, scales.model.weight)
    near = quantize(x.to(LOW), RECIPE.input, amax=torch.tensor(112.0)).dequantize()
    weight = quantize(scales.model.weight.to(LOW), RECIPE.weight, amax=torch.tensor(112.0)).dequantize()
    assert torch.equal(y, (near @ weight.t()).to(LOW))


class Shared(nn.Module):
    """Two layers that one graph computes, and a weight that an op gets as a view."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x: Tensor, layer: Callable[[nn.Module, Tensor], Tensor]) -> Tensor:
        return torch.stack([layer(each, x) for each in self.layers])


def tied(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x) @ layer.weight.t()


@pytest.mark.slow
def test_graphs_use_the_same_histories() -> None:
    """A graph keeps to the weights that it was traced with, or loses histories of the backward pass."""
    both = OpPolicy.default("cpu").override({"linear": RECIPE, "matmul": RECIPE})
    torch._dynamo.reset()
    compiled = torch.compile(tied, backend="aot_eager", fullgraph=True)
    results = []
    for layer in (tied, compiled):
        model, kept = Shared(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scales = delayed_scales(model)
        for step in range(3):
            if step == 1:
                state = scales.state_dict()
                scales = delayed_scales(model)
                scales.load_state_dict(state)
            with scales:
                for part in batch(step):
                    with region(both):
                        y = model(part, layer)
                    y.float().square().mean().backward()
                kept += [y.detach(), *(p.grad.clone() for p in model.parameters())]
                optimizer.step()
            optimizer.zero_grad()
        saved = scales.state_dict()
        kept += [
            t for name in sorted(saved) for role in sorted(saved[name]) for t in saved[name][role].values()
        ]
        results.append(kept)
    assert len(results[0]) == 3 * 5 + 2 * 3 * 2
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    with region(both), pytest.raises(PolicyError, match=r"Enter that scope"):
        compiled(model.layers[0], batch(0)[0])


def test_products_without_histories_are_refused() -> None:
    """A delayed scale is a current one, and nobody says so."""
    model, _ = model_and_optimizer()
    x = batch(0)[0]
    with region(), pytest.raises(PolicyError, match=r"is not a parameter of a model in amp_core\.delayed"):
        model(x)
    with region(), delayed_scales(nn.Linear(2, 2)), pytest.raises(PolicyError, match="is not a parameter"):
        model(x)
    scales = delayed_scales(model)
    with scales:
        with region():
            model(x)
        with pytest.raises(RuntimeError, match="already active"), scales:
            pass
        longer = OpPolicy.default("cpu").override({"linear": Recipe.fp8_delayed(history=4)})
        with region(longer), pytest.raises(ValueError, match="use one recipe for the products of a weight"):
            model(x)
    with pytest.raises(RuntimeError, match="without having been entered"):
        scales.__exit__(None, None, None)
    with pytest.raises(KeyError, match="no parameters other"):
        scales.load_state_dict({"other": {}})
    with pytest.raises(TypeError, match=r"state of 0\.weight is Tensor, not a mapping"):
        scales.load_state_dict(model.state_dict())
    for error, text, state in (
        (ValueError, r"has 'inputs'\. Histories are of input, weight", {"inputs": {"seen": x, "current": x}}),
        (KeyError, r"input of 0\.weight: .* has no entry 'current'", {"input": {"seen": x[0].abs()}}),
    ):
        with pytest.raises(error, match=text):
            scales.load_state_dict({"0.weight": state})
    with pytest.raises(TypeError, match=r"needs a torch\.nn\.Module, not list"):
        delayed_scales([model])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"process_group must be a torch\.distributed\.ProcessGroup"):
        delayed_scales(model, process_group="world")  # type: ignore[arg-type]
    wrong = delayed_scales(model)
    wrong.load_state_dict({"0.weight": {"input": AmaxHistory(RECIPE.input.found, "cpu").state_dict()}})
    with wrong, region(longer), pytest.raises(ValueError, match="The saved history has 3 steps"):
        model(x)


def test_a_scope_that_an_interrupt_has_entered_by_half() -> None:
    """The histories are registered twice from then on, and move two steps at each step of an optimizer."""
    model = torch.nn.Linear(8, 8)
    scales = amp_core.delayed_scales(model)
    lost = history_sources.register(scales)  # what an interrupt after it leaves behind
    with scales:
        assert history_sources.active.count(scales) == 1
    assert scales not in history_sources.active
    lost()
