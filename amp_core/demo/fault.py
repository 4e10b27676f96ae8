"""Cause an overflow and show how amp-core finds it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from amp_core import GradScaler, autocast, compare, get_backend
from amp_core.demo.data import Digits
from amp_core.demo.model import build_model
from amp_core.demo.train import Settings
from amp_core.policy.names import short

if TYPE_CHECKING:
    from rich.console import Console

    from amp_core import Comparison, History

_LAYERS = {"conv": "5", "mlp": "3"}  # a linear layer in the middle of the model
_FACTOR = 1e7  # the largest float16 is 65504
_STEPS = 2


class FaultyStep:
    """A training step in float16 of a model with one layer whose outputs overflow."""

    def __init__(self, settings: Settings, digits: Digits) -> None:
        torch.manual_seed(settings.seed)
        self.layer = _LAYERS[settings.model]
        self.device = settings.device
        self.model = build_model(settings.model).to(settings.device)
        with torch.no_grad():
            self.model.get_parameter(f"{self.layer}.weight").mul_(_FACTOR)
        self.images = digits.train_images[: settings.batch_size].to(settings.device)
        self.labels = digits.train_labels[: settings.batch_size].to(settings.device)

    def loss(self) -> Tensor:
        """Run the forward pass."""
        return nn.functional.cross_entropy(self.model(self.images).float(), self.labels)

    def train(self) -> History:
        """Try a few steps; return what the scaler recorded."""
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        scaler = GradScaler(self.device.type, named_parameters=self.model.named_parameters())
        for _ in range(_STEPS):
            optimizer.zero_grad()
            with autocast(self.device.type, dtype=torch.float16):
                loss = self.loss()
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            scaler.step(optimizer)
            scaler.update()
        return scaler.history

    def compare(self) -> Comparison:
        """Run the step in float32 and in float16; return where they differ."""
        return compare(self.loss, self.device.type, dtype=torch.float16, model=self.model)


def show_fault(settings: Settings, digits: Digits, console: Console) -> None:
    """Cause an overflow, and print the diagnosis of the scaler and of `compare`."""
    if torch.float16 not in get_backend(settings.device.type).supported_dtypes():
        console.print(f"No overflow is shown: {settings.device.type} cannot compute in float16.")
        return
    fault = FaultyStep(settings, digits)

    def show(text: object) -> None:
        console.print(str(text), soft_wrap=True, markup=False)

    show(f"\nA fault on purpose: the weights of layer {fault.layer} times {_FACTOR:,.0f}, in float16.")
    show("torch.amp would skip every step in silence. scaler.history says which parameters are to blame:")
    show(fault.train())
    origin = fault.compare().first_not_finite
    if origin is not None:
        key = origin.key
        show(f"and amp_core.compare(step) names the op where it begins: {short(key.name)} in {key.place}.")
    show("amp_core.advise(step) then looks for rules and a loss scale that repair it.")
