"""Every setting of accelerate and of transformers' Trainer is obeyed or refused in words."""

from __future__ import annotations

import dataclasses
import inspect
import pickle
import re
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

pytest.importorskip("accelerate", reason="accelerate is not installed; tox -e ecosystem installs it")
pytest.importorskip("transformers", reason="transformers is not installed; tox -e ecosystem installs it")

import accelerate
import transformers
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import AutocastKwargs, DistributedType, GradScalerKwargs

from amp_core import GradScaler, OpPolicy
from amp_core.integrations.accelerate import Accelerator
from amp_core.integrations.transformers import Trainer

pytestmark = pytest.mark.filterwarnings("ignore")  # of the trainers' own

# accelerate's settings that have nothing to do with precision: they reach accelerate as they are.
PASSED_ON = {
    "cpu",
    "dataloader_config",
    "deepspeed_plugin",
    "deepspeed_plugins",
    "device_placement",
    "dynamo_backend",
    "dynamo_plugin",
    "fsdp_plugin",
    "gradient_accumulation_plugin",
    "gradient_accumulation_steps",
    "log_with",
    "megatron_lm_plugin",
    "parallelism_config",
    "project_config",
    "project_dir",
    "rng_types",
    "split_batches",
    "step_scheduler_with_optimizer",
    "torch_tp_plugin",
}
TESTED_BELOW = {"mixed_precision", "kwargs_handlers"}


@pytest.fixture(autouse=True)
def _new_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give each test a process in which no accelerator was made."""
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def parameters(function: Any) -> set[str]:
    """Return the names of a function's parameters, but for ``self`` and ``**kwargs``."""
    found = inspect.signature(function).parameters.values()
    return {p.name for p in found if p.kind is not p.VAR_KEYWORD} - {"self"}


def dtype_of_a_forward(accelerator: Accelerator) -> torch.dtype:
    """Return the dtype in which a prepared linear layer computes."""
    seen = []
    model = nn.Sequential(nn.Linear(4, 4), nn.Identity())
    model[1].register_forward_hook(lambda _m, _args, out: seen.append(out.dtype))
    output = accelerator.prepare(model)(torch.ones(2, 4))
    assert output.dtype is torch.float32  # as accelerate's
    return seen[0]


def dtype_of_an_op() -> torch.dtype:
    return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


def test_the_settings_of_accelerate_are_known() -> None:
    """A new version of accelerate has a setting that nobody thought of here."""
    assert parameters(accelerate.Accelerator.__init__) == PASSED_ON | TESTED_BELOW
    assert parameters(accelerate.Accelerator.autocast) == {"autocast_handler"}
    assert parameters(accelerate.Accelerator.unwrap_model) == {
        "model",
        "keep_fp32_wrapper",
        "keep_torch_compile",
    }
    assert {f.name for f in dataclasses.fields(AutocastKwargs)} == {"enabled", "cache_enabled"}
    assert {f.name for f in dataclasses.fields(GradScalerKwargs)} == {
        "init_scale",
        "growth_factor",
        "backoff_factor",
        "growth_interval",
        "enabled",
    }


@pytest.mark.parametrize("name", sorted(PASSED_ON | TESTED_BELOW))
def test_a_setting_reaches_accelerate(name: str) -> None:
    """A setting is swallowed on its way."""

    class Arrived(Exception):
        pass

    def arrive(_self: Any, **kwargs: Any) -> None:
        raise Arrived(kwargs)

    with mock.patch.object(accelerate.Accelerator, "__init__", arrive), pytest.raises(Arrived) as caught:
        Accelerator(**{name: "value"})
    assert caught.value.args == ({name: "value"},)


@pytest.mark.parametrize(
    ("precision", "dtype"), [("no", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
@pytest.mark.parametrize("way", ["argument", "environment"])
def test_mixed_precision(
    precision: str, dtype: torch.dtype, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dtype is another than the one asked for, or the accelerator reports another."""
    if way == "environment":
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", precision)
        accelerator = Accelerator(cpu=True)
    else:
        accelerator = Accelerator(cpu=True, mixed_precision=precision)
    assert accelerator.mixed_precision == precision
    assert (accelerator.scaler is not None) == (precision == "fp16")
    assert dtype_of_a_forward(accelerator) is dtype
    with accelerator.autocast():
        assert dtype_of_an_op() is dtype
    assert accelerator.autocast()(dtype_of_an_op)() is dtype


def test_arguments_by_position() -> None:
    """A script that passes them so, as to accelerate's own class, fails."""
    accelerator = Accelerator(True, False, "bf16", cpu=True)
    assert accelerator.mixed_precision == "bf16"


def test_no_mixed_precision_is_the_default() -> None:
    """A script that asks for nothing trains in low precision."""
    accelerator = Accelerator(cpu=True)
    assert accelerator.mixed_precision == "no"
    assert dtype_of_a_forward(accelerator) is torch.float32


def test_autocast_kwargs() -> None:
    """`AutocastKwargs` are ignored, of the accelerator or of one block."""
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    with accelerator.autocast(AutocastKwargs(enabled=False)):
        assert dtype_of_an_op() is torch.float32
    with accelerator.autocast():
        assert dtype_of_an_op() is torch.bfloat16
    off = Accelerator(cpu=True, mixed_precision="bf16", kwargs_handlers=[AutocastKwargs(enabled=False)])
    assert dtype_of_a_forward(off) is torch.float32
    with off.autocast():
        assert dtype_of_an_op() is torch.float32
    with off.autocast(AutocastKwargs(cache_enabled=False)):
        assert dtype_of_an_op() is torch.bfloat16
        assert not torch.is_autocast_cache_enabled()


@pytest.mark.parametrize(
    ("name", "value", "read"),
    [
        ("init_scale", 1024.0, "get_scale"),
        ("growth_factor", 4.0, "get_growth_factor"),
        ("backoff_factor", 0.25, "get_backoff_factor"),
        ("growth_interval", 7, "get_growth_interval"),
        ("enabled", False, "is_enabled"),
    ],
)
def test_grad_scaler_kwargs(name: str, value: Any, read: str) -> None:
    """`GradScalerKwargs` are ignored."""
    handler = GradScalerKwargs(**{name: value})
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[handler])
    assert type(accelerator.scaler) is GradScaler
    assert getattr(accelerator.scaler, read)() == value


def test_a_disabled_scaler_trains() -> None:
    """``GradScalerKwargs(enabled=False)`` breaks the optimizer."""
    handler = GradScalerKwargs(enabled=False)
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[handler])
    model = nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    accelerator.backward(model(torch.ones(2, 4)).sum())
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    assert not optimizer.step_was_skipped


def test_unwrap_model() -> None:
    """An unwrapped model still casts, or cannot be pickled; or a wrapped one lost its region."""
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = accelerator.prepare(nn.Linear(4, 4))
    assert accelerator.unwrap_model(model) is model
    x = torch.randn(2, 4)
    low = model(x)
    bare = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    exact = nn.functional.linear(x, bare.weight, bare.bias)
    assert torch.equal(bare(x), exact)
    assert not torch.equal(low, exact)
    assert torch.equal(pickle.loads(pickle.dumps(bare))(x), exact)


def test_step_records_name_parameters() -> None:
    """Records name shapes, since the trainer makes the scaler without the model."""
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    model = nn.Sequential(nn.Linear(4, 1))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    accelerator.backward(model(torch.ones(2, 4)).sum() * torch.inf)
    optimizer.step()
    assert {bad.name for bad in accelerator.scaler.history[0].bad_parameters} == {"0.weight", "0.bias"}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"scaler": "given"}, "scaler= needs mixed_precision='fp16', and mixed_precision is 'no'"),
        ({"scaler": "given", "mixed_precision": "bf16"}, "mixed_precision is 'bf16'"),
        (
            {"scaler": "given", "mixed_precision": "fp16", "kwargs_handlers": [GradScalerKwargs()]},
            "both configure the scaler",
        ),
        ({"policy": "given"}, "policy= needs mixed precision"),
    ],
)
def test_contradictions_are_refused(settings: dict[str, Any], words: str) -> None:
    """Of two settings that contradict each other one is dropped."""
    given = {"scaler": GradScaler("cpu"), "policy": OpPolicy.default("cpu")}
    settings = {name: given[name] if value == "given" else value for name, value in settings.items()}
    with pytest.raises(ValueError, match=words):
        Accelerator(cpu=True, **settings)


def test_a_scaler_of_torchs_is_refused() -> None:
    """A scaler of torch's gets as far as the first method that it lacks."""
    with pytest.raises(TypeError, match=r"amp_core.GradScaler, not a torch.amp.grad_scaler.GradScaler"):
        Accelerator(cpu=True, mixed_precision="fp16", scaler=torch.amp.GradScaler("cpu"))


@pytest.mark.parametrize("kind", [DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM])
def test_libraries_with_a_mixed_precision_of_their_own_are_refused(
    kind: DistributedType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSpeed trains with its own mixed precision although amp-core's was asked for."""
    monkeypatch.setattr(Accelerator, "distributed_type", kind)
    with pytest.raises(ValueError, match="handles mixed precision itself"):
        Accelerator(cpu=True)


def test_fp8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """fp8 runs in another dtype without a word."""
    monkeypatch.setattr(Accelerator, "mixed_precision", "fp8")
    with pytest.raises(ValueError, match="does not support mixed_precision='fp8'"):
        Accelerator(cpu=True)


# transformers: what its arguments say of precision.
PRECISION_ARGUMENTS = {"bf16", "fp16", "bf16_full_eval", "fp16_full_eval", "tf32"}


def test_the_settings_of_transformers_are_known() -> None:
    """A new version of transformers has a setting of precision that nobody thought of here."""
    words = re.compile(r"fp16|bf16|float16|tf32|precision|autocast|\bamp\b|scaler", re.IGNORECASE)
    fields = dataclasses.fields(transformers.TrainingArguments)
    about = {f.name for f in fields if words.search(f.name)}
    assert about == PRECISION_ARGUMENTS


def trainer(tmp_path: Any, **settings: Any) -> Trainer:
    config = transformers.GPT2Config(vocab_size=64, n_positions=8, n_embd=16, n_layer=1, n_head=2)
    arguments = {name: settings.pop(name) for name in PRECISION_ARGUMENTS & set(settings)}
    data = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 4
    return Trainer(
        transformers.GPT2LMHeadModel(config),
        transformers.TrainingArguments(
            str(tmp_path), use_cpu=True, max_steps=2, report_to=[], disable_tqdm=True, **arguments
        ),
        train_dataset=data,
        eval_dataset=data,
        **settings,
    )


@pytest.mark.parametrize(
    ("arguments", "dtype"),
    [({}, torch.float32), ({"bf16": True}, torch.bfloat16), ({"fp16": True}, torch.float16)],
)
def test_precision_of_training_arguments(
    tmp_path: Any, arguments: dict[str, Any], dtype: torch.dtype
) -> None:
    """``fp16`` and ``bf16`` of the arguments are ignored."""
    ours = trainer(tmp_path, **arguments)
    seen = set()
    ours.model.transformer.h[0].mlp.c_fc.register_forward_hook(lambda _m, _args, out: seen.add(out.dtype))
    ours.train()
    assert seen == {dtype}
    assert (ours.accelerator.scaler is not None) == (dtype is torch.float16)


@pytest.mark.parametrize(
    ("name", "dtype"), [("fp16_full_eval", torch.float16), ("bf16_full_eval", torch.bfloat16)]
)
def test_evaluation_in_low_precision(tmp_path: Any, name: str, dtype: torch.dtype) -> None:
    """``fp16_full_eval`` of the arguments is ignored: the weights themselves are cast for evaluation."""
    ours = trainer(tmp_path, **{name: True})
    seen = set()
    block = ours.model.transformer.h[0].mlp
    block.register_forward_hook(lambda module, _args, _out: seen.add(module.c_fc.weight.dtype))
    ours.evaluate()
    assert seen == {dtype}


def test_trainer_refuses_contradictions(tmp_path: Any) -> None:
    """`scaler=` without ``fp16`` is dropped."""
    with pytest.raises(ValueError, match="needs mixed_precision='fp16'"):
        trainer(tmp_path, scaler=GradScaler("cpu"))
