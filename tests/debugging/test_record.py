"""`amp_core.record`: what it counts is what ran, and it changes nothing."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import amp_core
from amp_core import OpPolicy, autocast
from amp_core.dispatch.engine import engine

BF16 = "bfloat16"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.head = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 4))

    def forward(self, x):
        return torch.softmax(self.head(self.first(x)), -1)


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def x():
    return torch.randn(2, 8)


@pytest.fixture(autouse=True)
def nothing_stays():
    yield
    assert not any(engine("cpu")._users.values())
    assert engine("cpu").local.observer is None


def ops(recording, **wanted):
    return [(k, n) for k, n in recording.ops.items() if all(getattr(k, w) == v for w, v in wanted.items())]


def test_ops_are_counted_by_dtype_and_module(net, x):
    """The counts could be of something else than the calls that were made."""
    with amp_core.record() as r, autocast("cpu"):
        net(x)
        net(x)
    linear = ops(r, op="aten::linear.default")
    assert [(k.place.module, k.kernel, k.given, k.dtypes, k.result, n) for k, n in linear] == [
        ("first", "aten::addmm", "float32", BF16, BF16, 2),
        ("head.1", "aten::addmm", BF16 + "+float32", BF16, BF16, 2),
    ]
    assert [(k.place.module, k.dtypes) for k, _ in ops(r, kernel="aten::_softmax")] == [("", BF16)]
    assert sum(r.ops.values()) == 2 * 4  # two linear, a norm and a softmax: nothing twice, no views


@pytest.mark.parametrize("named", [True, False])
def test_layers_are_named_as_they_are_when_called(named):
    """Layers that the model gains or moves within the block could have no name, or that of another."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x = torch.ones(2, 4)
    with amp_core.record(model if named else None) as r:
        model(x)
        model.insert(0, nn.Tanh())
        model.append(nn.Softmax(-1))
        model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
        model(x).sum().backward()
    called = {(k.place.module, k.op) for k, _ in ops(r, phase="forward")}
    assert {("0", "aten::tanh"), ("3", "aten::_softmax")} <= called
    assert {place for place, name in called if name == "aten::addmm"} == {"0", "1", "2"}
    assert {k.place.module for k, _ in ops(r, op="aten::mm", phase="backward")} == {"1", "2"}


def test_the_rule_and_its_origin_are_named(net, x):
    """A user could not tell which line of which policy made an op run as it did."""
    policy = OpPolicy.default("cpu").override({"softmax": "fp32", "digamma": "fp32"}, origin="here")
    with amp_core.record() as r, autocast("cpu", policy=policy):
        net(x)
    ((softmax, _),) = ops(r, op="aten::softmax.int")
    assert (softmax.rule, softmax.origin, softmax.given, softmax.result) == ("fp32", "here", BF16, "float32")
    assert softmax.widened
    (cast,) = [k for k in r.casts if k.cause == "aten::softmax.int"]
    assert (cast.source, cast.result, cast.rule, cast.origin) == (BF16, "float32", "fp32", "here")
    ((linear, _), _) = ops(r, op="aten::linear.default")
    assert linear.rule == "lower_precision_fp"
    assert "default of cpu" in linear.origin
    assert not linear.widened


def test_each_of_two_equal_policies_names_its_own_origin(net, x):
    """The place that is named would be that of whichever equal policy a region met first."""
    for place in ("mine", "theirs"):
        policy = OpPolicy.default("cpu").override({"softmax": "fp32"}, origin=place)
        with amp_core.record() as r, autocast("cpu", policy=policy):
            net(x)
        [(softmax, _)] = ops(r, op="aten::softmax.int")
        assert softmax.origin == place


def test_a_rule_put_on_one_module_is_named(net, x):
    """What `apply_policy` does would be invisible."""
    with amp_core.apply_policy(net, {"head.1": {"linear": "fp32"}}), amp_core.record() as r, autocast("cpu"):
        net(x)
    found = {k.place.module: (k.dtypes, k.origin) for k, _ in ops(r, op="aten::linear.default")}
    assert found["head.1"] == ("float32", "module glob 'head.1'")
    assert found["first"][0] == BF16


def test_a_module_in_float32_is_named(net, x):
    """Its casts would pass for the program's own, and its ops for ops without a rule."""
    with amp_core.apply_policy(net, {"head": "fp32"}), amp_core.record() as r, autocast("cpu"):
        net(x)
    rule = ("fp32", "module rule 'fp32'")
    (cast,) = [k for k in r.casts if k.place.module == "head"]
    assert (cast.source, cast.result, cast.rule, cast.origin) == (BF16, "float32", *rule)
    ((linear, _),) = [(k, n) for k, n in ops(r, kernel="aten::addmm") if k.place.module == "head.1"]
    assert (linear.dtypes, linear.rule, linear.origin) == ("float32", *rule)


def test_only_the_rule_fp32_of_a_module_is_named(net, x):
    """Ops of a module with op rules, of which none applies to them, pass for ops of a module in float32."""
    with amp_core.apply_policy(net, {"": {"mm": "fp32"}}), amp_core.record() as r, autocast("cpu"):
        net(x)
    assert any(not key.rule for key in r.ops)
    assert not any("module rule" in key.origin for key in (*r.ops, *r.casts))


def test_a_device_of_another_maker_is_recorded():
    """On a device whose rules are in Python alone there would be nothing to see."""
    script = Path(__file__).parent / "data" / "another_device.py"
    done = subprocess.run(
        [sys.executable, "-W", "error", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_distributed_models():
    """Under DDP or FSDP2 a recording would fail, or a comparison write to memory that FSDP freed."""
    script = Path(__file__).parent / "data" / "distributed.py"
    command = [sys.executable, script]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_collectives_of_two_ranks(on_ranks):
    """A reduction in another dtype than the plan's passes unseen, or what FSDP2 and DDP send is misread."""
    script = Path(__file__).parent / "data" / "collectives.py"
    assert on_ranks(script).count("all is well") == 2


def test_collectives_of_one_rank(net, x, tmp_path, one_rank):
    """Collectives pass for ops, or are lost in a file; a sum of metrics passes for one of gradients."""
    with amp_core.record(net) as r:
        loss = net(x).sum()
        loss.register_hook(lambda grad: (dist.all_reduce(total := grad.clone()), total)[1])
        net.first.weight.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
        loss.backward()
        dist.all_reduce(loss.detach().bfloat16())
        dist.broadcast(torch.ones(3, dtype=torch.int64), 0)
        ops, group = torch.ops._c10d_functional, dist.group.WORLD.group_name
        ops.wait_tensor(ops.all_gather_into_tensor(torch.ones(2), 1, group))
    counts = {(k.phase, k.kind, k.of, k.dtype): (c.calls, c.nbytes) for k, c in r.collectives.items()}
    assert counts == {
        ("backward", "all_reduce", "activation gradients", "float32"): (1, 4),
        ("backward", "all_reduce", "gradients", "float32"): (1, 256),
        ("forward", "all_reduce", "other", "bfloat16"): (1, 2),
        ("forward", "broadcast", "other", "int64"): (1, 24),
        ("forward", "all_gather", "other", "float32"): (1, 8),
    }
    assert not any("c10d" in key.kernel for key in r.ops)
    r.save(tmp_path / "r.json")
    again = amp_core.Recording.load(tmp_path / "r.json")
    assert again.collectives == r.collectives
    assert again.tensors == r.tensors
    assert str(again) == str(r)


def test_what_a_plan_forbids(net, x):
    """A gradient, a state, a buffer or a reduction in low precision passes for what the plan asks."""
    net.register_buffer("angles", torch.ones(2, dtype=torch.bfloat16))
    net.half()
    policy, optimizer = amp_core.OpPolicy.default("cpu"), torch.optim.Adam(net.parameters())
    plan = amp_core.PrecisionPlan(
        policy,
        float32_buffers=("ang*",),
        float32_parameters=("first.bias",),
        grad_dtype=torch.float32,
        state_dtype=torch.bfloat16,
    )
    with amp_core.record(net, plan=plan) as r:
        net(x.half()).sum().backward()
        optimizer.step()
    found = {(v.what, v.where, v.dtype, v.wanted, v.entry) for v in r.violations()}
    assert {
        ("buffer", "angles", "float16", "float32", "float32_buffers"),
        ("parameter", "first.bias", "float16", "float32", "float32_parameters"),
        ("gradient", "first.weight", "float16", "float32", "grad_dtype"),
        ("optimizer state exp_avg", "first.weight", "float16", "bfloat16", "state_dtype"),
    } <= found
    assert not any(entry == "float32_parameters" and name != "first.bias" for _, name, *_, entry in found)
    text = "gradient of first.weight: float16, but grad_dtype is float32"
    with pytest.raises(amp_core.AmpError, match=f"did not keep to its plan:(.|\n)*{text}"):
        r.check()
    with pytest.raises(amp_core.AmpError, match=r"first\.bias: float16, but float32_parameters names"):
        r.check()
    rows = json.loads(r.to_json())
    assert len(rows["violations"]) == len(found)
    assert rows["facts"]["forbidden by the plan"] == str(len(found))
    assert {row["state"] for row in rows["tensors"] if row["kind"] == "optimizer state"} == {
        "step",
        "exp_avg",
        "exp_avg_sq",
    }
    r.check(amp_core.PrecisionPlan(policy))
    with amp_core.record() as bare:
        pass
    with pytest.raises(amp_core.AmpError, match="There is no plan to check"):
        bare.check()
    with pytest.raises(TypeError, match=r"plan= must be an amp_core\.PrecisionPlan, not str"):
        amp_core.record(net, plan="plan.toml")


def test_integers_and_what_is_as_planned_are_no_violation(net, x):
    """A mask among the buffers, or float32 itself, is said to break a plan that asks for float32."""
    net.register_buffer("mask", torch.ones(2, dtype=torch.bool))
    policy = amp_core.OpPolicy.default("cpu")
    plan = amp_core.PrecisionPlan(
        policy, float32_buffers=("**",), float32_parameters=("**",), grad_dtype=torch.bfloat16
    )
    with amp_core.record(net, plan=plan) as r:
        net(x).sum().backward()
    assert r.tensors
    assert r.violations() == []
    r.check()


@pytest.mark.parametrize("alone", [False, True])
def test_stored_tensors_of_several_models(x, tmp_path, alone):
    """Tensors of one name count for one model alone, and those of a layer that is called by itself twice."""
    models = [nn.Sequential(nn.Linear(8, 8)), nn.Sequential(nn.ReLU(), nn.Linear(8, 4))]
    models = models if alone else [models[0], nn.Sequential(nn.Linear(8, 4))]
    optimizers = [torch.optim.Adam(model.parameters()) for model in models]
    with amp_core.record() as r:
        if alone:
            x = models[0][0](x)
        models[1](models[0](x)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    sizes = [8 * 8, 8, 8 * 4, 4]
    for kind, state in (("parameter", ""), ("gradient", ""), ("optimizer state", "exp_avg")):
        found = [n for key, n in r.tensors.items() if (key.kind, key.state) == (kind, state) and n]
        assert sorted(found) == sorted(sizes), kind
    r.save(tmp_path / "r.json")
    assert amp_core.Recording.load(tmp_path / "r.json").tensors == r.tensors


@pytest.mark.parametrize("glob", ["0.*", "1.*"])
def test_tied_weights_break_a_plan_by_each_of_their_names(glob):
    """A plan that keeps a tied weight by its second name is said to be kept, or its elements count twice."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    policy = amp_core.OpPolicy.default("cpu")
    with amp_core.record(model, plan=amp_core.PrecisionPlan(policy, float32_parameters=(glob,))) as r:
        model.bfloat16()
    assert [v.where for v in r.violations()] == [glob.replace("*", "weight")]
    (stored,) = (row for row in json.loads(r.to_json())["tensors"] if row["kind"] == "parameter")
    assert (stored["calls"], stored["elements"]) == (1, 16)


def test_casts_bytes_and_repeats_of_weights(net, x):
    """The cost of casting the same weight again would not show, or show where there is none."""
    with amp_core.record() as r:
        for _ in range(3):
            with autocast("cpu"):
                net.first(x)
                net.first(x)  # torch's cache serves this one
    weight = {k: c for k, c in r.casts.items() if k.weight == "weight"}
    ((_, count),) = weight.items()
    assert (count.calls, count.nbytes, count.repeats) == (3, 3 * 64 * 2, 2)
    frozen = nn.Linear(8, 8).requires_grad_(False)
    with amp_core.record() as r, autocast("cpu"):
        frozen(x)
        frozen(x)
    assert sum(c.repeats for k, c in r.casts.items() if k.weight) == 2


def test_numbers_that_are_copied_into_tensors_are_no_casts() -> None:
    """``x.copy_(2)`` works outside of a recording and raises inside."""
    x = torch.ones(3)
    with amp_core.record() as recording:
        x.copy_(2)
        torch.ops.aten.copy_(x[1:], 2.5)
    assert x.tolist() == [2.0, 2.5, 2.5]
    assert not recording.casts


def test_repeats_go_by_memory() -> None:
    """Each call makes a new tensor of the same part, or reuses the address of one of another part."""
    x = torch.randn(4, 4)
    jagged = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)], layout=torch.jagged)

    def other_parts() -> None:
        x[0].half()
        x[1].half()

    def same_part() -> None:
        x[0].half()
        x[0].half()

    def written() -> None:
        x[0].half()
        x.add_(1)
        x[0].half()

    def inference() -> None:
        with torch.inference_mode():
            same_part()

    def nested() -> None:
        jagged.half()
        jagged.half()

    for run, repeats in ((other_parts, 0), (same_part, 1), (written, 0), (inference, 1), (nested, 1)):
        with amp_core.record() as r:
            run()
        (count,) = r.casts.values()
        assert (run, count.calls, count.repeats) == (run, 2, repeats)


@pytest.mark.parametrize("fused", [False, True])
def test_a_cast_after_a_step_is_no_repeat(net, x, fused):
    """Fused optimizers move no version counter, so every cast of theirs would pass for a waste."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=fused)
    with amp_core.record() as r:
        for _ in range(2):
            with autocast("cpu"):
                loss = net(x).float().square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert sum(c.repeats for k, c in r.casts.items() if k.weight) == 0


def test_the_backward_pass_knows_its_modules(net, x):
    """Ops of the backward pass would be nowhere, or in the module that happened to run last."""
    with amp_core.record() as r:
        with autocast("cpu"):
            y = net(x)
        y.float().sum().backward()
    modules = {k.place.module for k, _ in ops(r, phase="backward", kernel="aten::mm")}
    assert modules == {"first", "head.1"}
    assert {k.place.module for k, _ in ops(r, kernel="aten::native_layer_norm_backward")} == {"head.0"}
    assert {k.place.module for k, _ in ops(r, kernel="aten::_softmax_backward_data")} == {""}


def test_a_recomputed_forward_counts_as_forward(net, x):
    """The second forward under activation checkpointing would be taken for a backward pass."""
    with amp_core.record(net) as r:
        with autocast("cpu"):
            y = checkpoint(net, x.requires_grad_(), use_reentrant=False)
        y.float().sum().backward()
    found = {(k.phase, k.place.module): n for k, n in ops(r, op="aten::linear.default", dtypes=BF16)}
    assert found["forward", "first"] == 2
    assert set(found) == {("forward", "first"), ("forward", "head.1")}


class Forces(nn.Module):
    """A layer and the derivative of what it computes."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def forward(self, x):
        energy = self.layer(x).tanh().sum()
        return energy, *torch.autograd.grad(energy, x, create_graph=True)


@pytest.mark.parametrize("repeated", [False, True])
def test_a_backward_pass_within_a_module(x, repeated):
    """Its ops are taken for those of the forward pass, and of the module that starts it."""
    model, x = Forces(), x.requires_grad_()
    with amp_core.record() as r, autocast("cpu"):
        if repeated:
            sum(t.float().sum() for t in checkpoint(model, x, use_reentrant=False)).backward()
        else:
            model(x)
    assert {(k.phase, str(k.place)) for k, _ in ops(r, kernel="aten::tanh")} == {("forward", "(Forces)")}
    assert {k.phase for k, _ in ops(r, kernel="aten::tanh_backward")} == {"backward"}
    places = {str(k.place) for k, _ in ops(r, kernel="aten::mm", phase="backward")}
    assert places == ({"layer", "(Forces)"} if repeated else {"layer"})  # second derivatives
    assert not ops(r, kernel="aten::mm", phase="forward")


@pytest.mark.parametrize("reentrant", [False, True])
def test_ops_that_a_checkpoint_repeats_count_as_forward(net, x, reentrant):
    """Of a checkpointed function, what is in no layer is taken for a part of the backward pass."""
    around = functools.partial(checkpoint, lambda y: (y @ y.T).tanh().sin(), use_reentrant=reentrant)
    net.forward = lambda x: around(net.first(x))
    with amp_core.record() as r:
        with autocast("cpu"):
            y = net(x)
        (gradient,) = torch.autograd.grad(y.float().square().sum(), y, create_graph=True)
        y.backward(gradient)
    found = {key.kernel: (key.phase, str(key.place), n) for key, n in ops(r, op="aten::matmul.default")}
    assert found == {"aten::mm": ("forward", "(Net)", 2)}
    assert [n for _, n in ops(r, kernel="aten::tanh", phase="forward")] == [2]
    assert not ops(r, kernel="aten::tanh", phase="backward")
    assert {key.phase for key, _ in ops(r, kernel="aten::tanh_backward")} == {"backward"}
    assert {key.phase for key, _ in ops(r, kernel="aten::mul.Scalar")} == {"backward"}  # with create_graph


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_layer_that_a_checkpoint_repeats_keeps_its_name(net, x, reentrant):
    """The repeated layers of a model that checkpoints some have names of their own, and count twice."""
    net.forward = lambda x: checkpoint(net.head, net.first(x), use_reentrant=reentrant)
    with amp_core.record() as r:
        with autocast("cpu"):
            y = net(x)
        y.float().sum().backward()
    found = {str(k.place): n for k, n in ops(r, kernel="aten::native_layer_norm")}
    assert found == {"head.0": 2}
    assert {str(k.place) for k, _ in ops(r, op="aten::linear.default")} == {"first", "head.1"}
    assert {k.place.module for k, _ in ops(r, phase="backward")} <= {"first", "head.0", "head.1", ""}
    sizes = {key.name: n for key, n in r.tensors.items() if key.kind == "parameter"}
    assert sizes == {name: p.numel() for name, p in net.named_parameters()}


def test_results_and_gradients_are_the_same(net, x):
    """To look would change what is looked at."""

    def step():
        net.zero_grad()
        with autocast("cpu"):
            y = net(x)
        y.float().square().sum().backward()
        return [y.detach(), *(p.grad.clone() for p in net.parameters())]

    plain = step()
    with amp_core.record():
        recorded = step()
    assert all(torch.equal(a, b) for a, b in zip(plain, recorded, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(plain, step(), strict=True))


@pytest.mark.parametrize("inside", [False, True])
def test_cached_casts_show_as_they_are(net, x, inside):
    """A recording could put the cache out of action, or a cached weight could seem to be cast."""
    for p in net.parameters():
        p.requires_grad_(False)

    def run():
        with autocast("cpu"):
            return net(x)

    plain = run()
    if inside:
        with amp_core.record() as r, amp_core.cached_casts(net):
            run()
            recorded = run()
    else:
        with amp_core.cached_casts(net):
            run()
            with amp_core.record() as r:
                run()
                recorded = run()
    assert torch.equal(plain, recorded)
    linear = ops(r, op="aten::linear.default")
    assert [(k.rule, k.dtypes, n) for k, n in linear] == [("lower_precision_fp", BF16, 2)] * 2
    assert sum(c.repeats for k, c in r.casts.items() if k.weight) == 0


def test_other_threads_are_left_alone(net, x):
    """Ops of a data loader or a server thread would be counted here."""
    seen = []
    with amp_core.record() as r:

        def other():
            with autocast("cpu"):
                seen.append(net(x).dtype)

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert seen == [torch.bfloat16]
    assert not r.ops


def test_recordings_nest(net, x):
    """The inner of two recordings would take the ops from the outer one."""
    with amp_core.record() as outer, autocast("cpu"):
        net(x)
        with amp_core.record() as inner:
            net(x)
        torch.compile(net, backend="eager")(x)  # warns of hooks unless the outer recording prevents it
    assert sum(outer.ops.values()) == 3 * sum(inner.ops.values()) == 12
    assert {k.op for k in outer.ops} == {k.op for k in inner.ops}


def test_a_failing_model_leaves_nothing_behind(net, x):
    """An error in the model would leave Python on every op of the process, or wrong module paths."""

    class Broken(nn.Module):
        def forward(self, x):
            raise KeyError("broken")

    net.head.append(Broken())
    with amp_core.record() as r, autocast("cpu"):
        with pytest.raises(KeyError):
            net(x)
        net.first(x)
    assert [k.place.module for k, n in ops(r, op="aten::linear.default") if n == 1] == ["first", "head.1", ""]


def test_a_recording_is_used_once(net, x):
    """A second block would mix into the first, or break its state."""
    r = amp_core.record()
    with r, pytest.raises(amp_core.AmpError, match="already active"):
        r.__enter__()
    with r, autocast("cpu"):
        net(x)
    assert sum(r.ops.values()) == 4


def test_the_report_says_the_same_three_times(net, x, tmp_path):
    """Text, JSON and page could disagree, or the page could need a network."""
    with amp_core.record() as r:
        with autocast("cpu"):
            y = net(x)
        y.float().sum().backward()
    data = json.loads(r.to_json())
    assert sum(row["calls"] for row in data["ops"]) == sum(r.ops.values())
    assert {row["weight"] for row in data["repeats"]} == set()
    assert sum(row["calls"] for row in data["casts"]) == sum(c.calls for c in r.casts.values())
    text = str(r)
    assert "linear (addmm)" in text
    assert "head.1" in text
    r.to_html(tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert page.count("<tbody>") == sum(
        bool(data[k]) for k in data if isinstance(data[k], list) and k != "notes"
    )
    assert "http" not in page
    assert "src=" not in page


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x > 0,
        torch.argmax,
        torch.fft.fft,
        lambda x: x.sum(0)[0].item(),
        lambda _: torch.rand(2) @ torch.ones(2),
        lambda x: torch.complex(x, x).abs(),
    ],
    ids=["comparison", "argmax", "fft", "item", "rand", "complex"],
)
def test_only_ops_from_and_to_floating_point_are_counted(call, x):
    """The pages name what a recording leaves out, and another op is left out, or one of those is counted."""
    with amp_core.record() as r:
        call(x)
    assert {key.kernel for key in r.ops} <= {"aten::sum.dim_IntList", "aten::dot"}


def test_diff_names_what_changed(net, x):
    """Two policies could not be told apart by what they did."""
    policy = OpPolicy.default("cpu").override({"softmax": "fp32"})
    with amp_core.record() as one, autocast("cpu"):
        net(x)
    with amp_core.record() as two, autocast("cpu", policy=policy):
        net(x)
    assert json.loads(one.diff(one).to_json())["changes"] == []
    (row,) = json.loads(one.diff(two).to_json())["changes"]
    assert (row["op"], row["here"], row["there"]) == ("_softmax", f"{BF16} x 1", "float32 x 1")
    assert row["why"] == "(no rule) -> fp32"


def test_diff_names_casts_and_results_of_other_dtypes():
    """Runs with other bits compare as equal: where an op rounds its inputs, or only a result differs."""
    x, w = torch.randn(2, 8), torch.randn(8, 8)
    policy = OpPolicy.default("cpu").override({"matmul": "low_in_fp32_out"})
    recordings = []
    for dtype in (torch.bfloat16, torch.float16):
        with amp_core.record() as recording, autocast("cpu", dtype=dtype, policy=policy):
            (x.to(dtype) @ w).sum(dtype=torch.float64 if dtype is torch.float16 else None)
        recordings.append(recording)
    diff = json.loads(recordings[0].diff(recordings[1]).to_json())
    (row,) = diff["changes"]
    assert (row["op"], row["here"], row["there"]) == ("sum", "float32 x 1", "float32 to float64 x 1")
    (row,) = diff["casts"]
    assert "float32 to bfloat16" in row["here"]
    assert "float32 to float16" in row["there"]
    assert json.loads(recordings[0].diff(recordings[0]).to_json())["casts"] == []


def test_diff_with_a_recording_that_has_no_plan(net, x):
    """A KeyError, where one of the two has a plan or collectives; or the fact of the second is left out."""
    plan = amp_core.PrecisionPlan(OpPolicy.default("cpu"))
    with amp_core.record(net, plan=plan) as one:
        net(x)
    with amp_core.record(net) as two:
        net(x)
    for first, second, fact in ((one, two, "0  ->  -"), (two, one, "-  ->  0")):
        assert json.loads(first.diff(second).to_json())["facts"]["forbidden by the plan"] == fact


def test_plain_text_needs_no_rich(net):
    """`print(r)` would fail where the extra is not installed."""
    code = (
        "import sys; sys.modules['rich'] = None\n"
        "import torch, amp_core\n"
        "assert 'amp_core.debugging' not in sys.modules\n"
        "with amp_core.record() as r: torch.ones(2) + 1\n"
        "print(r)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "add.Tensor" in done.stdout


def test_rich_prints_the_tables(net, x):
    """`rich.print(r)` would show the plain text, folded."""
    rich = pytest.importorskip("rich.console")
    with amp_core.record() as r, autocast("cpu"):
        net(x)
    console = rich.Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(r)
    assert "Ops by dtype" in console.export_text()
    console.file.close()


@pytest.mark.filterwarnings("ignore:torch.compile with fullgraph=True found no compiled")  # torch 2.12
@pytest.mark.parametrize("fullgraph", [False, True])
def test_what_is_compiled_runs_eagerly_in_the_block_alone(net, x, fullgraph):
    """Dynamo gives up each frame that it meets under a mode: a recording would undo compilation for good."""
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(net, backend="aot_eager", fullgraph=fullgraph)
    fresh = torch.compile(lambda v: net(v) * 2, backend="aot_eager", fullgraph=fullgraph)
    with autocast("cpu"):
        plain = compiled(x)
        with amp_core.record(net) as r:
            recorded = compiled(x)
            fresh(x)
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        again = compiled(x)
        after = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        twice = fresh(x)
    assert torch.equal(recorded, plain)
    assert torch.equal(again, plain)
    assert torch.equal(twice, 2 * plain)
    assert before == after == 1
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    assert [(k.place.module, n) for k, n in ops(r, op="aten::linear.default")] == [
        ("first", 2),
        ("head.1", 2),
    ]
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()


def test_a_backward_pass_compiled_before_says_so(net, x):
    """A report that lacks what a compiled backward pass did would pass for complete."""
    compiled = torch.compile(net, backend="aot_eager")
    with autocast("cpu"):
        loss = compiled(x).float().sum()
    with amp_core.record() as r:
        loss.backward()
    assert "A backward pass ran that torch.compile compiled" in str(r)
    torch.compiler.reset()


def test_an_empty_policy_is_none_of_the_defaults() -> None:
    """A region whose policy has no rules is reported with the device's default rules."""
    with amp_core.record() as r, autocast("cpu", policy=OpPolicy("cpu")):
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))
    assert [key.rule for key in r.ops] == [""]


def test_per_sample_gradients() -> None:
    """`vmap` passes a number to an op that copies, and no gradient could be computed in a recording."""
    per_sample = torch.func.vmap(torch.func.grad(lambda w, x: (w @ x).sum() * 1024.0), in_dims=(None, 0))
    weight, rows = torch.randn(2, 3), torch.randn(4, 3)
    with amp_core.record() as r:
        got = per_sample(weight, rows)
    assert torch.equal(got, per_sample(weight, rows))
    assert r.ops


def test_ops_that_return_nothing_or_a_view_in_place() -> None:
    """Steps of optimizers and kernels that fill their results are missing, and views are counted."""

    @torch.library.custom_op("amp_record_test::scaled", mutates_args=("out",))
    def scaled(out: torch.Tensor, x: torch.Tensor) -> None:
        out.copy_(x * 2)

    x, weight = torch.ones(2, 3), nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    optimizers = [torch.optim.SGD([weight], **{kind: True}) for kind in ("fused", "foreach")]
    with amp_core.record() as recording:
        scaled(torch.empty(2, 3, dtype=torch.bfloat16), x)
        torch._foreach_zero_([torch.ones(3)])
        x.clone().unsqueeze_(0).squeeze_().t_().resize_(3, 3)
        for optimizer in optimizers:
            optimizer.step()
    counted = {(key.kernel, key.dtypes, key.result) for key in recording.ops}
    assert counted == {
        ("amp_record_test::scaled", "bfloat16+float32", "bfloat16"),
        ("aten::_fused_sgd_", "float32", "float32"),
        ("aten::_foreach_add_.List", "float32", "float32"),
    }


def test_a_model_with_a_part_in_another_process(tmp_path: Path) -> None:
    """The names of its modules cannot be asked for; an error would leave hooks that break each later call."""
    script = Path(__file__).parent / "data" / "remote.py"
    command = [sys.executable, str(script), str(tmp_path / "rpc")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


RULES_OF_WHOLE_OPS = {"einsum": "fp32", "lstm.input": "fp32", "linear": "unchanged", "matmul": "fp32"}


@pytest.mark.parametrize("rules", [RULES_OF_WHOLE_OPS, None], ids=["rules", "default"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, None], ids=str)
@pytest.mark.parametrize("kind", ["einsum", "lstm", "linear", "matmul", "interpolate", "cosine loss"])
def test_ops_that_consist_of_others_run_alike_in_inference_mode(kind, dtype, rules):
    """Autocast would not cast the products inside an einsum or an LSTM, and the report would say float32."""
    torch.manual_seed(0)
    x, lstm = torch.randn(3, 4, 6), nn.LSTM(6, 6)
    run = {
        "einsum": lambda: torch.einsum("abc,dbc->ad", x, x),
        "lstm": lambda: lstm(x)[0],
        "linear": lambda: nn.functional.linear(x, x[0]),
        "matmul": lambda: x @ x[0].T,
        "interpolate": lambda: nn.functional.interpolate(x.bfloat16(), 5, mode="linear"),
        "cosine loss": lambda: nn.functional.cosine_embedding_loss(x[0], x[1], torch.ones(4)),
    }[kind]
    policy = rules and OpPolicy.default("cpu").override(rules)
    with torch.inference_mode(), autocast("cpu", dtype=dtype, enabled=dtype is not None, policy=policy):
        expected = run()
        with amp_core.record() as r:
            result = run()
    assert result.dtype == expected.dtype
    assert torch.equal(result, expected)
    assert all(key.dtypes == str(expected.dtype).removeprefix("torch.") for key in r.ops if kind == "einsum")


OF_OTHER_CLASSES = {
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=torch.jagged),
    "two tensors": lambda: TwoTensor(torch.ones(5, 4), torch.ones(5, 4)),
    "fake": lambda: FakeTensorMode().from_tensor(torch.ones(5, 4)),
}


@pytest.mark.parametrize("kind", OF_OTHER_CLASSES)
def test_tensors_of_other_classes_in_inference_mode(kind):
    """A jagged tensor is asked for its dimensions without end; others run parts that no class expects."""
    x = OF_OTHER_CLASSES[kind]()

    def run():
        y = torch.nn.functional.rms_norm(x, x.shape[-1:])
        return y.dtype if kind == "jagged" else torch.einsum("ab,cb->ac", y, y).dtype

    with torch.inference_mode(), autocast("cpu"):
        expected = run()
        with amp_core.record():
            assert run() is expected


def test_kernels_that_a_policy_leaves_are_not_its_rules():
    """Recordings in inference mode would not cast the parts of ops that any earlier policy had a rule for."""
    x = torch.randn(3, 4)
    with autocast("cpu", policy=OpPolicy.default("cpu").override({"einsum": "fp32"})):
        torch.einsum("ab,cb->ac", x, x)
    with torch.inference_mode(), autocast("cpu"), amp_core.record():
        assert torch.einsum("ab,cb->ac", x, x).dtype is torch.bfloat16


def test_an_earlier_policy_changes_no_recording():
    """An op would be listed otherwise, or at all, because another policy had a rule for it."""

    def recorded():
        x = torch.ones(3, 4)
        with autocast("cpu"), amp_core.record() as r:
            torch.nn.functional.linear(x, x).clone().cosh()
        comparison = amp_core.compare(lambda: torch.mm(x, x.T).clone().cosh(), "cpu")
        return [*r.ops, *(each.key for each in comparison.at("op"))]

    before = recorded()
    other = OpPolicy.default("cpu").override({"clone": "fp32", "cosh": "lower_precision_fp"})
    with autocast("cpu", policy=other):
        torch.ones(3).clone().cosh()
    assert recorded() == before


@pytest.mark.parametrize(
    "tensor", [torch.ones(6, 3), nn.Parameter(torch.ones(6, 3))], ids=["tensor", "weight"]
)
def test_chunks_in_inference_mode(tensor):
    """Attention whose three weights are parts of one raises "already had autograd metadata" if recorded."""
    with torch.inference_mode(), amp_core.record():
        parts = [*tensor.chunk(3), tensor.narrow(0, 2, 2)]
    assert [part.shape for part in parts] == [(2, 3)] * 4
    assert all(part._base is tensor for part in parts)


def test_a_lazy_layer_that_no_op_has_used():
    """A size is asked of a parameter that has none yet, and the recording is lost."""
    with amp_core.record(torch.nn.ModuleList([torch.nn.LazyLinear(2), torch.nn.Linear(2, 2)])) as r:
        pass
    assert {key.name for key in r.tensors} == {"1.weight", "1.bias"}


def test_a_recording_within_a_compiled_function_is_refused():
    """The error is torch's, of a stance that the program has not set, and does not say what to do."""
    model, x = nn.Linear(4, 4), torch.ones(2, 4)

    @torch.compile(backend="eager")
    def step():
        with amp_core.record(model):
            return model(x)

    with pytest.raises(amp_core.AmpError, match=r"Enter record\(\).* outside of that function"):
        step()
    torch._dynamo.reset()
    with amp_core.record(model) as recording:  # nothing is left behind
        torch.compile(model, backend="eager")(x)
    assert recording.ops
