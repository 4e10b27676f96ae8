"""Wrong arguments of public functions are refused in words, and leave nothing behind."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import amp_core
from amp_core import (
    AccumulationWindow,
    GradScaler,
    LossScaleSchedule,
    OpPolicy,
    PolicyError,
    PrecisionPlan,
    plugin,
)

MXFP8 = amp_core.Recipe.mxfp8().input
MODEL = nn.Linear(4, 4)
NO_MODULES = [None, 3, nn.Linear, [MODEL.weight], MODEL.weight, "model"]
NO_OPTIMIZERS = [None, 3, MODEL, "adam", torch.optim.SGD]


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD(MODEL.parameters(), lr=0.1)


OPTIMIZER = optimizer()


def scaler() -> GradScaler:
    """Return a scaler whose gradients are there."""
    made = GradScaler("cpu", init_scale=4.0)
    MODEL.zero_grad()
    made.scale(MODEL(torch.ones(2, 4)).sum()).backward()
    return made


OF_MODULE: dict[str, Callable[[Any], Any]] = {
    "cached_casts": amp_core.cached_casts,
    "master_weights": amp_core.master_weights,
    "apply_policy": lambda model: amp_core.apply_policy(model, {"": "fp32"}),
    "materialize": lambda model: amp_core.materialize(model, (torch.ones(1, 4),)),
    "count_lost_updates": lambda model: amp_core.count_lost_updates(model, OPTIMIZER),
    "PrecisionPlan.apply": PrecisionPlan(OpPolicy.default("cpu")).apply,
}


@pytest.mark.parametrize("value", NO_MODULES, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("function", OF_MODULE)
def test_what_is_no_module_is_refused(function: str, value: Any) -> None:
    """`'NoneType' object has no attribute 'modules'` from inside, or hooks that stay on the optimizer."""
    with pytest.raises(TypeError, match=rf"{function}\(\) needs a torch\.nn\.Module, not "):
        OF_MODULE[function](value)
    amp_core.count_lost_updates(nn.Linear(2, 2), OPTIMIZER).remove()


@pytest.mark.parametrize("value", NO_OPTIMIZERS, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("call", ["step", "unscale_", "clip_grad_norm_", "step_closure", "window"])
def test_what_is_no_optimizer_is_refused(call: str, value: Any) -> None:
    """`cannot create weak reference to 'NoneType' object` from inside."""
    made = scaler()
    calls: dict[str, Callable[[], object]] = {
        "step": lambda: made.step(value),
        "unscale_": lambda: made.unscale_(value),
        "clip_grad_norm_": lambda: made.clip_grad_norm_(value, 1.0),
        "step_closure": lambda: made.step_closure(value, lambda: 0.0),
        "window": lambda: AccumulationWindow(made, value),
    }
    with pytest.raises(TypeError, match=r"\(\) needs a torch\.optim\.Optimizer, not "):
        calls[call]()
    made.step(optimizer())
    made.update()


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"schedule": 3}, TypeError, "must be an amp_core.LossScaleSchedule"),
        ({"schedule": LossScaleSchedule}, TypeError, "must be an amp_core.LossScaleSchedule"),
        ({"schedules": {"a": 3}}, TypeError, "must be an amp_core.LossScaleSchedule"),
        ({"schedules": [LossScaleSchedule()]}, TypeError, "schedules= must map keys"),
        ({"schedules": []}, TypeError, "schedules= must map keys"),
        ({"schedules": {1: LossScaleSchedule()}}, TypeError, "key of a scale must be a string, got 1"),
        ({"schedule": []}, TypeError, "must be an amp_core.LossScaleSchedule"),
        ({"init_scale": "2"}, TypeError, "init_scale= must be a number, got '2'"),
        ({"named_parameters": MODEL}, TypeError, r"model.named_parameters\(\) returns them, not Linear"),
        ({"named_parameters": MODEL.parameters()}, TypeError, "not Parameter"),
        ({"named_parameters": 3}, TypeError, "not int"),
        ({"history": -1}, ValueError, "history= must be at least 0, not -1"),
        ({"history": "all"}, TypeError, "history= must be an integer"),
        ({"warn_after": -1}, ValueError, "warn_after= must be at least 0"),
        ({"warn_after": "never"}, TypeError, "warn_after= must be an integer"),
    ],
)
def test_arguments_of_a_scaler(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    """A wrong schedule is taken, and fails in the middle of the training."""
    with pytest.raises(error, match=text):
        GradScaler("cpu", **arguments)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("arguments", [{"max_norm": "one"}, {"max_norm": 1.0, "norm_type": "two"}])
def test_norms_that_are_no_numbers(arguments: dict[str, Any], fused: bool) -> None:
    """An error of a kernel, when gradients are half read."""
    made = scaler()
    with pytest.raises(TypeError, match=r"must be a number, not '(one|two)'"):
        made.step(torch.optim.SGD(MODEL.parameters(), lr=0.1, fused=fused), **arguments)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("arguments", [{"norm_type": 0}, {"norm_type": "-inf"}, {"norm_type": -1.0}])
def test_orders_that_give_no_norm(arguments: dict[str, Any], fused: bool) -> None:
    """The scale is taken out of what is no norm, and gradients stay as they are."""
    made, stepped = scaler(), torch.optim.SGD(MODEL.parameters(), lr=0.1, fused=fused)
    with pytest.raises(ValueError, match=r"norm_type= must be above 0, not "):
        made.step(stepped, max_norm=1.0, **arguments)
    with pytest.raises(ValueError, match=r"max_norm= is NaN"):
        made.step(stepped, max_norm=math.nan)


def test_a_negative_norm_without_scaling() -> None:
    """With enabled=False, every step climbs instead of descending, in silence."""
    with pytest.raises(ValueError, match=r"max_norm= must be at least 0, not -1.0"):
        GradScaler("cpu", enabled=False).step(optimizer(), max_norm=-1.0)


def test_an_order_of_nan_without_scaling() -> None:
    """With enabled=False, all gradients become NaN, in silence."""
    with pytest.raises(ValueError, match=r"norm_type= is NaN"):
        GradScaler("cpu", enabled=False).step(optimizer(), max_norm=1.0, norm_type=math.nan)


@pytest.mark.parametrize("enabled", [True, False])
def test_norms_as_torch_takes_them(enabled: bool) -> None:
    """Torch's clipping takes tensors, text such as "inf" from a configuration file, and large ints."""
    found = []
    for norm_type in (float("inf"), "inf", 10**400, torch.tensor([math.inf])):
        scaled = scaler()
        made = scaled if enabled else GradScaler("cpu", enabled=False)
        max_norm: Any = torch.tensor([[0.5]]) if isinstance(norm_type, torch.Tensor) else "0.5"
        found.append(made.clip_grad_norm_(optimizer(), max_norm, norm_type))  # type: ignore[arg-type]
    assert found == found[:1] * 4


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: plugin.replace_backend(3), "needs an instance of amp_core.plugin.Backend, not int"),
        (lambda: amp_core.get_backend(None), "not by None"),
        (lambda: amp_core.get_backend(torch.device("cpu")), r"such as 'cuda', not by device\("),
        (lambda: scaler().step_closure(optimizer(), 3), "closure must be a function"),
        (lambda: AccumulationWindow(torch.amp.GradScaler("cpu"), optimizer()), "not torch.amp.grad_scaler"),
        (lambda: amp_core.master_weights(MODEL, optimizer(), "kahan", keep="0.*"), "must be a list of globs"),
        (lambda: amp_core.master_weights(MODEL, optimizer(), "kahan", keep=[3]), "must be a list of globs"),
        (lambda: amp_core.master_weights(MODEL, optimizer(), "stochastic", seed="x"), "seed= must be an int"),
        (lambda: amp_core.quantize(torch.eye(2).to_sparse(), MXFP8), "takes dense tensors"),
        (lambda: amp_core.quantize(torch.ones(2, 32), MXFP8, amax=1.0), "amax= must be a tensor"),  # type: ignore[arg-type]
        (lambda: amp_core.quantize(torch.ones(2, 32), MXFP8, seed="x"), "seed= must be an integer"),  # type: ignore[arg-type]
        (lambda: amp_core.apply_policy(MODEL, "p.toml"), r"pass pathlib\.Path\('p\.toml'\)"),  # type: ignore[arg-type]
        (lambda: amp_core.apply_policy(MODEL, OpPolicy("cpu")), r"autocast\(device, policy=\.\.\.\)"),  # type: ignore[arg-type]
        (lambda: amp_core.guard(MODEL, steps="10"), "must be a collection of numbers"),  # type: ignore[arg-type]
        (lambda: scaler().scale(torch.ones(()), key=[]), "key of a scale must be a string"),  # type: ignore[arg-type]
        (lambda: AccumulationWindow(scaler(), optimizer(), key=3), "key of a scale must be a string"),  # type: ignore[arg-type]
        (lambda: amp_core.cached_casts(MODEL).invalidate(MODEL.weight), r"such as \[model\.weight\]"),
        (lambda: amp_core.materialize(MODEL, (torch.ones(2, 2),), dtype="bfloat16"), "must be a torch.dtype"),  # type: ignore[arg-type]
        (lambda: amp_core.compare(lambda: None, "cpu", dtype="float16"), "must be a torch.dtype"),  # type: ignore[arg-type]
        (lambda: amp_core.advise(lambda: None, "cpu", dtype="float16"), "must be a torch.dtype"),  # type: ignore[arg-type]
        (lambda: amp_core.materialize(MODEL, torch.ones(1, 2)), r"args= must be a tuple .* \(x,\)"),  # type: ignore[arg-type]
    ],
)
def test_other_arguments(call: Callable[[], object], text: str) -> None:
    """An AttributeError from inside, or an error that names something else."""
    with pytest.raises(TypeError, match=text):
        call()


@pytest.mark.parametrize("tolerance", [-0.1, math.nan, "0.1", [0.1]])
def test_a_tolerance_is_an_error(tolerance: Any) -> None:
    """Advice for a tolerance that nothing can keep: 0 % of the work, or each rule changed."""
    kind = ValueError if isinstance(tolerance, float) else TypeError
    with pytest.raises(kind, match=r"tolerance= must be a (relative error|number)"):
        amp_core.advise(lambda: MODEL(torch.ones(1, 2)).sum(), "cpu", tolerance=tolerance)


@pytest.mark.parametrize("glob", ["2.*", "*norn*", "Weight"])
def test_a_glob_of_parameters_to_keep_matches_some(glob: str) -> None:
    """A typo stores the weights of a norm in bfloat16 without a word."""
    with pytest.raises(PolicyError, match=f"{re.escape(repr(glob))} matches no parameter of Linear"):
        amp_core.master_weights(MODEL, optimizer(), "kahan", keep=["*", glob])


def test_a_shared_weight_is_kept_under_each_of_its_names() -> None:
    """The glob matches the second name of a tied weight, which is stored all the same."""
    model = torch.nn.ModuleDict({"first": torch.nn.Linear(4, 4), "tied": torch.nn.Linear(4, 4)})
    model["tied"].weight = model["first"].weight  # type: ignore[assignment]
    stepped = torch.optim.SGD(model.parameters(), lr=0.1)
    with amp_core.master_weights(model, stepped, "remainder", keep=["tied.*"]):
        dtypes = {name: p.dtype for name, p in model.named_parameters()}
    assert dtypes == {
        "first.weight": torch.float32,
        "first.bias": torch.bfloat16,
        "tied.bias": torch.float32,
    }


@pytest.mark.parametrize(
    "given", [{"keep": ["*"]}, {"state_dtype": torch.bfloat16}, {"lost_updates": True}, {"debug": True}]
)
def test_arguments_of_another_storage_are_refused(given: dict[str, Any]) -> None:
    """What was asked for does not happen, and nothing says so."""
    storage = ("kahan",) if "debug" in given else ()
    with pytest.raises(ValueError, match=rf"{next(iter(given))}=\.\.\.\) needs .*no effect here"):
        amp_core.master_weights(MODEL, optimizer(), *storage, **given)


@pytest.mark.parametrize("rules", [None, (), "", 0])
def test_rules_that_are_none(rules: Any) -> None:
    """What is no mapping stands for no rules, so that a typo in a program changes nothing."""
    for use in (lambda: OpPolicy("cpu", rules), lambda: amp_core.apply_policy(MODEL, {"": rules})):
        with pytest.raises(PolicyError, match=r"Rules must be a mapping|is not a rule for a module"):
            use()


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ("e4m3", TypeError),
        ((4, 3.0), TypeError),
        (4, TypeError),
        ([], TypeError),
        ((1, 2), ValueError),
        ((16, 0), ValueError),
        ((4, -1), ValueError),
        (torch.int8, TypeError),
        (torch.bool, TypeError),
    ],
)
def test_formats_to_watch(given: Any, kind: type[Exception]) -> None:
    """An error about unpacking, a report against a format that there is not, or hooks that stay behind."""
    with pytest.raises(kind, match="format="):
        amp_core.watch(MODEL, format=given)
    assert not MODEL._forward_pre_hooks
    amp_core.watch(MODEL, format=(4, 3)).remove()


@pytest.mark.parametrize("device_type", ["auto", "cuda:0", "", 3, None, torch.device("cpu"), []])
def test_a_policy_is_for_a_type_of_device(device_type: Any) -> None:
    """A policy that no region can use, or the rules of no device, are returned."""
    for make in (OpPolicy, OpPolicy.default, OpPolicy.uniform, OpPolicy.float32):
        with pytest.raises(PolicyError, match="A policy is for one type of device, such as 'cuda'"):
            make(device_type)


@pytest.mark.parametrize("make", [OpPolicy.default, OpPolicy.float32])
def test_rules_of_a_device_that_is_not_known(make: Callable[[str], OpPolicy]) -> None:
    """A typo returns the uniform rules, as if they were those of the device."""
    with pytest.raises(amp_core.BackendNotFoundError, match="Did you mean 'cuda'"):
        make("cdua")


@pytest.mark.parametrize(
    ("entry", "value"),
    [("scale", "8"), ("scale", b"8"), ("_growth_tracker", 1.5), ("_growth_tracker", "3")],
)
def test_saved_numbers_that_are_none(entry: str, value: Any) -> None:
    """A damaged checkpoint is loaded, with another count than was saved."""
    made = scaler()
    before = made.state_dict()
    with pytest.raises(TypeError, match=rf"{entry.strip('_')} must be a (whole )?number, got {value!r}"):
        made.load_state_dict({**before, entry: value})
    assert made.state_dict() == before
    made.load_state_dict({**before, "_growth_tracker": 2.0})  # from a JSON file
    assert made.state_dict()["_growth_tracker"] == 2


@pytest.mark.parametrize("shape", [(1,), (1, 1)])
def test_a_new_scale_with_dimensions(shape: tuple[int, ...]) -> None:
    """A program runs with amp-core that torch refuses; or the text does not say how to mend it."""
    texts = []
    for kind in (torch.amp.GradScaler, GradScaler):
        made = kind("cpu", init_scale=8.0)
        made.scale(torch.ones(()))
        with pytest.raises(RuntimeError) as caught:
            made.update(torch.full(shape, 4.0))
        assert made.get_scale() == 8.0
        made.update(torch.tensor(4.0))
        assert made.get_scale() == 4.0
        texts.append(str(caught.value))
    assert texts[1].startswith(texts[0])
    assert "new_scale.reshape(())" in texts[1]


@pytest.mark.parametrize("new_scale", ["4", b"4", None, []])
def test_a_new_scale_that_is_no_number(new_scale: Any) -> None:
    """Text from a configuration file is taken, or the scale is half set."""
    made = scaler()
    with pytest.raises((TypeError, AssertionError), match=r"new_scale= must be a number|No inf checks"):
        made.update(new_scale)
    assert made.get_scale() == 4.0
