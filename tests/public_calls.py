"""A right call of each public function, for tests that replace its arguments."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import amp_core
from amp_core import GradScaler, LossScaleSchedule, OpPolicy, PrecisionPlan, Recipe

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


def stepped() -> GradScaler:
    """Return a scaler with a history."""
    step, arguments = of_scaler("step", optimizer=0)
    step(**arguments)
    return step.__self__  # type: ignore[attr-defined, no-any-return]


def compared() -> amp_core.Comparison:
    compare, arguments = of_step(amp_core.compare)
    return compare(**arguments)  # type: ignore[no-any-return]


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
    "OpPolicy.override": lambda: (OpPolicy("cpu").override, {"changes": {"mm": "fp32"}, "origin": "here"}),
    "OpPolicy.rule": lambda: (OpPolicy("cpu").rule, {"op": "mm"}),
    "OpPolicy.explain": lambda: (OpPolicy("cpu").explain, {"op": "mm"}),
    "OpPolicy.diff": lambda: (OpPolicy("cpu").diff, {"other": OpPolicy("cpu")}),
    "PrecisionPlan": lambda: (
        PrecisionPlan,
        {f.name: getattr(PLAN, f.name) for f in dataclasses.fields(PLAN) if f.name != "cast_forward_inputs"},
    ),
    "PrecisionPlan.apply": lambda: of_model(PLAN.apply),
    "PrecisionPlan.fsdp_policy": lambda: of_model(PLAN.fsdp_policy, unit=None),
    "apply_policy": lambda: of_model(amp_core.apply_policy, rules={"": "fp32"}, device_type="cpu"),
    "get_backend": lambda: (amp_core.get_backend, {"device_type": "cpu"}),
    "replace_backend": lambda: (amp_core.plugin.replace_backend, {"backend": amp_core.get_backend("cpu")}),
    "autocast": lambda: (amp_core.autocast, {"device_type": "cpu", "dtype": None, "policy": None}),
    "autocast_decorator": lambda: (
        amp_core.autocast_decorator,
        {"autocast_instance": amp_core.autocast("cpu"), "func": function},
    ),
    "custom_fwd": lambda: (
        amp_core.custom_fwd,
        {"fwd": function, "device_type": "cpu", "cast_inputs": torch.float32},
    ),
    "custom_bwd": lambda: (amp_core.custom_bwd, {"bwd": function, "device_type": "cpu"}),
    "materialize": lambda: of_model(
        amp_core.materialize,
        args=(torch.ones(1, 4),),
        kwargs=None,
        policy=None,
        device_type="cpu",
        dtype=None,
        dynamic_shapes=None,
    ),
    "GradScaler": lambda: (
        GradScaler,
        {
            "device": "cpu",
            "init_scale": 2.0,
            "growth_factor": 2.0,
            "backoff_factor": 0.5,
            "growth_interval": 10,
            "schedule": None,
            "named_parameters": (),
            "history": 10,
            "warn_after": 3,
            "schedules": {},
            "process_group": None,
            "sharded_over": None,
        },
    ),
    "GradScaler.scale": lambda: of_scaler("scale", outputs=torch.ones(()), key="a"),
    "GradScaler.step": lambda: of_scaler("step", optimizer=0, max_norm=1.0, norm_type=2.0, key=None),
    "GradScaler.step_closure": lambda: of_scaler(
        "step_closure", optimizer=0, closure=lambda: 0.0, max_norm=1.0, norm_type=2.0, key=None
    ),
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
        amp_core.master_weights, storage="fp32", seed=0, state_dtype=torch.float32, keep=()
    ),
    "master_weights in bfloat16": lambda: with_optimizer(
        amp_core.master_weights, storage="remainder", seed=0, state_dtype=torch.float32, keep=()
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
        dtype=None,
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
        dtype=None,
        model=None,
        seed=0,
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
    "Recipe.mxfp6": lambda: (Recipe.mxfp6, {"element": Recipe.mxfp6().input.element, "scale": "e8m0"}),
    "Recipe.fp8_delayed": lambda: (Recipe.fp8_delayed, {"history": 4, "margin": 0}),
    "Recipe.operands": lambda: (Recipe.mxfp8().operands, {"product": "output"}),
    "Recipe.from_toml": lambda: (Recipe.from_toml, {"source": Recipe.mxfp8().to_toml()}),
    "OpPolicy.from_toml": lambda: (
        OpPolicy.from_toml,
        {"source": OpPolicy("cpu").to_toml(), "device_type": "cpu"},
    ),
    "PrecisionPlan.from_toml": lambda: (
        PrecisionPlan.from_toml,
        {"source": 'device_type = "cpu"', "device_type": "cpu"},
    ),
    "Recording.save": lambda: of_run(amp_core.record, "save", path="recording"),
    "Recording.check": lambda: of_run(amp_core.record, "check", plan=PLAN),
    "History.plot": lambda: (stepped().history.plot, {"path": "history.png"}),
    "DelayedScales.load_state_dict": lambda: of_run(amp_core.delayed_scales, "load_state_dict", state={}),
    "Comparison.at": lambda: (compared().at, {"level": "op", "phase": None}),
    "Comparison.leads": lambda: (compared().leads, {"tolerance": 0.1}),
    "script": lambda: (amp_core.script, {"fn": function}),
    "JsonLines": lambda: (amp_core.callbacks.JsonLines, {"path": "steps.jsonl"}),
    "Logging": lambda: (amp_core.callbacks.Logging, {"logger": None}),
    "Listener.listen": lambda: (amp_core.callbacks.Logging().listen, {"scaler": GradScaler("cpu")}),
}
