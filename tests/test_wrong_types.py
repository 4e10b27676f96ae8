"""Every public function, called with one argument of a wrong type at a time, refuses it in its own words."""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import amp_core
from amp_core import GradScaler, LossScaleSchedule, OpPolicy, PrecisionPlan, Recipe

SOURCE = Path(amp_core.__file__).parent
WRONG = [None, 3, "x", object(), [], torch.tensor([1, 2])]
MXFP8 = Recipe.mxfp8().input
PLAN = PrecisionPlan(OpPolicy("cpu"), param_dtype=torch.bfloat16, float32_parameters=("*",))
Call = tuple[Callable[..., Any], dict[str, Any]]


def of_model(function: Callable[..., Any], **arguments: Any) -> Call:
    return function, {"model": nn.Linear(4, 4), **arguments}


def with_optimizer(function: Callable[..., Any], **arguments: Any) -> Call:
    model = nn.Linear(4, 4)
    return function, {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), **arguments}


def of_scaler(method: str, **arguments: Any) -> Call:
    """Return a method of a scaler whose gradients are there."""
    model, scaler = nn.Linear(4, 4), GradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    if "optimizer" in arguments:
        arguments["optimizer"] = optimizer
    if method == "AccumulationWindow":
        return amp_core.AccumulationWindow, {"scaler": scaler, "optimizer": optimizer, "key": None}
    return getattr(scaler, method), arguments


def of_step(function: Callable[..., Any], **arguments: Any) -> Call:
    model = nn.Linear(4, 4)
    return function, {"fn": lambda: model(torch.ones(2, 4)).sum(), "device": "cpu", **arguments}


def of_run(run: Callable[[nn.Linear], Any], method: str, **arguments: Any) -> Call:
    """Return a method of what `run` returns for a model that took a step within it."""
    model = nn.Linear(4, 4)
    with run(model) as found:
        model(torch.ones(1, 4)).sum().backward()
    return getattr(found, method), arguments


def watched(model: nn.Module) -> Any:
    return amp_core.watch(model, every=1)


def function(x: torch.Tensor) -> torch.Tensor:
    return x


CALLS: dict[str, Callable[[], Call]] = {
    "OpPolicy": lambda: (OpPolicy, {"device_type": "cpu", "rules": {"mm": "fp32"}, "origins": {}}),
    "OpPolicy.default": lambda: (OpPolicy.default, {"device_type": "cpu"}),
    "OpPolicy.uniform": lambda: (OpPolicy.uniform, {"device_type": "cpu"}),
    "OpPolicy.float32": lambda: (OpPolicy.float32, {"device_type": "cpu"}),
    "OpPolicy.from_lists": lambda: (OpPolicy.from_lists, {"device_type": "cpu", "lists": {"fp32": "mm"}}),
    "OpPolicy.override": lambda: (OpPolicy("cpu").override, {"changes": {"mm": "fp32"}}),
    "OpPolicy.rule": lambda: (OpPolicy("cpu").rule, {"op": "mm"}),
    "OpPolicy.explain": lambda: (OpPolicy("cpu").explain, {"op": "mm"}),
    "OpPolicy.diff": lambda: (OpPolicy("cpu").diff, {"other": OpPolicy("cpu")}),
    "PrecisionPlan": lambda: (
        PrecisionPlan,
        {f.name: getattr(PLAN, f.name) for f in dataclasses.fields(PLAN) if f.name != "cast_forward_inputs"},
    ),
    "PrecisionPlan.apply": lambda: of_model(PLAN.apply),
    "PrecisionPlan.fsdp_policy": lambda: of_model(PLAN.fsdp_policy),
    "apply_policy": lambda: of_model(amp_core.apply_policy, rules={"": "fp32"}, device_type="cpu"),
    "get_backend": lambda: (amp_core.get_backend, {"device_type": "cpu"}),
    "replace_backend": lambda: (amp_core.plugin.replace_backend, {"backend": amp_core.get_backend("cpu")}),
    "autocast": lambda: (amp_core.autocast, {"device_type": "cpu", "policy": None}),
    "autocast_decorator": lambda: (
        amp_core.autocast_decorator,
        {"autocast_instance": amp_core.autocast("cpu"), "func": function},
    ),
    "custom_fwd": lambda: (
        amp_core.custom_fwd,
        {"fwd": function, "device_type": "cpu", "cast_inputs": torch.float32},
    ),
    "custom_bwd": lambda: (amp_core.custom_bwd, {"bwd": function, "device_type": "cpu"}),
    "materialize": lambda: of_model(amp_core.materialize, args=(torch.ones(1, 4),), dtype=None),
    "GradScaler": lambda: (
        GradScaler,
        {
            "device": "cpu",
            "init_scale": 2.0,
            "growth_factor": 2.0,
            "backoff_factor": 0.5,
            "growth_interval": 10,
            "schedule": LossScaleSchedule(),
            "named_parameters": (),
            "history": 10,
            "warn_after": 3,
            "schedules": {},
            "process_group": None,
        },
    ),
    "GradScaler.scale": lambda: of_scaler("scale", outputs=torch.ones(()), key="a"),
    "GradScaler.step": lambda: of_scaler("step", optimizer=0, max_norm=1.0, norm_type=2.0, key=None),
    "GradScaler.step_closure": lambda: of_scaler("step_closure", optimizer=0, closure=lambda: 0.0, key=None),
    "GradScaler.unscale_": lambda: of_scaler("unscale_", optimizer=0, key=None),
    "GradScaler.clip_grad_norm_": lambda: of_scaler(
        "clip_grad_norm_", optimizer=0, max_norm=1.0, norm_type=2.0, key=None
    ),
    "GradScaler.update": lambda: of_scaler("update", new_scale=4.0, key=None),
    "GradScaler.get_scale": lambda: of_scaler("get_scale", key=None),
    "GradScaler.set_growth_factor": lambda: of_scaler("set_growth_factor", new_factor=3.0),
    "GradScaler.set_backoff_factor": lambda: of_scaler("set_backoff_factor", new_factor=0.3),
    "GradScaler.set_growth_interval": lambda: of_scaler("set_growth_interval", new_interval=4),
    "GradScaler.landed": lambda: of_scaler("landed", optimizer=0),
    "GradScaler.name_parameters": lambda: of_scaler("name_parameters", named_parameters=()),
    "GradScaler.load_state_dict": lambda: of_scaler("load_state_dict", state_dict=0),
    "GradScaler.register_step_hook": lambda: of_scaler("register_step_hook", hook=print),
    "AccumulationWindow": lambda: of_scaler("AccumulationWindow"),
    "LossScaleSchedule": lambda: (LossScaleSchedule, dataclasses.asdict(LossScaleSchedule())),
    "LossScaleSchedule.constant": lambda: (LossScaleSchedule.constant, {"scale": 4.0}),
    "convert_scaler_state": lambda: (
        amp_core.convert_scaler_state,
        {"state": {}, "to": "torch", "source": "amp_core", "schedule": LossScaleSchedule()},
    ),
    "cached_casts": lambda: of_model(amp_core.cached_casts),
    "CachedCasts.invalidate": lambda: of_run(amp_core.cached_casts, "invalidate", weights=()),
    "master_weights": lambda: with_optimizer(
        amp_core.master_weights, seed=0, state_dtype=torch.float32, keep=()
    ),
    "count_lost_updates": lambda: with_optimizer(amp_core.count_lost_updates),
    "delayed_scales": lambda: of_model(amp_core.delayed_scales, process_group=None),
    "DelayedScales.step": lambda: of_run(amp_core.delayed_scales, "step", optimizer=None),
    "watch": lambda: of_model(amp_core.watch, every=1, format=torch.float16, limit=10),
    "Watch.measured_in": lambda: of_run(watched, "measured_in", format=(4, 3)),
    "Watch.diff": lambda: of_run(watched, "diff", other=None),
    "guard": lambda: of_model(amp_core.guard, steps=None, patience=3),
    "record": lambda: of_model(amp_core.record, plan=PLAN),
    "Recording.violations": lambda: of_run(amp_core.record, "violations", plan=PLAN),
    "Recording.diff": lambda: of_run(amp_core.record, "diff", other=None),
    "compare": lambda: of_step(
        amp_core.compare,
        policy=None,
        format=None,
        reference=torch.float32,
        scale=1.0,
        model=None,
        seed=0,
        limit=9,
    ),
    "advise": lambda: of_step(
        amp_core.advise,
        policy=None,
        format=None,
        tolerance=0.1,
        rounds=1,
        limit=9,
        goal="accuracy",
        optimizer=None,
    ),
    "quantize": lambda: (
        amp_core.quantize,
        {"tensor": torch.ones(4, 32), "quantization": MXFP8, "dim": -1, "seed": 0, "amax": torch.ones(4, 1)},
    ),
    "Quantized.dequantize": lambda: (
        amp_core.quantize(torch.ones(4, 32), MXFP8).dequantize,
        {"dtype": torch.float32},
    ),
    "Quantization": lambda: (amp_core.Quantization, {f: getattr(MXFP8, f) for f in vars(MXFP8)}),
    "Delayed": lambda: (amp_core.Delayed, {"history": 4, "margin": 0, "algorithm": "max"}),
    "Recipe.named": lambda: (Recipe.named, {"name": "mxfp8"}),
    "Recipe.mxfp8": lambda: (Recipe.mxfp8, {"element": MXFP8.element, "scale": "e8m0"}),
    "Recipe.from_toml": lambda: (Recipe.from_toml, {"source": Recipe.mxfp8().to_toml()}),
}
NEVER_RIGHT = {
    ("PrecisionPlan", "policy"),
    ("OpPolicy.diff", "other"),
    ("Watch.diff", "other"),
    ("Recording.diff", "other"),
}
"""The arguments for which all of `WRONG` are wrong, of functions that only keep them."""


def require_words(error: Exception, call: str) -> None:
    """Require that a ``raise`` of amp-core's made `error`, not the code that works with the argument."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    assert SOURCE in Path(last.filename).parents, f"{call}: {error!r}"
    assert (last.line or "").startswith("raise"), f"{call}: {error!r}"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_type_is_refused_where_it_is_passed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`'int' object has no attribute 'rules'` from inside, or the error comes later from somewhere else."""
    monkeypatch.chdir(tmp_path)
    function, arguments = CALLS[name]()
    for argument in arguments:
        for value in WRONG:
            function, arguments = CALLS[name]()
            call = f"{name}({argument}={value!r})"
            try:
                result = function(**{**arguments, argument: value})
            except FileNotFoundError:  # a path is right
                continue
            except Exception as error:
                require_words(error, call)
            else:
                assert (name, argument) not in NEVER_RIGHT, f"{call} is taken"
                if hasattr(result, "remove") and not isinstance(result, list):
                    result.remove()
