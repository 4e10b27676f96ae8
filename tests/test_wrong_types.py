"""Every public function, called with one odd argument at a time, takes it or refuses it in its own words."""

from __future__ import annotations

import inspect
import math
import re
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import amp_core

from .public_calls import CALLS

SOURCE = Path(amp_core.__file__).parent
ODD: dict[str, Any] = {
    "none": None,
    "blank": "",
    "text": "x",
    "bytes": b"x",
    "list": [],
    "tuple": (),
    "dict": {},
    "blanks": [""],
    "texts": ["x"],
    "nones": [None],
    "numbers": {"x": 1},
    "-1": -1,
    "0": 0,
    "3": 3,
    "-1.5": -1.5,
    "1.5": 1.5,
    "nan": math.nan,
    "inf": math.inf,
    "true": True,
    "complex": 1j,
    "tensor": torch.tensor([1, 2]),
    "nan_tensor": torch.tensor(math.nan),
    "bool_tensor": torch.tensor(True),
    "complex_tensor": torch.tensor(1j),
    "dtype": torch.float32,
    "integers": torch.int32,
    "object": object(),
}
ACCEPTED = {
    "AccumulationWindow.key": "none blank text",
    "DelayedScales.load_state_dict.state": "dict",
    "DelayedScales.step.optimizer": "none",
    "GradScaler.clip_grad_norm_.max_norm": "0 3 1.5 inf nan_tensor",
    "GradScaler.history": "none 0 3",
    "GradScaler.scale.key": "none blank text",
    "GradScaler.set_backoff_factor.new_factor": "",
    "LossScaleSchedule.constant.scale": "3 1.5",
    "OpPolicy.device_type": "text",
    "OpPolicy.from_lists.device_type": "text",
    "OpPolicy.from_toml.device_type": "none",
    "OpPolicy.from_toml.source": "blank",
    "OpPolicy.uniform.device_type": "text",
    "PrecisionPlan.from_toml.source": "blank",
    "PrecisionPlan.policy": "",
    "PrecisionPlan.state_dtype": "none dtype",
    "Quantized.dequantize.dtype": "dtype integers",
    "Watch.measured_in.format": "dtype",
    "activation_reduce_dtype": "none dtype",
    "advise.dtype": "none dtype",
    "advise.model": "none",
    "advise.optimizer": "none",
    "amax": "none",
    "apply_policy.device_type": "none text",
    "autocast.device_type": "tensor nan_tensor bool_tensor complex_tensor",
    "bwd": "none",
    "cast_inputs": "none dtype integers",
    "changes": "dict",
    "compare.dtype": "none dtype",
    "compare.model": "none",
    "compare.scale": "3 1.5",
    "convert_scaler_state.schedule": "",
    "custom_bwd.device_type": "blank text tensor nan_tensor bool_tensor complex_tensor",
    "custom_fwd.device_type": "blank text tensor nan_tensor bool_tensor complex_tensor",
    "device": "tensor nan_tensor bool_tensor complex_tensor",
    "dim": "-1",
    "dtype": "none dtype integers",
    "dynamic_shapes": "none blank list tuple dict nones",
    "every": "3",
    "float32_buffers": "list tuple blanks texts",
    "float32_parameters": "list tuple blanks texts",
    "format": "none",
    "fwd": "none",
    "grad_dtype": "none dtype",
    "granularity": "3",
    "growth_factor": "3 1.5",
    "growth_interval": "3",
    "hadamard": "none",
    "history": "3",
    "hysteresis": "3",
    "init_scale": "3 1.5",
    "keep": "list tuple",
    "key": "none",
    "kwargs": "none dict",
    "limit": "3",
    "lists": "dict",
    "logger": "none",
    "margin": "-1 0 3",
    "master_weights in bfloat16.keep": "list tuple dict",
    "master_weights.optimizer": "none",
    "master_weights.seed": "0",
    "materialize.device_type": "none tensor nan_tensor bool_tensor complex_tensor",
    "max_norm": "none 0 3 1.5 inf nan_tensor",
    "max_scale": "3 1.5 inf",
    "min_scale": "3 1.5",
    "modules": "dict",
    "named_parameters": "list tuple dict",
    "new_factor": "3 1.5",
    "new_interval": "3",
    "new_scale": "3 1.5",
    "norm_type": "3 1.5 inf",
    "origin": "none blank text",
    "origins": "dict numbers",
    "output_dtype": "none dtype",
    "outputs": "list tuple dict tensor nan_tensor bool_tensor complex_tensor",
    "param_dtype": "none dtype",
    "path": "text",
    "patience": "3",
    "phase": "none",
    "policy": "none",
    "process_group": "none",
    "quantize.seed": "none -1 0 3",
    "record.model": "none",
    "record.plan": "none",
    "reduce_dtype": "none dtype",
    "reference": "dtype",
    "rounds": "0 3",
    "rules": "dict",
    "schedule": "none",
    "schedules": "none dict",
    "seed": "-1 0 3",
    "sharded_over": "none dict",
    "state_dtype": "dtype",
    "steps": "none list tuple dict tensor nan_tensor bool_tensor complex_tensor",
    "tolerance": "none 0 3 1.5 inf",
    "unit": "none",
    "warn_after": "0 3",
    "watch.format": "none dtype",
    "weights": "none list tuple dict",
}
"""Argument, or call and argument -> the odd values that mean something there."""
OF_NUMPY = {
    "true": np.True_,
    "3": np.int64(3),
    "1.5": np.float32(1.5),
    "nan": np.float32(math.nan),
    "complex": np.complex64(3 + 1j),
}
"""Numbers that mean what those of Python do."""
ONLY_INT = {"margin", "Quantization.granularity", "Delayed.history", "Recipe.fp8_delayed.history"}
"""Arguments, or calls and arguments, that are refused as NumPy's integers."""
HUGE = 10**400
WARNED = {("GradScaler", "device")}
"""Arguments that may be anything, with a warning, as in torch."""
FLAGS_AND_REST = {("autocast", "cache_enabled"), ("advise", "progress"), ("OpPolicy", "kwargs")}
"""Arguments that are not tried, beside those that are True or False by default."""
RESULTS = """
Advice AtFloor BadParameter Comparison History Hysteresis LostUpdates MasterWeights OptState ScaleChange
StepRecord StoredWeights
"""
"""Public classes that programs do not call."""
AS_TORCH = {"backends", "checkpoint_contexts", "disable", "is_autocast_available"}
"""Functions without an argument, and one that passes it on to torch."""


def require_words(error: Exception, call: str) -> None:
    """Require that a ``raise`` of amp-core's made `error`, not the code that works with the argument."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    assert SOURCE in Path(last.filename).parents, f"{call}: {error!r}"
    assert (last.line or "").startswith("raise"), f"{call}: {error!r}"


def require_documented(error: Exception, function: Any, call: str) -> None:
    """Require that the docstring of `function` names the error, or a class that it derives from."""
    section = (inspect.getdoc(function) or "").partition("Raises:")[2]
    names = {kind.__name__ for kind in type(error).__mro__[:-3]}
    assert names & {*re.findall(r"^ {4}(\w+):", section, re.MULTILINE)}, f"{call}: {error!r}"


def state(function: Any, arguments: dict[str, Any]) -> list[Any]:
    """Return what a refused call must leave as it is."""
    found: list[Any] = [
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.initial_seed(),
    ]
    for value in (getattr(function, "__self__", None), *arguments.values()):
        if isinstance(value, torch.nn.Module):
            found += [sorted(vars(value)), len(value._forward_pre_hooks), len(value._forward_hooks)]
            found += [(p.dtype, p.tolist(), p.grad is None) for p in value.parameters()]
        elif isinstance(value, torch.optim.Optimizer):
            found += [value.state_dict(), [[*map(id, group["params"])] for group in value.param_groups]]
        elif isinstance(value, amp_core.GradScaler):  # its keys begin with their first use
            found += [{k: v for k, v in value.state_dict().items() if k != "_keys"}, len(value.history)]
    return found


@pytest.fixture
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def arguments_of(name: str) -> list[str]:
    return [argument for argument in CALLS[name]()[1] if (name, argument) not in WARNED]


def is_taken(name: str, argument: str, value: Any) -> bool:
    function, arguments = CALLS[name]()
    others = {key: other for key, other in arguments.items() if key != argument}
    before = state(function, others)
    try:
        result = function(**{**arguments, argument: value})
    except FileNotFoundError:  # a path is right
        return False
    except Exception as error:
        require_words(error, f"{name}({argument}={value!r})")
        require_documented(error, function, f"{name}({argument}={value!r})")
        assert state(function, others) == before, f"{name}({argument}={value!r})"
        return False
    if hasattr(result, "remove") and not isinstance(result, list):
        result.remove()
    return True


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("in_a_folder")
@pytest.mark.parametrize("name", CALLS)
def test_an_odd_value_is_taken_or_refused_where_it_is_passed(name: str) -> None:
    """`'int' object has no attribute 'rules'` from inside, an error no docstring names, or half a call."""
    for argument in arguments_of(name):
        taken = [label for label, value in ODD.items() if is_taken(name, argument, value)]
        expected = ACCEPTED.get(f"{name}.{argument}", ACCEPTED.get(argument, ""))
        assert taken == expected.split(), f"{name}({argument}=...)"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("in_a_folder")
@pytest.mark.parametrize("name", CALLS)
def test_a_number_of_numpy_is_taken_where_one_of_python_is(name: str) -> None:
    """True is refused as a loss scale, and NumPy's True is taken, or the real part of a complex number."""
    for argument in arguments_of(name):
        if not ONLY_INT & {argument, f"{name}.{argument}"}:
            for label, value in OF_NUMPY.items():
                assert is_taken(name, argument, value) is is_taken(name, argument, ODD[label]), argument


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("in_a_folder")
@pytest.mark.parametrize("name", CALLS)
def test_an_int_beyond_floats_is_taken_or_refused_where_it_is_passed(name: str) -> None:
    """`int too large to convert to float`, from inside."""
    for argument in arguments_of(name):
        is_taken(name, argument, HUGE)
        is_taken(name, argument, -HUGE)


@pytest.mark.parametrize("name", CALLS)
def test_every_argument_is_tried(name: str) -> None:
    """A new argument is checked by nobody."""
    function, arguments = CALLS[name]()
    for argument in inspect.signature(function).parameters.values():
        is_flag = isinstance(argument.default, bool)
        if argument.kind not in (argument.VAR_POSITIONAL, argument.VAR_KEYWORD) and not is_flag:
            assert argument.name in arguments or (name, argument.name) in FLAGS_AND_REST


def test_every_public_function_is_called() -> None:
    """A new function is checked by nobody."""
    called = {name.partition(".")[0] for name in CALLS} | AS_TORCH | {*RESULTS.split()}
    for name in {*amp_core.__all__} - called:
        value = getattr(amp_core, name)
        is_error = isinstance(value, type) and issubclass(value, BaseException)
        assert name.startswith("_") or is_error or not callable(value), name
