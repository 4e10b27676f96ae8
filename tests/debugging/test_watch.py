"""`watch`: the ranges of tensors over time, what a format would lose of them, and saved runs."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import amp_core
from amp_core import AmpError, OpPolicy, autocast
from amp_core.debugging.ranges import Format
from amp_core.debugging.watching import Watch
from amp_core.dispatch.engine import engine

FP16, FP8 = torch.float16, torch.float8_e4m3fn


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def train(model, steps=3, scale=1.0):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        (model(torch.randn(4, 8)).sum() * scale).backward()
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP16, FP8, torch.float8_e5m2])
def test_shares_are_what_the_dtype_loses(dtype):
    """The report says that a format keeps values that a cast to it turns into 0 or inf, or the reverse."""
    values = torch.randn(20_000).double() * torch.logspace(-48, 36, 20_000, dtype=torch.float64)
    values = values[values.abs().log2().floor() != Format.of(dtype).largest]
    model = nn.Module()
    model.weight = nn.Parameter(values)
    model.forward = lambda: model.weight.sum()
    with amp_core.watch(model, every=1, format=dtype, limit=10**6) as ranges:
        model()
    (entry,) = (e for e in ranges.entries if e.kind == "weight")
    cast = values.to(dtype).double()
    limit = torch.finfo(dtype).max
    assert ranges.format.underflow(entry) == pytest.approx(float((cast == 0).double().mean()), abs=2e-3)
    assert ranges.format.saturation(entry) == pytest.approx(
        float((values.abs() > limit).double().mean()), abs=1e-9
    )


def test_a_format_by_its_bits():
    """A format that torch has no dtype for cannot be asked about."""
    assert Format.of((5, 10)) == Format(
        "e5m10", *[getattr(Format.of(FP16), n) for n in ("subnormal", "normal", "largest")]
    )
    assert Format.of((8, 7)).largest == Format.of(torch.bfloat16).largest


def test_what_is_watched_and_when():
    """A tensor or a step is missing, or twice there."""
    model = net()
    with amp_core.watch(model, every=2) as ranges:
        train(model, 4)
    parameters = [name for name, _ in model.named_parameters()]
    for step in (0, 2):
        names = {
            kind: [e.name for e in ranges.entries if (e.step, e.kind) == (step, kind)]
            for kind in ("activation", "gradient", "weight", "weight gradient")
        }
        assert names["activation"] == ["0", "1", "2"]  # the result of the model is that of its last layer
        assert sorted(names["gradient"]) == ["0", "1", "2"]
        assert sorted(names["weight gradient"]) == sorted(names["weight"]) == sorted(parameters)
    assert {e.step for e in ranges.entries} == {0, 2}
    count = len(ranges.entries)
    train(model)
    assert len(ranges.entries) == count
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_the_report_names_the_tensor_that_does_not_fit():
    """Gradients of 1e-9 vanish in float16, and the report does not say so, or says it of all formats."""
    model = net()
    with amp_core.watch(model, every=1, format=FP16) as ranges:
        train(model, 1, scale=1e-9)
    facts = ranges.content().facts
    assert facts["worst underflow"].startswith("100.0 % of gradient")
    assert facts["worst saturation"] == "none"
    wide = ranges.measured_in(torch.bfloat16)
    assert wide.content().facts["worst underflow"] == "none"
    rows = json.loads(ranges.to_json())["tensors"]
    assert rows[0]["underflow"] == 1.0
    assert max(map(len, str(ranges).splitlines())) <= 80


def test_results_in_low_precision_and_inf():
    """What autocast computed is measured as float32, or inf is counted as a number."""
    model = net()
    with amp_core.watch(model, every=1) as ranges, autocast("cpu", dtype=FP16):
        model(torch.full((1, 8), math.inf))
    (first,) = (e for e in ranges.entries if (e.kind, e.name) == ("activation", "0"))
    assert first.dtype == "float16"
    assert first.not_finite == 16
    assert ranges.format.saturation(first) == 1.0


def test_of_several_results_the_first_is_measured():
    """The states of an LSTM are measured under the name of its output, and a comparison takes them for it."""
    model = nn.LSTM(4, 4)
    with amp_core.watch(model, every=1) as ranges:
        output, _ = model(torch.ones(2, 4))
        output.sum().backward()
    (entry,) = (e for e in ranges.entries if e.kind == "activation")
    assert entry.largest == float(output.detach().abs().max())
    assert [e.name for e in ranges.entries if e.kind == "gradient"] == [""]


def test_the_picture(tmp_path):
    """The picture is empty, or the glob has no effect."""
    pytest.importorskip("matplotlib")
    model = net()
    with amp_core.watch(model, every=1, format=FP16) as ranges:
        with pytest.raises(ValueError, match="no step has been watched yet"):
            ranges.save_picture(tmp_path / "early.png")
        train(model)
    for name, glob in (("all.png", "**"), ("one.png", "0.**")):
        ranges.save_picture(tmp_path / name, glob)
    with pytest.raises(ValueError, match=r"'nothing' matches none .* the names are '0', '0.bias'"):
        ranges.save_picture(tmp_path / "none.png", "nothing")
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert [*sizes] == ["all.png", "one.png"] or [*sizes] == ["one.png", "all.png"]
    assert sizes["all.png"] > sizes["one.png"]


def test_ranges_from_another_process(tmp_path):
    """A saved run cannot be read elsewhere, or the comparison misses what moved."""
    path = tmp_path / "ranges.json"
    code = (
        "import sys, torch, amp_core; sys.path.insert(0, sys.argv[1]); from test_watch import net, train\n"
        "model = net()\n"
        "with amp_core.watch(model, every=1, format=torch.float16) as r: train(model)\n"
        "r.save(sys.argv[2])"
    )
    folder = __file__.rpartition("/")[0]
    subprocess.run([sys.executable, "-c", code, folder, str(path)], check=True)
    there, model = Watch.load(path), net()
    with amp_core.watch(model, every=1, format=FP16) as here:
        train(model)
    assert there.entries == here.entries
    assert json.loads(here.diff(there).to_json())["changes"] == []
    with amp_core.watch(model, every=1, format=FP16) as scaled:
        train(model, 3, scale=64.0)
    changes = json.loads(here.diff(scaled).to_json())["changes"]
    assert {row["kind"] for row in changes} >= {"gradient", "weight gradient"}


def test_a_recording_from_another_process(tmp_path):
    """A recording cannot be saved, or loses a key; another version of torch is not named."""
    model, path = net(), tmp_path / "recording.json"
    with amp_core.record() as here, autocast("cpu"):
        model(torch.ones(4, 8)).sum().backward()
    here.save(path)
    there = amp_core.Recording.load(path)
    assert (there.ops, there.casts, there.environment) == (here.ops, here.casts, here.environment)
    assert str(there) == str(here)
    there.environment["torch"] = "2.11.0"
    diff = here.diff(there).content()
    assert diff.facts["torch"] == f"{torch.__version__}  ->  2.11.0"
    policy = OpPolicy.default("cpu").override({"linear": "fp32"})
    with amp_core.record() as exact, autocast("cpu", policy=policy):
        model(torch.ones(4, 8))
    exact.save(path)
    assert any(
        row["there"] == "float32 x 1"
        for row in json.loads(here.diff(amp_core.Recording.load(path)).to_json())["changes"]
    )


@pytest.mark.parametrize("text", ["", "[]", '{"kind": "watch"}', "{}"])
def test_other_files_are_refused(text, tmp_path):
    """A wrong file is read as an empty recording."""
    path = tmp_path / "file.json"
    path.write_text(text)
    with pytest.raises(AmpError, match="is not a saved recording"):
        amp_core.Recording.load(path)
    path.write_text('{"kind": "recording", "format": 99}')
    with pytest.raises(AmpError, match="has format 99"):
        amp_core.Recording.load(path)


def test_bad_arguments():
    """A wrong argument surfaces inside a forward pass."""
    model = net()
    with pytest.raises(ValueError, match="every="):
        amp_core.watch(model, every=0)
    with pytest.raises(TypeError, match=r"needs a torch\.nn\.Module"):
        amp_core.watch(None)
    with pytest.raises(TypeError, match=r"given to torch\.compile"):
        amp_core.watch(torch.compile(model))
    assert not model._forward_pre_hooks


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # Dynamo's, after a graph break
@pytest.mark.parametrize("attach", [amp_core.watch, amp_core.guard])
def test_hooks_are_not_compiled_for_each_module(attach):
    """Dynamo compiles a hook anew for each module, and warns that it hit its limit."""
    torch.compiler.reset()
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    with attach(model), torch._dynamo.config.patch(error_on_recompile=True):
        torch.compile(model, backend="eager")(torch.ones(2, 4, requires_grad=True)).sum().backward()


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # Dynamo's, after a graph break
@pytest.mark.parametrize("earlier", [0, 1], ids=["new", "compiled before"])
def test_a_model_that_is_compiled_later(earlier):
    """Dynamo traces the hooks (it takes minutes), misses some, or has them in steps that are not watched."""
    torch.compiler.reset()
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    compiled = torch.compile(model, backend="eager")
    for _ in range(earlier):
        compiled(torch.ones(2, 4)).sum().backward()
    with amp_core.watch(model, every=2) as ranges:
        for _ in range(4):
            compiled(torch.ones(2, 4)).sum().backward()
    for kind in ("activation", "gradient"):
        found = [(entry.step, entry.name) for entry in ranges.entries if entry.kind == kind]
        assert sorted(found) == [(step, name) for step in (0, 2) for name in "012"], kind


@pytest.mark.parametrize(
    "tool", [lambda m: amp_core.guard(m, steps=[0]), lambda m: amp_core.watch(m, every=1)]
)
def test_tools_do_not_see_each_other(tool):
    """A recording counts the measurements of a guard or a watch as work of the program."""
    model = net()

    def recorded():
        with amp_core.record() as found, autocast("cpu"):
            model(torch.ones(2, 8)).float().sum().backward()
        return found.ops

    recorded()
    alone = recorded()
    with tool(model):
        assert recorded() == alone


def test_tools_may_end_in_any_order():
    """The tool that ends last leaves compiled functions eager for ever, or goes on observing."""
    torch.compiler.reset()
    compiled, runs = [], net()

    def backend(graph, _inputs):
        compiled.append(graph)
        return graph

    with amp_core.guard(runs, steps=[0]):
        with amp_core.record() as first:
            runs(torch.ones(2, 8))
        seen = first.ops.copy()
        runs(torch.ones(2, 8))
    assert first.ops == seen
    assert engine("cpu").local.observer is None
    torch.compile(torch.sin, backend=backend)(torch.ones(1))
    assert len(compiled) == 1


def test_a_model_is_watched_from_the_meta_device_on():
    """A model that is built without memory cannot be watched: "no backend serves 'meta'"."""
    with torch.device("meta"):
        model = net()
    with amp_core.watch(model, every=1) as ranges:
        model(torch.ones(2, 8, device="meta"))
        assert not ranges.entries
        model.to_empty(device="cpu").load_state_dict(net().state_dict())
        model(torch.ones(2, 8))
    assert {entry.kind for entry in ranges.entries} >= {"weight", "activation"}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
@pytest.mark.parametrize("tool", [amp_core.guard, amp_core.watch])
def test_scripting_an_observed_model_is_refused_in_words(tool):
    """torch.jit.script ends with "'Hook' object has no attribute '__name__'"."""
    with tool(net()) as handle, pytest.raises(AttributeError, match="guarded or watched"):
        torch.jit.script(handle.model)


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_scripted_modules_are_refused():
    """The first step of the training raises, in a hook: a scripted module takes none."""
    model = nn.Sequential(nn.Linear(8, 8), torch.jit.script(nn.Linear(8, 8)))
    with pytest.raises(TypeError, match=r"into 1, which TorchScript"):
        amp_core.watch(model)
    with pytest.raises(TypeError, match=r"into the model, which TorchScript"):
        amp_core.watch(model[1])
    model(torch.ones(1, 8))


class Power(nn.Module):
    """The square of the magnitude of complex numbers."""

    def __init__(self):
        super().__init__()
        self.number = nn.Parameter(torch.full((2,), 2 - 8j))

    def forward(self):
        return (self.number * self.number.conj()).real.sum()


def test_complex_parameters_are_watched_by_their_parts():
    """The backward pass raised: torch has no largest value of complex numbers."""
    model = Power()
    with amp_core.watch(model) as watch:
        model().backward()
    found = {entry.kind: (entry.dtype, entry.largest) for entry in watch.entries if entry.name == "number"}
    assert found == {"weight": ("complex64", 8.0), "weight gradient": ("complex64", 16.0)}


class Adding(nn.Module):
    """A layer, to whose result the model adds in place."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(x).add_(1.0)


def test_results_written_in_place_are_measured():
    """The ranges behind a ReLU that works in place are missing, though what it left is what flows on."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Identity(), nn.Linear(16, 8), Adding())
    results = {}
    for name, module in model.named_modules():
        module.register_forward_hook(lambda *call, n=name: results.update({n: call[2].detach().clone()}))
    with amp_core.watch(model, every=1) as ranges:
        model(torch.randn(4, 8)).sum().backward()
    measured = {e.name: e for e in ranges.entries if e.kind == "activation"}
    assert set(measured) == {"0", "1", "3", "4", "4.layer"}
    for name, entry in measured.items():
        assert (entry.largest, entry.zeros) == (results[name].abs().max(), (results[name] == 0).sum()), name
    assert {e.name for e in ranges.entries if e.kind == "gradient"} == set(measured)


class Twice(nn.Module):
    """A layer that is called twice, the second time always with the same."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(x) + self.layer(torch.ones_like(x))


def test_runs_are_compared_call_by_call():
    """Of a layer that is called several times in a step, only the last call is compared, without a word."""
    model, x, runs = Twice(), torch.randn(4, 8), []
    for factor in (1.0, 1000.0):
        with amp_core.watch(model, every=1) as ranges:
            model(x * factor)
        runs.append(ranges)
    diff = runs[0].diff(runs[1]).content()
    (changes,) = diff.tables
    assert diff.facts["ranges"] == "5 in both runs, 2 differ, 0 in one only"
    assert {row[:2] for row in changes.rows} == {("activation", "layer"), ("activation", "(the model)")}


@pytest.mark.parametrize("other", [0.0, math.inf])
def test_values_that_became_zero_or_inf_have_moved(other):
    """Of gradients that vanish in the other run, half are said to have moved; of those that overflow, too."""
    model, runs = nn.Linear(4, 4), []
    for spoiled in (0, 2):
        with torch.no_grad():
            model.weight.fill_(1.0)[:spoiled] = other
        with amp_core.watch(model, every=1) as ranges:
            model(torch.ones(1, 4))
        runs.append(ranges)
    (changes,) = runs[0].diff(runs[1]).content().tables
    assert {row[1]: row[4] for row in changes.rows} == {"weight": 0.5, "(the model)": 0.5}


def test_a_single_value_that_is_far_larger_differs():
    """A weight that has blown up in one element, between those that are sampled or not, is no difference."""
    model, runs = nn.Linear(64, 64), []
    for value in (0.0, 6e4):
        with torch.no_grad():
            model.weight[0, 1] = value
        with amp_core.watch(model, every=1, limit=1000) as ranges:
            model(torch.zeros(1, 64))
        runs.append(ranges)
    diff = runs[0].diff(runs[1]).content()
    ((kind, name, _, largest, moved, _),) = diff.tables[0].rows
    assert (kind, name, largest, moved) == ("weight", "weight", 6e4, 0.0)
    assert diff.facts["ranges"] == "3 in both runs, 1 differ, 0 in one only"


def test_an_evaluation_after_a_watched_step_is_not_measured():
    """Every batch of an evaluation counts as part of the last step, if that was one of those watched."""
    model = net()
    with amp_core.watch(model, every=1) as ranges:
        train(model, 1)
        measured = [*ranges.entries]
        with torch.no_grad():
            model(torch.randn(4, 8))
            model[:2](torch.randn(4, 8))
        assert ranges.entries == measured
        with pytest.raises(RuntimeError, match="shapes"):
            model(torch.randn(4, 9))  # a step that fails
        measured = [*ranges.entries]
        with torch.no_grad():
            model(torch.randn(4, 8))
        assert ranges.entries == measured


class Frozen(nn.Module):
    """A layer that is called without gradients."""

    def __init__(self):
        super().__init__()
        self.frozen, self.head = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        with torch.no_grad():
            x = self.frozen(x)
        return self.head(x)


def test_layers_without_gradients_are_measured_in_a_step():
    """What a frozen part of the model computes is taken for an evaluation."""
    model = Frozen()
    with amp_core.watch(model, every=1) as ranges:
        model(torch.randn(4, 8)).sum().backward()
    assert [e.name for e in ranges.entries if e.kind == "activation"] == ["frozen", "head"]


class Checkpointed(nn.Module):
    """Two layers, the second in a checkpoint."""

    def __init__(self, reentrant):
        super().__init__()
        self.first, self.second, self.reentrant = nn.Linear(8, 8), nn.Linear(8, 8), reentrant

    def forward(self, x):
        return checkpoint(self.second, self.first(x), use_reentrant=self.reentrant)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("reentrant", [True, False])
def test_what_a_checkpoint_repeats_is_measured_once(reentrant, whole):
    """Layers in a checkpoint count twice, or their gradients are missing."""
    model = Checkpointed(reentrant and not whole)
    with amp_core.watch(model, every=1) as ranges:
        x = torch.randn(4, 8, requires_grad=True)
        (checkpoint(model, x, use_reentrant=reentrant) if whole else model(x)).sum().backward()
    for kind in ("activation", "gradient"):
        names = [e.name for e in ranges.entries if e.kind == kind and e.name]
        assert sorted(names) == ["first", "second"], kind
