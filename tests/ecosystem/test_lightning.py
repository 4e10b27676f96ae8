"""Lightning's Trainer and Fabric with amp-core's precision plugins: the real packages."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("lightning", reason="Lightning is not installed; tox -e ecosystem installs it")

import lightning as L
from torch.utils.data import DataLoader, TensorDataset

from amp_core import GradScaler, OpPolicy
from amp_core.integrations.lightning import FabricMixedPrecision, HoldSchedulers, MixedPrecision

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's own
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def batches() -> DataLoader:
    torch.manual_seed(0)
    x = torch.randn(32, 8)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)


class Module(L.LightningModule):
    def __init__(self, fused: bool = True, overflow_at: int = -1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
        self.fused, self.overflow_at = fused, overflow_at
        self.dtypes: set[torch.dtype] = set()
        self.losses: list[float] = []

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        x, y = batch
        out = self.net(x)
        self.dtypes.add(out.dtype)
        loss = nn.functional.mse_loss(out.float(), y)
        self.losses.append(float(loss))
        return loss * math.inf if index == self.overflow_at else loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01, fused=self.fused)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


@pytest.mark.parametrize("fused", [True, False])
def test_training_with_clipping_and_accumulation(fused: bool, tmp_path: Any) -> None:
    """Lightning refuses to clip with fused optimizers (Lightning#15501)."""
    module = Module(fused)
    plugin = MixedPrecision("16-mixed", "cpu", GradScaler("cpu", 1024.0))
    trainer = L.Trainer(
        **QUIET,
        max_epochs=2,
        plugins=[plugin],
        gradient_clip_val=0.5,
        accumulate_grad_batches=2,
        default_root_dir=tmp_path,
    )
    trainer.fit(module, batches())
    assert module.dtypes == {torch.float16}
    assert len(plugin.scaler.history) == 8
    assert all(record.total_norm is not None and not record.skipped for record in plugin.scaler.history)
    assert sum(module.losses[-4:]) < sum(module.losses[:4])


def test_a_skipped_step_holds_its_scheduler_back(tmp_path: Any) -> None:
    """The learning rate decays although nothing was learned (Lightning#18828)."""
    rates = []
    for callbacks in ([], [HoldSchedulers()]):
        module = Module(overflow_at=3)
        plugin = MixedPrecision("16-mixed", "cpu", GradScaler("cpu", 1024.0))
        trainer = L.Trainer(
            **QUIET, max_epochs=1, plugins=[plugin], callbacks=callbacks, default_root_dir=tmp_path
        )
        trainer.fit(module, batches())
        assert [record.skipped for record in plugin.scaler.history].count(True) == 1
        rates.append(trainer.optimizers[0].param_groups[0]["lr"])
    assert rates == [0.01 * 0.5**8, 0.01 * 0.5**7]


def test_checkpoint_and_resume(tmp_path: Any) -> None:
    """The scale starts anew after a checkpoint."""
    trainer = L.Trainer(
        **QUIET,
        max_epochs=1,
        plugins=[MixedPrecision("16-mixed", "cpu", GradScaler("cpu", 512.0, growth_interval=3))],
        default_root_dir=tmp_path,
    )
    trainer.fit(Module(), batches())
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    plugin = MixedPrecision("16-mixed", "cpu", GradScaler("cpu"))
    again = L.Trainer(**QUIET, max_epochs=2, plugins=[plugin], default_root_dir=tmp_path)
    again.fit(Module(), batches(), ckpt_path=tmp_path / "last.ckpt", weights_only=False)
    assert plugin.scaler.history[0].scale_before == 2048.0


def test_a_policy_of_ones_own(tmp_path: Any) -> None:
    """The policy does not reach the forward."""
    module = Module()
    policy = OpPolicy.default("cpu").override({"linear": "fp32"})
    plugin = MixedPrecision("bf16-mixed", "cpu", policy=policy)
    L.Trainer(**QUIET, max_steps=1, plugins=[plugin], default_root_dir=tmp_path).fit(module, batches())
    assert module.dtypes == {torch.float32}


def test_fabric_clips_with_a_fused_optimizer() -> None:
    """Fabric refuses to clip with fused optimizers."""
    plugin = FabricMixedPrecision("16-mixed", "cpu", GradScaler("cpu", 1024.0))
    fabric = L.Fabric(accelerator="cpu", plugins=[plugin])
    module = Module().net
    model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=0.01, fused=True))
    losses = []
    for _ in range(2):
        for x, y in batches():
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            losses.append(float(loss))
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
    assert sum(losses[-4:]) < sum(losses[:4])
    assert len(plugin.scaler.history) == 16
