"""The training loop of the demo: one loop for float32 and for mixed precision."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor, nn

from amp_core import GradScaler, advise, autocast
from amp_core.common.text import dtype_name
from amp_core.debugging.advice import SpeedAdvice
from amp_core.demo.data import Digits
from amp_core.demo.model import build_model
from amp_core.demo.watch import StepWatch

# torch's default of 2000 is longer than the demo.
GROWTH_INTERVAL = 50


@dataclass(frozen=True)
class Settings:
    """The user's settings."""

    device: torch.device
    dtype: torch.dtype
    model: str = "conv"
    epochs: int = 15
    batch_size: int = 64
    seed: int = 0


@dataclass
class History:
    """The results of a run; each list has one entry per step.

    Attributes:
        name: the name of the run in tables and legends.
        mixed: whether it ran in mixed precision.
        losses: the training loss.
        scales: the loss scale that the step used.
        skipped: the numbers (from 0) of the steps that were skipped.
        seconds: how long the step took.
        casts: conversions between floating-point dtypes in one step.
        peak_bytes: the peak memory of the tensors of one step.
        accuracy: the accuracy of the trained model on the test images.
    """

    name: str
    mixed: bool
    losses: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    casts: int = 0
    peak_bytes: int = 0
    accuracy: float = 0.0

    @property
    def step_seconds(self) -> float:
        """The median, which a slow first step does not affect."""
        return median(self.seconds)


class Trainer:
    """Trains one model on the digits; in `settings.dtype` if `mixed`, else in float32.

    With `advice`, the policy of ``advise(goal="speed")`` decides, which may be float32 for all ops.

    Raises:
        NotImplementedError: from `watch` or `step`, if the device lacks an operation.
    """

    def __init__(
        self, settings: Settings, digits: Digits, mixed: bool, advice: SpeedAdvice | None = None
    ) -> None:
        self.settings = settings
        self.mixed = mixed and (advice is None or advice.enabled)
        self.policy = None if advice is None else advice.policy
        self.digits = digits.to(settings.device)
        name = f"AMP ({dtype_name(settings.dtype)})" if self.mixed else "float32"
        self.history = History(name if advice is None else f"advised: {name}", self.mixed)
        torch.manual_seed(settings.seed)
        self.model = build_model(settings.model).to(settings.device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
        self.scaler = GradScaler(settings.device.type, growth_interval=GROWTH_INTERVAL, enabled=self.mixed)

    def step(self, images: Tensor, labels: Tensor) -> Tensor:
        """Run one training step and return its loss."""
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self._logits(images), labels)
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()

    def _logits(self, images: Tensor) -> Tensor:
        device_type, dtype = self.settings.device.type, self.settings.dtype
        with autocast(device_type, dtype=dtype, enabled=self.mixed, policy=self.policy):
            logits: Tensor = self.model(images)
        return logits.float()

    def advise(self) -> SpeedAdvice:
        """Ask which ops of a step should run in low precision."""
        size, device_type = self.settings.batch_size, self.settings.device.type
        images, labels = self.digits.train_images[:size], self.digits.train_labels[:size]

        def step() -> Tensor:
            return nn.functional.cross_entropy(self.model(images).float(), labels)

        return advise(step, device_type, dtype=self.settings.dtype, progress=False, goal="speed")

    def watch(self) -> None:
        """Count casts and memory in one step of a copy, leaving this trainer unchanged."""
        twin = copy.copy(self)
        twin.model = copy.deepcopy(self.model)
        twin.optimizer = torch.optim.SGD(twin.model.parameters(), lr=0.05, momentum=0.9)
        twin.scaler = GradScaler(self.settings.device.type, enabled=self.mixed)
        size = self.settings.batch_size
        images, labels = self.digits.train_images[:size], self.digits.train_labels[:size]
        with StepWatch([*twin.model.parameters(), images, labels]) as watch:
            twin.step(images, labels)
        self.history.casts, self.history.peak_bytes = watch.casts, watch.peak_bytes

    def test(self) -> None:
        """Note the accuracy on the test images."""
        with torch.no_grad():
            correct = self._logits(self.digits.test_images).argmax(1) == self.digits.test_labels
            self.history.accuracy = correct.float().mean().item()

    def timed_step(self, images: Tensor, labels: Tensor) -> None:
        """Run one training step and note its loss, its scale and how long it took."""
        history, scale = self.history, self.scaler.get_scale()
        start = time.perf_counter()
        loss = self.step(images, labels)
        after = self.scaler.get_scale()  # waits for the device, like the loss
        history.losses.append(loss.item())
        history.seconds.append(time.perf_counter() - start)
        if after < scale:
            history.skipped.append(len(history.scales))
        history.scales.append(scale)


def train(trainers: Sequence[Trainer], on_step: Callable[[History], None]) -> list[History]:
    """Train on the same batches, calling `on_step` after every step; then test.

    The trainers take turns: other work on the machine then slows all of them alike.
    """
    settings, digits = trainers[0].settings, trainers[0].digits
    order = torch.Generator().manual_seed(settings.seed)
    turns = list(trainers)
    for _ in range(settings.epochs):
        for images, labels in digits.batches(settings.batch_size, order):
            for trainer in turns:
                trainer.timed_step(images, labels)
                on_step(trainer.history)
            turns.reverse()  # whoever runs first finds the caches as another run left them
    for trainer in trainers:
        trainer.test()
    return [trainer.history for trainer in trainers]
