"""`amp_core.compare`: the figures are right, the culprit is first, and nothing is changed."""

from __future__ import annotations

import functools
import json
import math
import random
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import amp_core
from amp_core import OpPolicy, autocast
from amp_core.debugging.capture import MODULE, OP, PARAMETER
from amp_core.dispatch.engine import engine
from amp_core.plugin import Availability, Refusal
from amp_core.testing import Loopback
from amp_core.testing.fixtures import serving


@pytest.fixture(autouse=True)
def nothing_stays():
    yield
    assert not any(engine("cpu")._users.values())
    assert engine("cpu").local.observer is None


def test_the_overflow_is_found_where_it_begins(attention, step):
    """Everything after an overflow is NaN too: the culprit would drown in its victims."""
    c = amp_core.compare(step(attention), "cpu", dtype=torch.float16)
    first = c.first_not_finite
    assert (first.key.place.module, first.key.name) == ("blocks.2.attn", "aten::matmul.default")
    worst, second = c.at(OP)[:2]
    assert worst is first
    assert (worst.added, second.added < 0.01) == (math.inf, True)
    assert 0 < worst.overflow < 1
    assert worst.largest > torch.finfo(torch.float16).max
    assert c.at(MODULE)[0].key.place.module == "blocks.2.attn"
    assert "matmul in blocks.2.attn" in str(c)


def test_errors_are_those_of_the_two_runs():
    """The relative errors could be of something else than the results of the model."""
    torch.manual_seed(0)
    model, x = nn.Linear(32, 8).requires_grad_(False), torch.randn(4, 32)
    c = amp_core.compare(lambda: model(x), "cpu", limit=10**6)
    exact = model(x)
    with autocast("cpu"):
        low = model(x)
    wanted = (low.float() - exact).norm() / exact.norm()
    (op,) = c.at(OP, "forward")
    (module,) = c.at(MODULE, "forward")
    assert op.error == module.error == pytest.approx(float(wanted), rel=1e-5)
    assert (op.added, op.dtype, op.largest) == (op.error, torch.bfloat16, float(exact.abs().max()))


def test_gradients_are_compared_without_the_scale(step, shrinking):
    """With a loss scale every gradient would seem wrong by the factor of the scale."""
    plain = amp_core.compare(step(shrinking), "cpu")
    scaled = amp_core.compare(step(shrinking), "cpu", scale=1024.0)
    assert 0 < plain.gradient_error < 0.1
    assert scaled.gradient_error == pytest.approx(plain.gradient_error, rel=0.2)
    assert {d.key.name for d in plain.at(PARAMETER)} == {n for n, _ in shrinking.named_parameters()}


def test_underflow_is_the_share_of_values_too_small_for_the_dtype():
    """A zero that is right, or a ReLU that closed, could count as underflow."""
    model = nn.Linear(4, 4, bias=False).requires_grad_(False)
    with torch.no_grad():
        model.weight.copy_(torch.diag(torch.tensor([1.0, 1e-9, 1e-9, 1.0])))
    c = amp_core.compare(lambda: model(torch.ones(1, 4)), "cpu", dtype=torch.float16)
    (op,) = c.at(OP, "forward")
    assert op.underflow == 0.5
    c = amp_core.compare(lambda: torch.relu(model(-torch.ones(1, 4))), "cpu", dtype=torch.float16)
    assert [d.underflow for d in c.at(OP, "forward") if "relu" in d.key.name] == [0.0]


def test_nothing_is_changed(attention, step):
    """A comparison in the middle of a training would spoil it."""
    optimizer = torch.optim.AdamW(attention.parameters(), lr=0.1)
    run = step(attention)
    run().backward()
    optimizer.step()
    attention.eval()
    attention.head.train()

    def whole():
        loss = run()
        loss.backward()
        optimizer.step()
        attention.train()
        random.random()
        return loss

    def state():
        tensors = [*attention.state_dict().values(), *(p.grad for p in attention.parameters())]
        inner = [v for s in optimizer.state_dict()["state"].values() for v in s.values()]
        return [t.clone() for t in (*tensors, *inner)], [m.training for m in attention.modules()]

    tensors, modes = state()
    generators = torch.get_rng_state(), random.getstate()
    first = amp_core.compare(whole, "cpu")
    after, modes_after = state()
    assert len(after) == len(tensors)
    assert all(torch.equal(a, b) for a, b in zip(tensors, after, strict=True))
    assert modes == modes_after
    assert torch.equal(generators[0], torch.get_rng_state())
    assert generators[1] == random.getstate()
    assert amp_core.compare(whole, "cpu").differences == first.differences


@pytest.mark.parametrize("draw", [random.random, lambda: torch.rand(())], ids=["random", "torch"])
def test_the_seed_decides_what_a_step_draws(draw):
    """Two comparisons of a step with random numbers differ, and nobody can repeat one."""
    model = nn.Linear(4, 4)

    def loss(seed):
        draw()  # what ran before
        return amp_core.compare(lambda: (model(torch.ones(2, 4)) * draw()).sum(), "cpu", seed=seed).loss

    assert loss(1) == loss(1) != loss(2)


class Growing(nn.Linear):
    """It makes a buffer and a parameter in its first call."""

    def forward(self, x):
        if not hasattr(self, "count"):
            self.register_buffer("count", torch.zeros(()))
            self.register_parameter("gain", nn.Parameter(torch.ones(4)))
        return super().forward(x) * self.gain


def test_what_a_step_adds_to_a_model_is_taken_away():
    """A buffer or parameter that a compared step makes stays, and the training begins with it."""
    model = Growing(4, 4)
    amp_core.compare(lambda: model(torch.ones(2, 4)).sum(), "cpu", model=model)
    assert [*model.state_dict()] == ["weight", "bias"]


def test_a_buffer_that_is_replaced_is_put_back():
    """The second run begins with the statistics that the first left, and the model keeps them."""

    class Counting(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x):
            self.seen = self.seen + 1
            return super().forward(x) * self.seen

    model = Counting()
    seen = model.seen
    assert amp_core.compare(lambda: model(torch.ones(2, 4)).sum(), "cpu").loss_error < 0.05
    assert model.seen is seen
    assert seen == 0


def by_vmap(model, x):
    return torch.func.vmap(model)(x)


def by_grad(model, x):
    return torch.func.grad(lambda x: model(x).float().square().sum())(x)


def as_an_ensemble(model, x):
    stacked = [(n, torch.stack([p, p])) for n, p in model.named_parameters()]
    return torch.func.vmap(lambda p: torch.func.functional_call(model, p, (x,)))(dict(stacked))


@pytest.mark.parametrize("run", [by_vmap, by_grad, as_an_ensemble])
def test_a_model_that_a_transform_calls_is_put_back(run):
    """The gradients of the first run stay, so that those of the second one seem to be 100 % wrong."""
    torch.manual_seed(0)
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def step():
        loss = run(model, x).float().square().sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    step()
    state = [p.detach().clone() for p in model.parameters()], [p.grad.clone() for p in model.parameters()]
    optimizer.zero_grad(set_to_none=False)
    model.weight.grad.copy_(state[1][0])
    for _ in range(2):
        assert amp_core.compare(step, "cpu").gradient_error < 0.02
        assert torch.equal(model.weight, state[0][0])
        assert torch.equal(model.weight.grad, state[1][0])
        assert not model.bias.grad.any()
        assert optimizer.state[model.weight]["step"] == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_a_model_that_the_step_converts_has_its_dtype_back(dtype):
    """A step that converts the model leaves parameters of the other dtype, without their digits."""
    model, x = nn.Linear(4, 4), torch.ones(2, 4)
    model(x).sum().backward()
    kept = {name: (p.detach().clone(), p.grad, p.data_ptr()) for name, p in model.named_parameters()}

    def step():
        model.to(dtype).weight.data.mul_(2)
        return model(x.to(dtype)).sum()

    amp_core.compare(step, "cpu", model=model)
    for name, parameter in model.named_parameters():
        value, grad, address = kept[name]
        assert parameter.dtype is torch.float32
        assert parameter.data_ptr() == address
        assert parameter.grad is grad
        assert torch.equal(parameter, value)


def test_a_step_with_a_region_of_its_own_is_compared_all_the_same(attention, step):
    """The region in a user's step would run the reference in low precision, and every error would be 0."""
    run = step(attention)

    def inside(region):
        def fn():
            with region("cpu", dtype=torch.float16):
                return run()

        return fn

    plain = amp_core.compare(run, "cpu", dtype=torch.float16)
    for region in (autocast, torch.autocast):
        c = amp_core.compare(inside(region), "cpu", dtype=torch.float16)
        assert c.first_not_finite.key == plain.first_not_finite.key
        assert not c.narrow_references


def test_the_region_of_the_step_names_the_dtype(attention, step):
    """The report says bfloat16, and draws its range, where all has been computed in float16."""
    run = step(attention)

    def fn():
        with torch.autocast("cpu", dtype=torch.float16):
            return run()

    c = amp_core.compare(fn, "cpu")
    assert c.dtype is torch.float16
    assert str(c).startswith("float16 against float32")


def test_a_reference_in_low_precision_is_said(attention, step):
    """Where the step casts by itself the reference is none, and the reader would not know."""
    run = step(attention)

    def fn():
        with autocast("cpu", policy=OpPolicy.default("cpu")):
            return run()

    c = amp_core.compare(fn, "cpu")
    assert c.narrow_references > 0
    assert "are still in low precision" in str(c)


def test_dropout_draws_the_same(step):
    """With other masks in the two runs everything would differ."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.Linear(16, 4))
    c = amp_core.compare(step(model), "cpu")
    assert max(d.error for d in c.at(MODULE)) < 0.1


def test_other_random_numbers_in_another_dtype_are_no_fault():
    """An op that draws other numbers in bfloat16, as torch does for some shapes, is said to need float32."""
    torch.manual_seed(0)
    model, x = nn.Linear(16, 20), torch.ones(1, 16)

    def noisy():
        result = model(x)
        return (result * torch.randn_like(result)).sum()

    c = amp_core.compare(noisy, "cpu", dtype=torch.bfloat16)
    assert max(d.added for d in c.at(OP) if d.random) > 0.5
    assert c.loss_error > 0.2
    assert "aten::randn_like" not in [d.key.name for d in c.leads()]


def test_checkpoints_run_again_under_the_same_policy(step):
    """The forward pass that a checkpoint repeats would run in other dtypes, and fail."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Sequential(nn.Linear(16, 16), nn.GELU()), nn.Linear(16, 4)

        def forward(self, x):
            return self.head(checkpoint(self.body, x, use_reentrant=False))

    c = amp_core.compare(step(Model()), "cpu")
    assert not c.narrow_references
    assert not c.unmatched
    assert 0 < c.gradient_error < 0.1


def test_gradients_that_are_noise_are_no_fault():
    """A bias before a normalization has the gradient 0 but for rounding: its error means nothing."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
    x = torch.randn(8, 3, 8, 8)
    c = amp_core.compare(lambda: model(x).square().mean(), "cpu")
    (bias,) = [d for d in c.at(PARAMETER) if d.key.name == "0.bias"]
    assert bias.noise
    assert bias.error > 1 > 0.2 > c.gradient_error
    assert "cancel" in str(c)


@pytest.mark.parametrize("factor", [1e-6, 1e3])
def test_a_gradient_in_place_of_zeros_counts_by_its_size(factor):
    """However small it is, no format is good enough; or it goes unseen, however large it is."""

    class Hinge(nn.Module):
        """Beside a layer, a margin that only bfloat16 exceeds."""

        def __init__(self):
            super().__init__()
            self.layer, self.side = nn.Linear(4, 4), nn.Linear(1, 1, bias=False)
            nn.init.ones_(self.side.weight)

        def forward(self, x):
            margin = self.side(torch.full((1, 1), 1.006)).float() - 1.007
            return self.layer(x).float().square().mean() + factor * torch.relu(margin).sum()

    torch.manual_seed(0)
    model, x = Hinge(), torch.randn(8, 4)
    found = amp_core.compare(lambda: model(x), "cpu", model=model)
    gradients = {d.key.name: d for d in found.at(PARAMETER)}
    side, layer = gradients["side.weight"], gradients["layer.weight"]
    assert (side.error, side.size) == (1.0, 0.0)
    assert side.distance == pytest.approx(1.006 * factor, rel=0.01)
    assert layer.distance == pytest.approx(layer.error * layer.size)
    assert found.result_error == pytest.approx(max(found.loss_error, layer.error, side.distance / layer.size))


def test_gradients_of_inputs_are_put_back_too():
    """The gradient of an input would add up over the runs, and differ for that reason."""
    model, x = nn.Linear(8, 1), torch.randn(4, 8, requires_grad=True)
    x.grad = given = torch.ones(4, 8)
    c = amp_core.compare(lambda: model(x).mean(), "cpu")
    assert x.grad is given
    assert torch.equal(given, torch.ones(4, 8))
    assert max(d.error for d in c.differences) < 0.1


def test_complex_parameters_are_compared_by_their_parts():
    """The comparison would end with an error: torch has no largest value of complex numbers."""
    linear, number = nn.Linear(4, 4), nn.Parameter(torch.full((4,), 2 - 8j))
    linear.number = number

    def step():
        return (linear(torch.ones(2, 4)).float() * number.conj()).abs().square().mean()

    (found,) = (d for d in amp_core.compare(step, "cpu").at(PARAMETER) if d.key.name == "number")
    assert found.dtype is torch.complex64
    assert 0 < found.error < 0.02


def test_sparse_gradients_are_passed_over():
    """An embedding with sparse gradients would end the comparison with an error."""
    model = nn.Sequential(nn.Embedding(10, 8, sparse=True), nn.Linear(8, 1))
    c = amp_core.compare(lambda: model(torch.arange(5)).mean(), "cpu")
    assert {d.key.name for d in c.at(PARAMETER)} == {"1.weight", "1.bias"}


def test_a_policy_and_another_reference(attention, step):
    """The arguments could be ignored."""
    exact = amp_core.compare(step(attention), "cpu", policy=OpPolicy.float32("cpu"))
    assert exact.gradient_error == 0
    between = amp_core.compare(step(attention), "cpu", dtype=torch.float16, reference=torch.bfloat16)
    assert between.first_not_finite is not None
    with pytest.raises(amp_core.AmpError, match="float64"):
        amp_core.compare(step(attention), "cpu", reference=torch.float64)


def test_what_is_no_step_is_refused():
    """A wrong argument would end in an error from within autograd."""
    model = nn.Linear(2, 2)
    with pytest.raises(amp_core.AmpError, match="return the loss"):
        amp_core.compare(lambda: model(torch.ones(1, 2)), "cpu", scale=2.0)
    with pytest.raises(TypeError, match="function without arguments"):
        amp_core.compare(model(torch.ones(1, 2)), "cpu")
    with pytest.raises(TypeError, match="not str"):
        amp_core.compare(model, "cpu", model="model")
    with pytest.raises(TypeError, match="not tuple"):
        amp_core.record((model,))
    with pytest.raises(ValueError, match="must be positive and finite"):
        amp_core.compare(model, "cpu", scale=0.0)
    with pytest.raises(ValueError, match="at least 1"):
        amp_core.compare(model, "cpu", limit=0)
    assert model.weight.grad is None


SPEED = functools.partial(amp_core.advise, goal="speed")


@pytest.mark.parametrize("tool", [amp_core.compare, amp_core.advise, SPEED])
@pytest.mark.parametrize("pack", [lambda t: (t, t.detach()), lambda t: {"loss": t}, lambda t: [0, [t]]])
def test_a_loss_among_other_things_is_refused(tool, pack):
    """Only the forward pass is looked at, and the report says that there is no fault."""
    model, x = nn.Linear(8, 4), torch.randn(4, 8)
    with pytest.raises(amp_core.AmpError, match="Return the loss alone"):
        tool(lambda: pack(model(x).float().square().mean()), "cpu")
    assert model.weight.grad is None

    def trained():
        loss = model(x).float().square().mean()
        loss.backward()
        return pack(loss)

    with torch.no_grad():
        tool(lambda: pack(model(x).float().square().mean()), "cpu")
    tool(trained, "cpu")


def test_a_failing_step_leaves_the_model_as_it_was(attention, step):
    """An error in the middle would leave a half-trained model."""
    before = {k: v.clone() for k, v in attention.state_dict().items()}
    run = step(attention)

    def fn():
        run()
        raise KeyError("late")

    with pytest.raises(KeyError):
        amp_core.compare(fn, "cpu")
    assert all(torch.equal(v, before[k]) for k, v in attention.state_dict().items())


def test_the_report_has_json_and_a_page(attention, step, tmp_path):
    """Inf is no JSON, and a report about overflow is full of it."""
    c = amp_core.compare(step(attention), "cpu", dtype=torch.float16)
    data = json.loads(c.to_json(), parse_constant=lambda name: pytest.fail(name))
    assert data["ops"][0]["error"] == "inf"
    assert len(data["ops"]) + len(data["modules"]) + len(data["parameters"]) == len(c.differences)
    c.to_html(tmp_path / "c.html")
    assert "blocks.2.attn" in (tmp_path / "c.html").read_text(encoding="utf-8").replace("<wbr>", "")


@pytest.mark.slow
def test_two_ranks_find_what_one_process_finds(on_ranks):
    """Under DDP, FSDP2 or tensor parallelism, ranks disagree and hang, compare shards, or spoil the model."""
    script = Path(__file__).parent / "data" / "sharded.py"
    assert on_ranks(script).count("all is well") == 2


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_the_step_clears(set_to_none):
    """With the model at hand, a step that starts with zero_grad() takes accumulated gradients with it."""
    model = nn.Linear(4, 2)
    model(torch.ones(3, 4)).sum().backward()
    before = [parameter.grad.clone() for parameter in model.parameters()]

    def step():
        model.zero_grad(set_to_none=set_to_none)
        return model(torch.ones(3, 4)).square().mean()

    amp_core.compare(step, "cpu", model=model)
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), before, strict=True))


def test_a_graph_outlives_a_comparison():
    """Weights that did not change are written, and the backward pass that was to follow is refused."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)), torch.ones(2, 4)
    loss = model(x).square().mean()
    amp_core.compare(lambda: model(x).square().mean(), "cpu", model=model)
    loss.backward()


class Float16Alone(Loopback):
    """A device without bfloat16."""

    def default_dtype(self):
        return torch.float16

    def supported_dtypes(self):
        return (torch.float16,)


def test_formats_on_a_device_without_bfloat16():
    """No region would be entered: a format would seem to change nothing."""
    model, x = nn.Linear(32, 32), torch.randn(4, 32)
    with serving(Float16Alone()):
        assert amp_core.compare(lambda: model(x).square().mean(), "cpu", format="mxfp4").fits
        with autocast("cpu", dtype=torch.float8_e4m3fn):
            assert model(x).dtype is torch.float16


def test_a_recipe_with_delayed_scales():
    """The weight of a norm, which is in no product, has no history: an error about `quantize`."""
    model, x = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32)), torch.randn(4, 32)
    delayed = OpPolicy.default("cpu").override({"linear": "recipe fp8_delayed"})
    with amp_core.delayed_scales(model) as scales:
        found = amp_core.compare(lambda: model(x).square().mean(), "cpu", policy=delayed)
        assert amp_core.compare(lambda: model(x).square().mean(), "cpu", format="fp8_delayed").fits
    assert {"1.weight", "1.bias"} <= found.parameters.keys()
    assert scales.state_dict().keys() == {"0.weight"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize("rehearse", [amp_core.compare, amp_core.advise])
def test_a_dtype_that_the_device_has_no_regions_of(rehearse, dtype):
    """Two runs in float32 would be compared, and no fault found."""
    model = nn.Linear(2, 2)
    with serving(Float16Alone()), pytest.raises(ValueError, match=r"Regions on 'cpu' take torch\.float16\."):
        rehearse(lambda: model(torch.ones(1, 2)).sum(), "cpu", dtype=dtype)


class Absent(Float16Alone):
    """A device that is not there, as CUDA is without a GPU."""

    def availability(self):
        return Availability(False, "no such chip")

    def autocast_refusal(self, dtype):
        return Refusal("Disabling autocast.")


@pytest.mark.parametrize("rehearse", [amp_core.compare, amp_core.advise])
def test_a_device_that_is_absent(rehearse):
    """The error calls float16 none of the dtypes that it then lists, float16 among them."""
    with serving(Absent()), pytest.raises(ValueError, match="no regions on 'cpu' here: no such chip"):
        rehearse(lambda: torch.ones(()), "cpu")


def test_a_penalty_on_gradients():
    """The pass for a penalty counts as the step's own: no gradient is compared, or scaled."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    x = torch.randn(8, 16, requires_grad=True)

    def step():
        loss = model(x).mean()
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + gradient.square().sum()

    comparison = amp_core.compare(step, "cpu", scale=1024.0)
    assert len(comparison.at("parameter")) == 4
    assert comparison.gradient_error > 0
    assert comparison.scale == 1024.0


def test_a_step_that_clears_its_gradients():
    """Such a step is taken for one without a backward pass, and its graph is used twice, which raises."""
    model = nn.Linear(16, 1)
    x = torch.randn(8, 16)

    def step():
        loss = model(x).mean()
        loss.backward()
        model.zero_grad()
        return loss

    assert amp_core.compare(step, "cpu").ran_backward
    assert all(p.grad is None for p in model.parameters())


class Faulty(torch.autograd.Function):
    """Raises in the backward pass."""

    @staticmethod
    def forward(_ctx, x):
        return x.clone()

    @staticmethod
    def backward(_ctx, _gradient):
        raise RuntimeError("a fault of the step")


@pytest.mark.parametrize("goal", [None, "speed"])
def test_a_fault_after_another_backward_pass(goal):
    """The error is taken for that of a freed graph: the step is judged without its backward pass."""
    model = nn.Linear(16, 1)
    x = torch.randn(8, 16, requires_grad=True)

    def step():
        loss = model(x).mean()
        torch.autograd.grad(loss, x, retain_graph=True)
        return Faulty.apply(loss)

    with pytest.raises(RuntimeError, match="a fault of the step"):
        amp_core.advise(step, "cpu", goal=goal) if goal else amp_core.compare(step, "cpu")


def test_each_table_of_a_comparison_in_a_format_is_in_the_json():
    """A program that reads `in_format` fails on models whose parameters are all in products."""
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    tables = json.loads(amp_core.compare(lambda: model(x).sum(), "cpu", format="mxfp8").to_json())
    assert tables["quantized"]
    assert tables["in_format"] == []
