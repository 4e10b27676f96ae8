"""`advise(format=)` and `compare(format=)`: which layers bear a format, and what it does to each."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from torch import nn

import amp_core
from amp_core import Advice, OpPolicy, PolicyError, Recipe, autocast, quantize
from amp_core.debugging.fits import fit_of

CPU = OpPolicy.default("cpu")
LINEAR = "aten::linear.default"


def small(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 16), nn.GELU(), nn.Linear(16, 8))
    x, y = torch.randn(16, 32), torch.randn(16, 8)
    return model, lambda: nn.functional.mse_loss(model(x), y)


def error_without(model, step, out):
    rules = {name: {"linear": "lower_precision_fp"} for name in out}
    with amp_core.apply_policy(model, rules):
        policy = CPU.override({"linear": "recipe mxfp4"})
        return amp_core.compare(step, "cpu", policy=policy, dtype=torch.bfloat16).result_error


def test_no_set_of_layers_has_more_work():
    """Layers that bear the format stay out of it, or the proposal is beyond the tolerance."""
    (model, step), tolerance = small(0), 0.2
    advice = amp_core.advise(step, "cpu", format="mxfp4", tolerance=tolerance)
    assert [layer.module for layer in advice.layers] == ["0", "2", "4"]
    assert [layer.work for layer in advice.layers] == [2 * 16 * n for n in (32 * 48, 48 * 16, 16 * 8)]
    work = {layer.module: layer.work for layer in advice.layers}
    sets = itertools.chain.from_iterable(itertools.combinations(work, n) for n in range(len(work) + 1))
    borne = [out for out in sets if error_without(model, step, out) <= tolerance]
    best = max(1 - sum(work[name] for name in out) / sum(work.values()) for out in borne)
    assert advice.is_tolerable
    assert 0 < advice.share == pytest.approx(best)
    kept_out = {layer.module for layer in advice.layers if not layer.kept}
    assert advice.after.result_error == error_without(model, step, kept_out)


class Block(nn.Module):
    """Its own product, and those of its parts."""

    def __init__(self, gain):
        super().__init__()
        self.up, self.down, self.gain = nn.Linear(32, 32), nn.Linear(32, 32), gain
        self.free = nn.Parameter(torch.randn(32, 32) / 6)
        self.free.data[:, 0] /= gain

    def forward(self, x):
        x = torch.cat([x[:, :1] * self.gain, x[:, 1:]], -1)  # one outlier in each block of 32
        x = nn.functional.linear(x, self.free)
        return self.down(torch.tanh(self.up(x)))


def test_the_layer_with_outliers_is_named():
    """The layer that does not bear the format is in it, or takes its inner layers along."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": Block(1.0), "b": Block(2.0**18)})
    x, y = torch.randn(64, 32), torch.randn(64, 32)

    def step():
        return nn.functional.mse_loss(model["b"](model["a"](x)) @ torch.eye(32), y)

    advice = amp_core.advise(step, "cpu", format="mxfp8", tolerance=0.1, model=model)
    by_layer = {(layer.module, layer.op): layer for layer in advice.layers}
    assert not by_layer["b", LINEAR].kept
    assert by_layer["b", LINEAR].alone == max(layer.alone for layer in advice.layers)
    assert all(layer.kept for key, layer in by_layer.items() if key != ("b", LINEAR))
    assert (None, "aten::matmul.default") in by_layer
    assert advice.modules == {
        "b": {LINEAR: "lower_precision_fp"},
        "b.up": {LINEAR: "recipe mxfp8"},
        "b.down": {LINEAR: "recipe mxfp8"},
    }
    fits = {(k.place.module, k.phase, k.role): fit for k, fit in advice.before.fits.items()}
    flushed = {name: fits[name, "forward", "input"].flushed for name in ("a", "b")}
    assert flushed["a"] == 0 < flushed["b"]
    assert "left out       linear in b" in str(advice)
    again = Advice.from_toml(advice.to_toml())
    assert (again.policy, again.modules) == (advice.policy, advice.modules)
    with (
        again.apply(model),
        amp_core.record(model) as r,
        autocast("cpu", torch.bfloat16, policy=again.policy),
    ):
        model["b"](model["a"](x))
    assert {(k.place.module, k.rule) for k in r.ops if k.op == LINEAR} == {
        *((name, "recipe mxfp8") for name in ("a", "a.up", "a.down", "b.up", "b.down")),
        ("b", "lower_precision_fp"),
    }


def test_a_layer_whose_name_looks_like_a_class():
    """The search ends with a PolicyError that says no such class is there, or the order of rules varies."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"user:item": Block(1.0), "item:user": Block(2.0**18)})
    x, y = torch.randn(64, 32), torch.randn(64, 32)

    def step():
        return nn.functional.mse_loss(model["item:user"](model["user:item"](x)), y)

    advice = amp_core.advise(step, "cpu", format="mxfp8", tolerance=0.1, model=model)
    assert [layer.module for layer in advice.layers if not layer.kept] == ["item:user"]
    assert advice.is_tolerable
    with advice.apply(model) as applied:
        assert applied.modules == ("item:user", "item:user.down", "item:user.up")


class Borrowing(nn.Linear):
    """It calls a layer that is none of its modules."""

    def __init__(self):
        super().__init__(32, 32)
        self.borrowed = [nn.Linear(32, 32)]

    def forward(self, x):
        return self.borrowed[0](torch.tanh(super().forward(x)))


def test_a_layer_outside_the_model_is_left_out_with_its_op():
    """The search gives a rule to a module that the model does not have, and ends with a PolicyError."""
    model, x = Borrowing(), torch.randn(16, 32)
    step = lambda: model(x).square().mean()
    advice = amp_core.advise(step, "cpu", format="mxfp4", tolerance=1e-4, model=model)
    assert [(layer.module, layer.op, layer.kept) for layer in advice.layers] == [(None, LINEAR, False)]
    assert advice.policy.rule("linear") == "lower_precision_fp"


class Threshold(nn.Module):
    """The error of either layer alone remains below the threshold, that of both does not."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)
        with torch.no_grad():
            for weight in self.parameters():
                weight.fill_(2.625)  # 3 in e2m1, and so 96 for 84 in the sum

    def forward(self, x):
        return (self.a(x) + self.b(x)).clamp(min=186)


@pytest.mark.timeout(100)
def test_layers_that_seem_to_add_no_error_end_the_search():
    """Layers without an error of their own, together beyond the tolerance, are measured without end."""
    model, x = Threshold(), torch.ones(32, 32)
    advice = amp_core.advise(lambda: model(x).mean(), "cpu", format="mxfp4", tolerance=0.01)
    assert [(layer.alone, layer.kept) for layer in advice.layers] == [(0.0, True), (0.0, False)]
    assert advice.after.result_error == 0


def test_what_all_layers_bear_needs_no_search():
    """A format that fits is given up, or rehearsed in more runs than two."""
    _, step = small(0)
    runs = 0

    def counted():
        nonlocal runs
        runs += 1
        return step()

    advice = amp_core.advise(counted, "cpu", format=Recipe.mxfp8(), tolerance=0.2)
    assert (advice.share, advice.modules, advice.policy.rule("linear")) == (1.0, {}, "recipe mxfp8")
    assert runs == 3  # float32, the format, the proposal again
    nothing = amp_core.advise(step, "cpu", format="mxfp4", tolerance=1e-4)
    assert (nothing.share, nothing.modules, nothing.is_tolerable) == (0.0, {}, False)
    assert nothing.policy.rule("linear") == "lower_precision_fp"
    assert "Without the format, the error is" in str(nothing)


@pytest.mark.parametrize("whole", [True, False])
def test_the_advice_on_a_format_of_ones_own_can_be_printed(whole):
    """A search of many runs ends in an error about files, and its result is lost on the terminal."""
    _, step = small(0)
    mine = dataclasses.replace(amp_core.formats.E2M3, name="mine", max=7.0)
    every = amp_core.Quantization(mine, 32, "e8m0")
    recipe = Recipe(every, every, every, name="of mine")
    if whole:
        advice = amp_core.advise(step, "cpu", format=recipe, tolerance=0.2)
    else:
        advice = amp_core.advise(step, "cpu", policy=CPU.override({"linear": recipe}), dtype=torch.bfloat16)
    words = " ".join(str(advice).split())
    assert "There is no file of it. TOML holds only the names of element formats" in words
    assert "define the recipe in Python" in words
    assert "There is no file of it" in advice.to_json()
    with pytest.raises(PolicyError, match="define the recipe in Python"):
        advice.to_toml()


@pytest.mark.parametrize("what", [{"goal": "speed"}, {"optimizer": "any"}])
def test_a_format_has_no_other_goal(what):
    """An argument is ignored."""
    with pytest.raises(ValueError, match="format= finds the layers"):
        amp_core.advise(lambda: None, "cpu", format="mxfp8", **what)


def test_a_step_without_products_is_refused():
    """A format that is never used is called borne."""
    x = torch.randn(4, requires_grad=True)
    with pytest.raises(PolicyError, match="no matrix product"):
        amp_core.advise(lambda: x.square().sum(), "cpu", format="mxfp8")
    with pytest.raises(PolicyError, match="no recipe 'mxfp5'"):
        amp_core.advise(lambda: x.square().sum(), "cpu", format="mxfp5")


@pytest.mark.parametrize("name", ["fp8_rowwise", "mxfp8", "mxfp4", "nvfp4"])
def test_fits_are_those_of_the_definition(name):
    """The report calls values saturated or flushed that are not, or has the error of another tensor."""
    how = Recipe.named(name).weight
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    x[0, 0], x[1], x[2, 3] = 500.0, 0.0, 1e-6
    quantized = quantize(x, how)
    near = quantized.dequantize()
    scale = torch.where(quantized.values != 0, near / quantized.values, torch.nan)
    fit, whole = fit_of(x, quantized), fit_of(x, quantized) + fit_of(x[:0], quantize(x[:0], how))
    assert whole == fit
    assert fit.error == pytest.approx(float((near - x).norm() / x.norm()), rel=1e-5)
    assert [fit.elements, fit.saturated, fit.flushed] == [x.numel(), *quantized.counts[2:].tolist()]
    largest = (x / scale).abs().nan_to_num(0.0).max() / how.element.max
    assert fit.largest == pytest.approx(float(largest), rel=1e-5)
    assert (fit.smallest < 0.5) == (fit.flushed > 0)
    zeros = torch.zeros(4, 32)
    assert fit_of(zeros, quantize(zeros, how)).smallest == math.inf


@pytest.mark.parametrize("power", [-100, -64, 63, 120])
def test_the_error_of_a_fit_does_not_depend_on_the_size(power):
    """Tiny gradients seem to fit each format, and the error of large ones is NaN: float32 has no squares."""
    how = Recipe.fp8_rowwise().weight
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    plain, scaled = (fit_of(each, quantize(each, how)) for each in (x, x * 2.0**power))
    assert plain.error > 0.01
    assert scaled.error == plain.error
    assert (scaled + scaled).error == plain.error
    assert fit_of(x * 0, quantize(x * 0, how)).error == 0


def test_the_fits_of_several_calls_add_up():
    """What a comparison says of a layer's fit holds for its last call, or counts more than its calls."""
    model, x = nn.Linear(32, 32, bias=False), torch.ones(4, 32)
    comparison = amp_core.compare(lambda: (model(x) + model(x * 1.25)).sum(), "cpu", format="mxfp4")
    (fit,) = [f for k, f in comparison.fits.items() if (k.phase, k.role) == ("forward", "input")]
    assert fit.elements == 2 * 4 * 32
    assert fit.changed == 4 * 32 * 0.25**2  # 1.25 becomes 1
    assert fit.size == 4 * 32 * (1 + 1.25**2)
    assert (fit.largest, fit.smallest) == (pytest.approx(5 / 6), 4 / 0.5)


def test_norm_weights_that_a_format_cannot_hold_are_named():
    """The cause of divergence that arXiv 2506.20752 found goes unseen: nearly equal weights all saturate."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 8), nn.LayerNorm(8))
    x = torch.randn(16, 32)
    with torch.no_grad():
        model[1].weight.uniform_(0.93, 0.99)  # beyond 448/512, the largest value under its power of two
    compared = amp_core.compare(lambda: model(x).square().mean(), "cpu", format="mxfp8")
    assert {n for n, fit in compared.parameters.items() if fit.saturated} == {"1.weight"}
    assert compared.parameters["1.weight"].saturated == 64
    assert compared.parameters["1.weight"].error > 0.05
    assert compared.parameters.keys() == {f"{n}.{what}" for n in (1, 4) for what in ("weight", "bias")}
    assert "to matrix products alone: 1.weight. This biases gradients" in " ".join(str(compared).split())
    up = amp_core.compare(lambda: model(x).square().mean(), "cpu", format=Recipe.mxfp8(scale="e8m0_up"))
    assert not any(fit.saturated for fit in up.parameters.values())
    assert "2506.20752" not in str(up)


def test_parameters_are_measured_in_the_format_of_weights():
    """The weights of a norm are said to fit, because the wider format of activations holds them."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32)), torch.randn(16, 32)
    nn.init.uniform_(model[1].weight)
    four_bits = Recipe.mxfp4().weight
    recipe = dataclasses.replace(Recipe.mxfp8(), weight=four_bits)
    compared = amp_core.compare(lambda: model(x).square().mean(), "cpu", format=recipe)
    assert compared.parameters["1.weight"] == fit_of(
        model[1].weight, quantize(model[1].weight.detach(), four_bits)
    )
