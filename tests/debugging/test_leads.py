"""`compare` and `advise` blame an op only where its error reaches the loss or a gradient."""

from __future__ import annotations

import dataclasses
import math
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import amp_core
from amp_core.debugging.chart import Chart, Point, as_svg

FP16, BF16 = torch.float16, torch.bfloat16


class Masked(nn.Module):
    """Attention with a causal mask, filled as most models do."""

    def __init__(self, fill):
        super().__init__()
        self.qkv, self.fill = nn.Linear(16, 48), fill

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = torch.matmul(q, k.transpose(-1, -2))
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        value = self.fill if isinstance(self.fill, float) else torch.finfo(scores.dtype).min
        return torch.matmul(torch.softmax(scores.masked_fill(mask, value), -1), v)


def classify(model):
    """Return a step whose loss is a cross entropy, which autocast takes as a whole."""
    torch.manual_seed(1)
    x, y = torch.randn(2, 8, 16), torch.randint(0, 4, (16,))
    return lambda: nn.functional.cross_entropy(model(x).reshape(16, -1), y)


@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize("fill", ["finfo", -math.inf])
def test_a_mask_is_no_fault(dtype, fill):
    """A mask of the dtype's least number differs between dtypes; softmax makes zeros of it in each."""
    torch.manual_seed(0)
    model = nn.Sequential(Masked(fill), nn.Linear(16, 4))
    advice = amp_core.advise(classify(model), "cpu", dtype=dtype)
    assert advice.before.loss_error < 0.01
    assert advice.before.leads() == []
    assert advice.findings == ()
    assert not advice.modules
    assert advice.policy == amp_core.OpPolicy.default("cpu")


class Close(nn.Module):
    """Two scores that bfloat16 cannot tell apart, beside a masked one."""

    def __init__(self, fill):
        super().__init__()
        self.scores, self.softmax, self.fill = nn.Linear(2, 3, bias=False), nn.Softmax(-1), fill
        with torch.no_grad():
            self.scores.weight.copy_(torch.tensor([[128.0, 128.0], [128.0, 129.0], [1.0, 1.0]]))

    def forward(self, x):
        scores = self.scores(x).masked_fill(torch.tensor([False, False, True]), self.fill)
        return self.softmax(scores)[..., 1].mean()


@pytest.mark.parametrize("fill", [-1e3, -1e9, -math.inf])
def test_a_mask_hides_no_fault(fill):
    """What softmax returns is noise beside the fill value of a mask, so that a wrong loss has no lead."""
    model, x = Close(fill), torch.ones(4, 2)
    with torch.no_grad():
        comparison = amp_core.compare(lambda: model(x), "cpu", dtype=BF16)
    assert comparison.loss_error > 0.3
    (lead,) = comparison.leads()
    assert lead.key.name == "aten::softmax.int"
    assert not lead.noise


def test_a_fault_is_mended_where_its_inputs_are_computed():
    """Advice ends at the module whose op shows the fault, or gives all modules around it rules."""
    model, x = nn.Sequential(nn.Sequential(Close(-math.inf))), torch.ones(4, 2)
    with torch.no_grad():
        advice = amp_core.advise(lambda: model(x), "cpu", dtype=BF16)
    (finding,) = advice.findings
    assert (finding.module, finding.op, finding.fix) == ("0.0.softmax", "softmax.int", "0.0 in float32")
    assert advice.modules == {"0.0": "fp32"}
    assert advice.after.loss_error == 0


def test_squares_of_small_numbers_are_no_noise():
    """A square that underflows counts as rounding noise, because it is small beside its root."""
    x, eye = torch.full((8,), 2.0**-18), torch.eye(8)
    comparison = amp_core.compare(lambda: (nn.functional.linear(x, eye).square() * 2.0**24).sum(), dtype=FP16)
    assert comparison.loss_error == 1
    (lead,) = comparison.leads()
    assert lead.underflow == 1


def test_a_mask_is_no_fault_of_a_step_that_returns_nothing():
    """Where the step runs the backward pass and returns no loss, each op that differs is named."""
    torch.manual_seed(0)
    model = nn.Sequential(Masked("finfo"), nn.Linear(16, 4))
    loss = classify(model)
    comparison = amp_core.compare(lambda: loss().backward(), "cpu", dtype=FP16)
    assert comparison.ran_backward
    assert comparison.loss is None
    assert any(d.added > 0.9 for d in comparison.at("op"))
    assert comparison.leads() == []


def test_a_mask_beside_a_fault_is_no_lead(attention):
    """A mask that is not to blame is named, or mended, beside the op that overflows."""
    model = nn.Sequential(Masked("finfo"), attention)
    advice = amp_core.advise(classify(model), "cpu", dtype=FP16)
    (finding,) = advice.findings
    assert (finding.module, finding.op) == ("1.blocks.2.attn", "matmul")


def test_an_overflow_is_the_only_lead(attention):
    """The gradient of the cross entropy, NaN because the logits are, is named as a second cause."""
    comparison = amp_core.compare(classify(attention), "cpu", dtype=FP16)
    (lead,) = comparison.leads()
    assert (lead.key.name, str(lead.key.place)) == ("aten::matmul.default", "blocks.2.attn")
    assert [d.key.name for d in comparison.at("op") if d.added == math.inf] == ["aten::matmul.default"]


def test_a_gradient_of_nan_in_place_of_zeros_is_a_fault():
    """An op that overflows where a mask hides it makes gradients NaN, and is said not to reach the result."""

    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.hidden, self.shown = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            square = (self.hidden(x) * 1e4).square()
            return torch.where(x.isnan(), square * square, 0.0) + self.shown(x)

    torch.manual_seed(0)
    model, x = Hidden(), torch.randn(8, 4)
    comparison = amp_core.compare(lambda: model(x).float().square().mean(), "cpu", dtype=FP16)
    (wrong,) = (d for d in comparison.at("parameter") if d.key.name == "hidden.weight")
    assert (wrong.error, wrong.size) == (math.inf, 0)
    assert comparison.loss_error < 0.01
    assert [d.key.name for d in comparison.leads()] == ["aten::pow.Tensor_Scalar"]


def test_reports_name_the_line(attention, step):
    """A user has to search the model's source for the op that is to blame."""
    advice = amp_core.advise(step(attention), "cpu", dtype=FP16)
    file, _, number = advice.findings[0].line.rpartition(":")
    assert file.endswith("conftest.py")
    with open(file, encoding="utf-8") as source:
        assert "torch.matmul(q * self.gain" in source.readlines()[int(number) - 1]
    assert advice.findings[0].line in str(advice)
    assert f"matmul in blocks.2.attn ({advice.findings[0].line}), adds inf" in " ".join(
        str(advice.before).split()
    )


def test_an_op_of_the_backward_pass_has_the_line_of_its_forward_op(attention, step):
    """The source of a gradient that underflows has to be searched for."""
    comparison = amp_core.compare(step(attention), "cpu", dtype=FP16)
    lines = {}
    for difference in comparison.at("op"):
        key = difference.key
        if str(key.place) == "blocks.0.attn" and "softmax" in key.name:
            lines[key.phase] = difference.line
    assert lines["forward"] == lines["backward"]
    without = [d.key.name for d in comparison.at("op", "backward") if not d.line]
    assert without == ["aten::mul.Tensor"]  # compare's own loss scale


def test_a_right_result_is_said_to_be_right(step):
    """A report on a sound model names a worst op, as if there were something to fix."""
    text = str(amp_core.compare(step(nn.Linear(16, 4)), "cpu"))
    assert "none: the result is within the tolerance" in text


def test_a_step_without_its_return_statement():
    """A step that forgets to return the loss is judged by every op, and the report speaks of a result."""
    model, x = nn.Linear(16, 4), torch.full((1, 16), 6e4)

    def forgetful():
        model(x).mean()

    def complete():
        return model(x).mean()

    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias.fill_(0.0)
    text = str(amp_core.compare(forgetful, "cpu", dtype=FP16))
    assert "fn returned none: each op counts as a result" in text
    assert "first inf or NaN  linear in (Linear)" in text
    assert "does not reach the result" not in text
    assert "no loss" not in str(amp_core.compare(complete, "cpu", dtype=FP16))


def test_progress(attention, step, capsys):
    """A search of a minute says nothing."""
    amp_core.advise(step(attention), "cpu", dtype=FP16, progress=True)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "advise: run 1, unchanged"
    assert lines[-1].endswith("matmul in float32 in blocks.2.attn")
    amp_core.advise(step(attention), "cpu", dtype=FP16)
    assert not capsys.readouterr().err


def test_advise_without_a_console(step, monkeypatch):
    """A program without standard error, as under pythonw, gets an AttributeError."""
    monkeypatch.setattr("sys.stderr", None)
    assert amp_core.advise(step(nn.Linear(16, 4)), "cpu")


def test_a_notebook_shows_the_page(step):
    """A notebook shows the bare text, or a page whose styles spread to the rest of the notebook."""
    comparison = amp_core.compare(step(nn.Linear(16, 4)), "cpu")
    frame = comparison._repr_html_()
    assert frame.startswith('<iframe srcdoc="&lt;!doctype html&gt;')
    assert frame.count('"') == 4  # what the page quotes is escaped
    assert "bfloat16 against float32" in frame


def test_charts(attention, step):
    """The page shows no chart, or one that leaves its frame, or says other numbers than the table."""
    comparison = amp_core.compare(step(attention), "cpu", dtype=FP16)
    charts = [*comparison.content().charts]
    errors = {(d.order, d.error) for d in comparison.at("op") if not d.noise}
    assert {(p.x, p.y) for p in charts[0].points} == errors
    with amp_core.watch(attention, every=1, format=FP16) as ranges:
        step(attention)().backward()
    charts += ranges.content().charts
    assert [round(sum(p.y for p in c.points), 6) for c in charts[2:]] == [1.0] * 4
    for chart in charts:
        root = ElementTree.fromstring(as_svg(chart))
        _, _, width, height = map(float, root.attrib["viewBox"].split())
        marks = [*root.iter("circle"), *root.iter("rect")]
        assert len(marks) == len(chart.points)
        for mark in marks:
            assert 0 <= float(mark.get("cx", mark.get("x"))) <= width
            assert 0 <= float(mark.get("cy", mark.get("y"))) <= height
        assert all(label in "".join(root.itertext()) for label in chart.limits)
    assert as_svg(dataclasses.replace(charts[0], points=[])) == ""


@pytest.mark.parametrize(
    "points", [[(0, 0.0)], [(3, math.inf)], [(0, math.nan), (1, 1.0)], [(0, 1e-300), (9, 1e300)]]
)
@pytest.mark.parametrize("bars", [False, True])
def test_charts_of_odd_values(points, bars):
    """A single point, 0, inf or NaN stops the report."""
    svg = as_svg(
        Chart("title", "x", "y", [Point(x, y, "<a>", '"&') for x, y in points], {"limit": 1.0}, bars)
    )
    assert len([*ElementTree.fromstring(svg).iter("title")]) == len(points)


class Sums(nn.Module):
    """Its last weight has a gradient that float16 does not hold, and its input has a small one."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv1d(2, 2, 1), nn.Conv1d(2, 2, 1, bias=False)
        nn.init.constant_(self.last.weight, 0.001)

    def forward(self, x):
        return self.last(self.first(x)).float().sum() * 1000


def test_the_gradient_of_a_weight_that_a_kernel_returns_beside_that_of_its_input():
    """The gradient is inf, and the report says that no op is to blame; `advise` finds no fault."""
    torch.manual_seed(0)
    model, x = Sums(), torch.full((2, 2, 512), 10.0)
    found = amp_core.compare(lambda: model(x), "cpu", dtype=FP16)
    blamed = [(d.key.place.module, d.key.name, d.overflow) for d in found.leads()]
    assert blamed == [("last", "aten::convolution_backward", 1.0)]
    assert found.first_not_finite == found.leads()[0]
    exact = amp_core.compare(lambda: model(x), "cpu", dtype=BF16)
    of_parameters = {d.key.name: d.largest for d in exact.at("parameter")}
    assert of_parameters["last.weight"] == found.leads()[0].largest
    advice = amp_core.advise(lambda: model(x), "cpu", dtype=FP16)
    assert advice.modules == {"last": "fp32"}
    assert math.isfinite(advice.after.gradient_error)
    assert "convolution_backward (result 2) in last, backward produces inf" in advice.findings[0].fault


def test_errors_of_which_no_op_adds_much():
    """A result that is wrong is said to be within the tolerance, as each op adds little."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 1.003)  # 1 in bfloat16

    def step():
        y = model(torch.ones(1, 1)).float()
        for _ in range(6):
            y = y * y
        return y.sum()

    found = amp_core.compare(step, "cpu", dtype=BF16)
    assert found.loss_error > 0.125
    assert not found.leads()
    assert "within the tolerance" not in str(found)


@pytest.mark.parametrize("limit", [3, 16384])
def test_the_share_of_inf_beside_a_mask(limit):
    """Values that the program masks with -inf in both runs are counted among those that overflow."""

    class Masked(nn.Module):
        def forward(self, x):
            x = x.masked_fill(torch.arange(100) >= 40, -math.inf)
            return torch.matmul(x[:, None], torch.full((1, 1), 1e3))

    x = torch.ones(100)
    x[10:14] = 100.0  # 4 of the 100 products exceed float16
    model = Masked()
    found = amp_core.compare(lambda: model(x).softmax(0)[0].sum(), "cpu", dtype=FP16, limit=limit)
    shares = {d.key.name: d.overflow for d in found.at("op")}
    assert shares["aten::matmul.default"] == 0.04
