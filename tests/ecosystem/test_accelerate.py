"""accelerate and transformers over amp-core: the real packages, on the CPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("accelerate", reason="accelerate is not installed; tox -e ecosystem installs it")
pytest.importorskip("transformers", reason="transformers is not installed; tox -e ecosystem installs it")

from accelerate.state import AcceleratorState
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from amp_core import GradScaler
from amp_core.integrations.accelerate import Accelerator
from amp_core.integrations.transformers import Trainer

pytestmark = pytest.mark.filterwarnings("ignore")  # of the trainers' own


def prepared(accelerator: Accelerator, fused: bool) -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    x = torch.randn(32, 8)
    data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)
    return accelerator.prepare(model, optimizer, data, scheduler)


@pytest.mark.parametrize("fused", [True, False])
def test_training_with_accumulation_clipping_and_an_overflow(fused: bool) -> None:
    """A skipped step is not noticed with a fused optimizer (accelerate#4242), so its scheduler moves on."""
    accelerator = Accelerator(
        mixed_precision="fp16", scaler=GradScaler("cpu", 1024.0), gradient_accumulation_steps=2, cpu=True
    )
    model, optimizer, data, scheduler = prepared(accelerator, fused)
    skipped, losses = [], []
    for epoch in range(3):
        for number, (x, y) in enumerate(data):
            with accelerator.accumulate(model):
                with accelerator.autocast():
                    assert torch.mm(x, x.t()).dtype is torch.float16
                loss = nn.functional.mse_loss(model(x), y)
                losses.append(float(loss))
                accelerator.backward(loss * math.inf if (epoch, number) == (1, 2) else loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                if accelerator.sync_gradients:
                    skipped.append(optimizer.step_was_skipped)
                optimizer.zero_grad()
    assert skipped == [number == 5 for number in range(12)]
    assert accelerator.scaler.get_scale() == 512.0
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01 * 0.9**11)
    assert sum(losses[-4:]) < sum(losses[:4])


def test_clipping_each_micro_batch_is_refused() -> None:
    """The second call takes gradients that are scaled in part for unscaled ones, and the weights are lost."""
    accelerator = Accelerator(mixed_precision="fp16", gradient_accumulation_steps=2, cpu=True)
    model, optimizer, data, _ = prepared(accelerator, fused=False)
    batches = iter(data)

    def micro_batch() -> None:
        x, y = next(batches)
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            accelerator.clip_grad_norm_(model.parameters(), 1e9)
            optimizer.step()

    micro_batch()
    with pytest.raises(RuntimeError, match="last backward pass"):
        micro_batch()


@pytest.mark.parametrize("saves", [True, False])
def test_several_optimizers(tmp_path: Any, saves: bool) -> None:
    """The second unscales by the scale that the step of the first has left, or twice if both clip."""
    losses: dict[str, list[float]] = {"no": [], "fp16": []}
    for precision, found in losses.items():
        scaler = GradScaler("cpu", 8.0, growth_interval=1) if precision == "fp16" else None
        AcceleratorState._reset_state()
        accelerator = Accelerator(mixed_precision=precision, scaler=scaler, cpu=True)
        torch.manual_seed(0)
        parts = nn.Linear(8, 32), nn.Linear(32, 1)
        model = accelerator.prepare(nn.Sequential(*parts))
        optimizers = [accelerator.prepare(torch.optim.SGD(part.parameters(), lr=0.1)) for part in parts]
        for number, x in enumerate(torch.randn(8, 4, 8)):
            loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
            found.append(float(loss))
            accelerator.backward(loss * math.inf if precision == "fp16" and number == 3 else loss)
            for part, optimizer in zip(parts, optimizers, strict=True):
                accelerator.clip_grad_norm_(part.parameters(), 0.5)
                if precision == "fp16" or number != 3:
                    optimizer.step()
            if scaler is not None:
                assert [each.step_was_skipped for each in optimizers] == [number == 3] * 2
            for optimizer in optimizers:
                optimizer.zero_grad()
    assert losses["fp16"] == pytest.approx(losses["no"], rel=1e-2)
    assert accelerator.scaler is not None
    if saves:
        accelerator.save_state(str(tmp_path))
    else:
        accelerator.end_training()
    assert accelerator.scaler.get_scale() == 8.0 * 2**6


def test_checkpoint_and_resume(tmp_path: Any) -> None:
    """The scale starts anew after a checkpoint."""
    first = Accelerator(mixed_precision="fp16", scaler=GradScaler("cpu", 64.0), cpu=True)
    model, optimizer, data, _ = prepared(first, True)
    for x, y in data:
        first.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    first.scaler.update(256.0)
    first.save_state(str(tmp_path))
    second = Accelerator(mixed_precision="fp16", scaler=GradScaler("cpu"), cpu=True)
    again = prepared(second, True)[0]
    second.load_state(str(tmp_path))
    assert second.scaler.get_scale() == 256.0
    for ours, theirs in zip(again.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_transformers_trainer(tmp_path: Any) -> None:
    """Training, clipping, accumulation, checkpoint and resume of a real model, in float16 on the CPU."""
    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2)
    tokens = torch.arange(32 * 32).reshape(32, 32) % 64
    data = [{"input_ids": row, "labels": row} for row in tokens]

    def trainer(scaler: GradScaler, steps: int) -> Trainer:
        torch.manual_seed(0)
        arguments = TrainingArguments(
            output_dir=str(tmp_path),
            use_cpu=True,
            fp16=True,
            max_steps=steps,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            max_grad_norm=1.0,
            save_steps=4,
            learning_rate=1e-2,
            report_to=[],
            logging_steps=1,
            disable_tqdm=True,
        )
        model = GPT2LMHeadModel(config)
        return Trainer(model, arguments, train_dataset=data, scaler=scaler)

    scaler = GradScaler("cpu", 1024.0)
    first = trainer(scaler, 8)
    first.train()
    losses = [entry["loss"] for entry in first.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    assert len(scaler.history) == 8
    resumed = trainer(GradScaler("cpu", 8.0), 9)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 9
    assert len(resumed.accelerator.scaler.history) == 1
    assert resumed.accelerator.scaler.history[0].scale_before == 1024.0
