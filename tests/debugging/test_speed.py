"""``advise(goal="speed")``: times ops and steps, proposes thresholds, and leaves everything as it was."""

from __future__ import annotations

import copy
import itertools
import json
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import amp_core
from amp_core import OpPolicy
from amp_core.debugging import speed
from amp_core.debugging.advice import FormatAdvice, OpTime, SpeedAdvice
from amp_core.debugging.speed import _threshold
from amp_core.policy import rules


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 4, 3, padding=1), nn.Linear(256, 10)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x):
        return self.head(F.relu(self.norm(self.conv(x))).flatten(1))


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    return Net()


@pytest.fixture(scope="module")
def advice(net):
    x, y = torch.randn(8, 1, 8, 8), torch.randint(0, 10, (8,))
    before = copy.deepcopy(net.state_dict())
    state = torch.get_rng_state()
    advice = amp_core.advise(lambda: F.cross_entropy(net(x), y), "cpu", goal="speed", rounds=1)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert all(p.grad is None for p in net.parameters())
    return advice


def test_the_proposal_is_no_slower(advice):
    """The proposal loses to float32 or to plain autocast in the last measurement."""
    assert isinstance(advice, SpeedAdvice)
    assert set(advice.seconds) == {"float32", "autocast", "advice"}
    assert 0 < advice.seconds["advice"] <= min(advice.seconds["float32"], advice.seconds["autocast"])
    if advice.seconds["advice"] == advice.seconds["float32"]:
        assert not advice.enabled


def test_each_op_is_timed_by_shape(advice):
    """An op is left out, or casts are not part of its time."""
    by_op = {entry.op: entry for entry in advice.ops}
    assert set(by_op) == {"aten::conv2d.default", "aten::linear.default"}
    linear = by_op["aten::linear.default"]
    assert (linear.shapes, linear.work, linear.modules, linear.calls) == (
        "8x256, 10x256, 10",
        2 * 8 * 256 * 10,
        ("head",),
        1,
    )
    for entry in advice.ops:
        assert 0 < entry.float32 < 1
        assert 0 < entry.low < 1
        assert entry.rule == advice.policy.rules[entry.op]


def test_the_policy_works(advice, net):
    """The proposal cannot be applied, or does not survive a file."""
    read = amp_core.Advice.from_toml(advice.to_toml())
    assert (read.policy, read.modules) == (advice.policy, advice.modules)
    with advice.apply(net), amp_core.autocast("cpu", enabled=advice.enabled, policy=advice.policy):
        net(torch.randn(8, 1, 8, 8)).sum().backward()
    net.zero_grad()


def test_the_report(advice):
    """The report is wider than 80 columns, or JSON has texts for figures."""
    assert max(map(len, str(advice).splitlines())) <= 80
    data = json.loads(advice.to_json())
    assert {row["float32"] for row in data["ops"]} == {entry.float32 for entry in advice.ops}
    assert "ms per step" in data["facts"]["advice"]


def test_a_step_that_runs_its_own_backward(net):
    """The backward pass of such a step runs twice, which raises."""
    x = torch.randn(8, 1, 8, 8)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    def step():
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    before = copy.deepcopy(net.state_dict())
    amp_core.advise(step, "cpu", goal="speed", rounds=0)
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert optimizer.state_dict()["state"] == {}


@pytest.fixture
def quick(monkeypatch):
    """What the steps take does not matter: measure each a few times only."""
    measure = speed.interleaved
    monkeypatch.setattr(speed, "interleaved", lambda runs, _seconds, device: measure(runs, 0.0, device))


def clearing(net, x):
    loss = net(x).square().mean()
    loss.backward()
    net.zero_grad()
    return loss


def storing_none(net, x):
    loss = net(x).square().mean()
    torch.autograd.grad(loss, [*net.parameters()])
    return loss


def penalized(net, x):
    x = x.clone().requires_grad_()
    loss = net(x).square().mean()
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + gradient.square().sum()


@pytest.mark.parametrize("step", [clearing, storing_none, penalized])
def test_a_step_that_keeps_no_gradients(net, quick, step):
    """A step whose backward pass leaves no gradients behind runs another one, which raises."""
    x = torch.randn(8, 1, 8, 8)
    assert amp_core.advise(lambda: step(net, x), "cpu", goal="speed", rounds=0).ops


def test_checkpoints_run_again_under_the_same_policy(monkeypatch, quick):
    """The forward pass that a checkpoint repeats would run in other dtypes, and fail."""
    monkeypatch.setattr(speed, "_threshold", lambda *_: rules.FP32)
    layer, x = nn.Linear(16, 16), torch.randn(2, 16)
    advice = amp_core.advise(
        lambda: checkpoint(layer, x, use_reentrant=False).square().mean(), "cpu", goal="speed"
    )
    assert advice.seconds


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_step_without_gradients(quick, mode):
    """Ops are timed with a backward pass that the step does not have, or that they lack."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()  # its fused op has no derivative
    x = torch.randn(2, 4, 16)

    def step():
        with mode():
            return layer(x).sum()

    advice = amp_core.advise(step, "cpu", goal="speed", rounds=0)
    assert "aten::_addmm_activation.default" in {entry.op for entry in advice.ops}
    assert all(0 < entry.chained < 1 for entry in advice.ops)


def test_tensors_outside_modules(quick):
    """A weight outside modules stays trained, or gradients pile up on the inputs."""
    x, weight = torch.randn(8, 16, requires_grad=True), torch.randn(16, 4, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    before = weight.detach().clone()

    def step():
        loss = (x @ weight).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    amp_core.advise(step, "cpu", goal="speed")
    assert torch.equal(weight, before)
    assert x.grad is None
    assert weight.grad is None
    assert optimizer.state_dict()["state"] == {}


@pytest.mark.parametrize("region", [amp_core.autocast, torch.autocast])
def test_a_step_with_a_region(net, quick, region):
    """A region in the step overrules each proposal, and noise is reported as a gain."""

    def step():
        with region("cpu", dtype=torch.bfloat16):
            return net(torch.randn(8, 1, 8, 8)).sum()

    with pytest.raises(amp_core.AmpError, match="are in a region of fn's"):
        amp_core.advise(step, "cpu", goal="speed")


def test_a_step_with_a_float32_part(net, quick):
    """A part that the step keeps in float32 counts as a region of its own."""

    def step():
        with torch.autocast("cpu", enabled=False):
            return net(torch.randn(8, 1, 8, 8)).sum()

    assert amp_core.advise(step, "cpu", goal="speed").ops == ()


def test_a_step_that_takes_a_batch_each_time(net, quick):
    """The end of a data loader leaves `advise` as a bare StopIteration, which ends the caller's loop."""
    batches = iter([torch.randn(8, 1, 8, 8)] * 3)
    with pytest.raises(amp_core.AmpError, match=r"end of an iterator.*Take the batch before"):
        amp_core.advise(lambda: net(next(batches)).sum(), "cpu", goal="speed")


def test_no_gain_over_itself(monkeypatch, net):
    """A proposal that is plain autocast, or float32, gains what two measurements of it differ by."""
    clock = itertools.count()
    monkeypatch.setattr(speed, "interleaved", lambda runs, *_: [1 / (2 + next(clock)) for _ in runs])
    advice = amp_core.advise(lambda: net(torch.randn(8, 1, 8, 8)).sum(), "cpu", goal="speed", rounds=0)
    assert advice.policy == OpPolicy.default("cpu")  # each op is the fastest in low precision
    assert advice.seconds["advice"] == advice.seconds["autocast"]
    assert "none: plain autocast is the fastest" in str(advice)


def test_the_report_of_a_file(advice):
    """Advice that was read from a file cannot be printed, or has figures that nobody measured."""
    for kind in (SpeedAdvice, FormatAdvice, amp_core.Advice):
        report = str(kind.from_toml(advice.to_toml()))
        assert "Read from a file" in report
        assert not re.search(r"per step|faults found|of the work|tested", report)


def times(*calls):
    return [OpTime("op", "", work, (), 1, wide, low, low) for work, wide, low in calls]


@pytest.mark.parametrize(
    ("calls", "rule"),
    [
        ([(10, 1, 2), (1000, 4, 2)], "lower_precision_fp above 100 FLOP"),
        ([(10, 2, 1), (1000, 4, 2)], "lower_precision_fp"),
        ([(10, 1, 2), (1000, 2, 4)], "fp32"),
        ([(10, 1, 2), (100, 1, 2), (10**6, 4, 1)], "lower_precision_fp above 10 kFLOP"),
        ([(10, 1, 9), (100, 2, 1), (1000, 1, 2), (10**6, 4, 1)], "lower_precision_fp above 31.62 FLOP"),
        ([(123456, 1, 2), (123457, 4, 1)], "lower_precision_fp above 123456 FLOP"),
    ],
)
def test_the_threshold_costs_the_least(calls, rule):
    """A threshold is on the wrong side of a call, or calls between two thresholds decide alone."""
    assert _threshold(times(*calls), "low") == rule
    limit = rules.threshold(rule)
    if limit is not None:
        assert rule == OpPolicy("cpu", {"linear": rule}).rule("linear")
        assert any(low[0] <= limit < high[0] for low, high in itertools.pairwise(calls))


def test_an_unknown_goal():
    """A misspelled goal searches for accuracy."""
    with pytest.raises(ValueError, match='"accuracy" or "speed", not \'fast\''):
        amp_core.advise(lambda: None, "cpu", goal="fast")
