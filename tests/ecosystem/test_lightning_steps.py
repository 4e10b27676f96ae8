"""Which gradients a step of Lightning takes: manual optimization, steps left out, and held schedulers."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("lightning", reason="Lightning is not installed; tox -e ecosystem installs it")

import lightning as L
from lightning.pytorch.plugins.precision import MixedPrecision as TheirPrecision
from lightning.pytorch.plugins.precision import Precision

from amp_core import GradScaler
from amp_core.integrations.lightning import FabricMixedPrecision, HoldSchedulers, MixedPrecision

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's own


def fit(module: L.LightningModule, plugin: Precision | None = None, **settings: Any) -> L.Trainer:
    off = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")
    plugin = plugin or MixedPrecision("16-mixed", "cpu", GradScaler("cpu", 1024.0))
    torch.manual_seed(0)
    x = torch.randn(32, 8)
    data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)
    settings = {**dict.fromkeys(off, False), "max_epochs": 1, **settings}
    trainer = L.Trainer(accelerator="cpu", plugins=[plugin], **settings)
    trainer.fit(module, data)
    return trainer


class Module(L.LightningModule):
    """SGD shows by what gradients were divided; Adam would not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.other = nn.Linear(8, 1), nn.Linear(8, 1)
        self.losses: list[float] = []

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.mse_loss((self.net(x) + self.other(x)).float(), y)
        self.losses.append(float(loss))
        return loss

    def training_step(self, batch: Any, index: int) -> torch.Tensor | None:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.02)


class LeavingOut(Module):
    def training_step(self, batch: Any, index: int) -> torch.Tensor | None:
        return None if index in {0, 3} else super().training_step(batch, index)


@pytest.mark.parametrize("window", [1, 2])
def test_a_step_left_out_leaves_the_next_one_alone(window: int) -> None:
    """Clipping fails before the first loss, or marks gradients that come later as unscaled already."""
    losses = []
    for plugin in (TheirPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", 1024.0)), None):
        module = LeavingOut()
        fit(module, plugin, gradient_clip_val=1e3, accumulate_grad_batches=window)
        losses.append(module.losses)
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)


class Manual(Module):
    def __init__(self, order: Callable[[Any, Any, Callable[[Any], None]], None], algorithm: str) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.order, self.algorithm = order, algorithm

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.02) for part in (self.net, self.other)]

    def training_step(self, batch: Any, index: int) -> None:
        first, second = self.optimizers()
        first.zero_grad()
        second.zero_grad()
        self.manual_backward(self.loss(batch))
        limit = 1.0 if self.algorithm == "norm" else 0.1
        self.order(first, second, lambda optimizer: self.clip_gradients(optimizer, limit, self.algorithm))


def unclipped(first: Any, second: Any, clip: Callable[[Any], None]) -> None:
    first.step()
    second.step()


def one_by_one(first: Any, second: Any, clip: Callable[[Any], None]) -> None:
    for optimizer in (first, second):
        clip(optimizer)
        optimizer.step()


def together(first: Any, second: Any, clip: Callable[[Any], None]) -> None:
    clip(first)
    clip(second)
    first.step()
    second.step()


def without_a_step(first: Any, second: Any, clip: Callable[[Any], None]) -> None:
    clip(first)
    clip(second)
    second.step()


@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize("order", [unclipped, one_by_one, together, without_a_step])
def test_several_optimizers(order: Any, algorithm: str) -> None:
    """Gradients are unscaled twice, by a scale that has grown since, or not at all."""
    losses = []
    scaler = GradScaler("cpu", 1024.0, growth_interval=2)
    for plugin in (Precision(), MixedPrecision("16-mixed", "cpu", scaler)):
        module = Manual(order, algorithm)
        fit(module, plugin)
        losses.append(module.losses)
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)
    assert scaler.get_scale() == 1024.0 * 2**4
    assert scaler.history[-1].scale_after == scaler.get_scale()


def test_a_checkpoint_has_the_scale_after_all_steps() -> None:
    """Of several optimizers' steps the last are not counted in the scale of a checkpoint."""
    plugin = MixedPrecision("16-mixed", "cpu", GradScaler("cpu", 1024.0, growth_interval=2))
    saved: list[dict[str, Any]] = []

    class Saving(L.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            saved.append(plugin.state_dict())

    fit(Manual(unclipped, "norm"), plugin, callbacks=[Saving()])
    assert [state["scale"] for state in saved] == [1024.0 * 2 ** (number // 2) for number in range(1, 9)]


def test_several_optimizers_of_fabric() -> None:
    """The second unscales by the scale that the step of the first has left."""
    losses = []
    plugin = FabricMixedPrecision("16-mixed", "cpu", GradScaler("cpu", 1024.0, growth_interval=1))
    for plugins in ([], [plugin]):
        fabric = L.Fabric(accelerator="cpu", plugins=plugins)
        module = Module()
        parts = [module.net, module.other]
        module, *optimizers = fabric.setup(module, *[torch.optim.SGD(p.parameters(), lr=0.02) for p in parts])
        module.mark_forward_method("loss")
        x = torch.randn(8, 4, 8, generator=torch.Generator().manual_seed(0))
        for each in x:
            fabric.backward(module.loss((each, each.sum(1, keepdim=True))))
            for optimizer in optimizers:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
        losses.append(module.losses)
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)
    assert plugin.state_dict()["scale"] == 1024.0 * 2**8


class Scheduled(Module):
    def __init__(self, error: Exception | None = None, **schedule: Any) -> None:
        super().__init__()
        self.error, self.schedule = error, schedule

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        if self.error is not None:
            raise self.error
        loss = self.loss(batch)
        return loss * math.inf if index == 7 else loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return [optimizer], [{"scheduler": scheduler, **self.schedule}]


@pytest.mark.parametrize(
    ("schedule", "rate"),
    [
        ({"interval": "step"}, 0.5**7),
        ({"interval": "step", "frequency": 4}, 0.5**2),
        ({"interval": "epoch"}, 0.5),
    ],
)
def test_schedulers_of_several_steps_do_not_wait(schedule: dict[str, Any], rate: float) -> None:
    """The last step of an epoch is skipped, and with it the epoch's change of the learning rate."""
    trainer = fit(Scheduled(**schedule), callbacks=[HoldSchedulers()])
    assert trainer.optimizers[0].param_groups[0]["lr"] == rate


def test_an_error_leaves_the_module_as_it_was() -> None:
    """After an error the module keeps a function that neither pickle nor the next training can use."""
    module = Scheduled(ValueError("boom"), interval="step")
    with pytest.raises(ValueError, match="boom"):
        fit(module, callbacks=[HoldSchedulers()])
    assert "lr_scheduler_step" not in vars(module)
    scheduler = module.trainer.lr_scheduler_configs[0].scheduler
    assert type(copy.copy(scheduler)) is type(scheduler)
