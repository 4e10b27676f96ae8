"""`amp_core.advise`: three planted faults are found by name and mended, and the proposal does as it says."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import amp_core
from amp_core import Advice, GradScaler, autocast

FP16 = torch.float16


def test_an_overflow_in_one_attention_block(attention, step):
    """The fault that ends most float16 trainings would not be mended, or by more float32 than need be."""
    advice = amp_core.advise(step(attention), "cpu", dtype=FP16)
    (finding,) = advice.findings
    assert (finding.module, finding.op) == ("blocks.2.attn", "matmul")
    assert advice.modules == {"blocks.2.attn": {"aten::matmul.default": "fp32"}}
    assert advice.before.loss_error == float("inf")
    assert advice.after.first_not_finite is None
    assert advice.after.loss_error < 1e-3
    assert advice.after.gradient_error < 0.01


def test_an_overflow_in_a_checkpoint(attention, step):
    """Parts that a checkpoint repeats pass for other models, and the op runs in float32 in all modules."""
    block = attention.blocks[2]
    block.forward = lambda x: x + checkpoint(block.attn, block.norm(x), use_reentrant=False)
    advice = amp_core.advise(step(attention), "cpu", dtype=FP16)
    assert advice.modules == {"blocks.2.attn": {"aten::matmul.default": "fp32"}}


def test_a_gradient_that_underflows(shrinking, step):
    """A model whose first layers do not learn, without any message, would go on not learning."""
    advice = amp_core.advise(step(shrinking, 1e-3), "cpu", dtype=FP16)
    (finding,) = advice.findings
    assert finding.module == "2"
    assert "underflows" in finding.fault
    assert finding.before > 0.9
    assert finding.after < 0.01
    assert advice.before.gradient_error > 0.9
    assert advice.after.gradient_error < 0.01
    assert advice.init_scale >= 2**10
    assert not advice.modules


def test_the_region_of_the_step_names_the_dtype(shrinking, step):
    """No loss scale is proposed to a float16 step, as the device's regions are in bfloat16 by default."""
    run = step(shrinking, 1e-3)

    def fn():
        with torch.autocast("cpu", dtype=FP16):
            return run()

    asked, given = amp_core.advise(run, "cpu", dtype=FP16), amp_core.advise(fn, "cpu")
    assert (given.init_scale, given.findings) == (asked.init_scale, asked.findings)


def test_a_proposal_that_leaves_nothing_in_float16():
    """The report says that no loss scale is needed, where none has been sought."""
    torch.manual_seed(0)
    model, x, y = nn.Sequential(nn.Linear(8, 4)), torch.randn(4, 8), torch.randn(4, 4)

    def fn():
        with torch.autocast("cpu", dtype=FP16):
            loss = nn.functional.mse_loss(model(x), y)
        (loss * 2.0**24).backward()

    advice = amp_core.advise(fn, "cpu", model=model)
    assert FP16 not in {d.dtype for d in advice.after.differences}
    assert "init_scale    not sought" in str(advice)


@pytest.mark.parametrize("called", [True, False])
def test_a_backward_pass_that_overflows_outside_of_all_layers(called):
    """Of a product in the loss function, or in the model itself, no change is said to help."""
    torch.manual_seed(0)
    model, x = nn.Linear(8, 4), torch.randn(4, 8)

    def fn():
        out = model(x) if called else nn.functional.linear(x, model.weight, model.bias)
        return (out.float() * 1e4).square().sum()

    advice = amp_core.advise(fn, "cpu", dtype=FP16, model=model)
    (finding,) = advice.findings
    assert (finding.module, finding.fix) == ("", "linear in float32")
    rules = advice.modules[""] if called else advice.policy.rules
    assert rules["aten::linear.default"] == "fp32"
    assert advice.before.gradient_error == float("inf")
    assert advice.after.gradient_error < 1e-3


def test_a_step_without_a_backward_pass():
    """The report says that a float16 step needs no loss scale, where no gradient has been seen."""
    model, x = nn.Linear(8, 4), torch.randn(4, 8)
    advice = amp_core.advise(lambda: model(x).sum().item(), "cpu", dtype=FP16)
    assert advice.init_scale is None
    assert "init_scale    not sought, as there is no backward pass" in str(advice)


def test_what_was_not_compared_has_no_error():
    """A step without a loss seems exact, and one in float32 seems to run in low precision."""
    model, x = nn.Linear(8, 8), torch.randn(4, 8)

    def backward():
        model(x).square().mean().backward()

    low, high = (str(amp_core.advise(backward, "cpu", dtype=d)) for d in (torch.bfloat16, torch.float32))
    assert re.search(r"relative error of the loss +- +-\n", low)
    assert re.search(r"ops in low precision +0 % +0 %", high)
    forward = str(amp_core.advise(lambda: model(x).sum().detach(), "cpu"))
    assert re.search(r"largest relative error of a parameter's gradient +- +-\n", forward)


def test_an_underflow_that_changes_no_gradient_is_no_fault():
    """A loss scale is proposed as a fix where the gradients of all parameters are right without one."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 2), nn.Identity()), torch.randn(16, 8)
    advice = amp_core.advise(lambda: (model(x) * torch.tensor([1.0, 1e-9])).sum(), "cpu", dtype=FP16)
    assert any(d.underflow > 0.4 for d in advice.before.at("op", "backward"))
    assert not any(d.underflow for d in advice.after.at("op", "backward"))
    assert advice.findings == ()


def test_a_reduction_that_loses_digits(variance, step):
    """A value that is wrong but finite would pass for right."""
    advice = amp_core.advise(step(variance), "cpu")
    assert {f.module for f in advice.findings} == {"1"}
    assert advice.findings[0].op == "sub.Tensor"
    assert advice.findings[0].before > 0.2
    assert set(advice.modules) == {"1"}
    assert advice.init_scale is None
    op = [d for d in advice.after.at("op", "forward") if d.key.name == "aten::sub.Tensor"]
    assert op[0].error < 0.2 < advice.findings[0].before


class Sizes(nn.Linear):
    """Its squares overflow in float16."""

    def forward(self, x):
        return (super().forward(x) * 300).square().mean(-1, keepdim=True).sqrt() / 300


class Relations(nn.ModuleDict):
    """Only the first of its modules overflows."""

    def __init__(self, name):
        super().__init__({name: Sizes(32, 32), "ab": nn.Linear(1, 32)})

    def forward(self, x):
        first, second = self.values()
        return second(first(x))


@pytest.mark.parametrize("name", ["user:item", "a[b]", "a*"])
def test_the_rules_of_modules_whose_names_look_like_globs(name):
    """The search takes a name for a glob: no rule helps, or other modules get the rule as well."""
    torch.manual_seed(0)
    model = nn.Sequential(Relations(name))
    x = torch.randn(16, 32)
    advice = amp_core.advise(lambda: model(x).square().mean(), "cpu", dtype=FP16)
    assert advice.before.loss_error == float("inf")
    assert advice.after.loss_error < 0.01
    with Advice.from_toml(advice.to_toml()).apply(model) as applied:
        assert applied.modules == (f"0.{name}",)


def test_a_sound_model_gets_no_rules(step):
    """Advice that slows down a model without need would be worse than none."""
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))
    advice = amp_core.advise(step(model), "cpu")
    assert not advice.findings
    assert not advice.modules
    assert advice.policy == amp_core.OpPolicy.default("cpu")


def test_the_advice_used_as_the_docs_say(attention, step):
    """What was tried would not be what a user gets who follows it."""
    run = step(attention)
    advice = Advice.from_toml(amp_core.advise(run, "cpu", dtype=FP16).to_toml())
    scaler = GradScaler("cpu", init_scale=advice.init_scale)
    optimizer = torch.optim.SGD(attention.parameters(), lr=0.1)
    with advice.apply(attention):
        with autocast("cpu", dtype=FP16, policy=advice.policy):
            loss = run()
        scaler.scale(loss).backward()
        before = [p.detach().clone() for p in attention.parameters()]
        scaler.step(optimizer)
        scaler.update()
    assert loss.isfinite()
    assert scaler.get_scale() == advice.init_scale
    assert all(p.isfinite().all() for p in attention.parameters())
    assert any(not torch.equal(a, b) for a, b in zip(before, attention.parameters(), strict=True))


def test_the_model_is_left_as_it_was(attention, step):
    """Looking for advice would change the weights, or leave rules on the model."""
    before = {k: v.clone() for k, v in attention.state_dict().items()}
    forward = attention.blocks[2].attn.forward
    amp_core.advise(step(attention), "cpu", dtype=FP16)
    assert all(torch.equal(v, before[k]) for k, v in attention.state_dict().items())
    assert attention.blocks[2].attn.forward == forward
    assert all(p.grad is None for p in attention.parameters())


def test_outside_modules_the_policy_is_changed():
    """A fault in functional code has no module to put a rule on."""
    x = torch.full((4, 4), 300.0)
    advice = amp_core.advise(lambda: torch.mm(x, x).mean(), "cpu", dtype=FP16)
    assert advice.policy.rule("mm") == "fp32"
    assert not advice.modules
    assert advice.after.first_not_finite is None


def test_toml_round_trip_and_errors(attention, step, tmp_path):
    """A file that a user has edited would be read wrong, or fail without saying where."""
    rules = {"blocks.2": "fp32", "blocks.0.attn": {"aten::matmul.default": "fp32"}}
    policy = amp_core.OpPolicy.default("cpu").override({"softmax": "fp32"})
    path = tmp_path / "advice.toml"
    path.write_text(Advice(policy, rules, 1024.0).to_toml(), encoding="utf-8")
    read = Advice.from_toml(path)
    assert (read.policy, read.modules, read.init_scale) == (policy, rules, 1024.0)
    assert "1024" in str(read)
    with pytest.raises(amp_core.PolicyError, match="unknown key 'initscale'"):
        Advice.from_toml('initscale = 1\ndevice_type = "cpu"\n')
    for scale in ("-1.0", "true", "1e300", "1" + 400 * "0"):
        with pytest.raises(amp_core.PolicyError, match=r"<toml>:1: init_scale must be (positive|a number)"):
            Advice.from_toml(f'init_scale = {scale}\ndevice_type = "cpu"\n')
    assert amp_core.OpPolicy.from_toml(path) == policy
    assert amp_core.apply_policy(attention, path).modules[0] == "blocks.2"
    with pytest.raises(amp_core.PolicyError, match="matches no module"):
        Advice(policy, {"nowhere": "fp32"}, None).apply(attention)


def test_no_scale_is_proposed_that_was_not_sought(shrinking, step):
    """A step that runs its own backward pass is told to train float16 with a scale of 1."""

    def trained():
        loss = step(shrinking, 1e-3)()
        loss.backward()
        return loss

    advice = amp_core.advise(trained, "cpu", dtype=FP16, rounds=0)
    assert advice.before.gradient_error > 0.9
    assert advice.init_scale is None
    assert "init_scale =" not in advice.to_toml()
    assert "init_scale    not sought" in str(advice)


def test_results_of_one_op_count_once():
    """Shares of ops become those of results, of which the backward pass of a convolution has three."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(4, 4, 1), nn.Conv1d(4, 1, 1))
    model[1].weight.data.mul_(1e6)
    x = torch.randn(2, 4, 8)
    advice = amp_core.advise(lambda: model(x).float().sum(), "cpu", dtype=FP16, rounds=0)
    ops = {d.key[:5] for d in advice.before.at("op")}
    low = {d.key[:5] for d in advice.before.at("op") if d.dtype is FP16}
    bad = {d.key[:5] for d in advice.before.at("op") if d.overflow}
    assert len(ops) < len(advice.before.at("op"))
    assert f"{len(low) / len(ops):.1%}".replace("%", " %") in str(advice)
    text = next(line for line in str(advice).splitlines() if line.startswith("ops whose result"))
    assert text.split()[-2] == str(len(bad))
