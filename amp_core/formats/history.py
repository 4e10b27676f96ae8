"""Delayed scaling: scales from the largest magnitudes of earlier steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from amp_core.formats.quantization import Delayed


class AmaxHistory:
    """The largest magnitudes of one tensor in the last steps, from which its next scale follows.

    Nothing waits for the device. The state is what a checkpoint needs to go on bit for bit.

    Args:
        delayed: how many steps to keep, and how the scale follows from them.
        device: where the history is.

    Example::

        from amp_core.formats import E4M3, AmaxHistory

        quantization = Quantization(E4M3, found=Delayed(history=16))
        history = AmaxHistory(quantization.found, "cpu")
        for batch in (torch.randn(8), torch.randn(8)):
            quantized = quantize(batch, quantization, amax=history.amax)
            history.record(quantized.amax)
            history.step()
    """

    def __init__(self, delayed: Delayed, device: torch.device | str) -> None:
        self.delayed = delayed
        self._seen = torch.zeros(delayed.history, dtype=torch.float32, device=device)
        self._current = torch.zeros((), dtype=torch.float32, device=device)

    @property
    def amax(self) -> Tensor:
        """What `quantize` takes as `amax`: 0-dim float32, the margin included; 0 before the first step."""
        seen = self._seen[-1] if self.delayed.algorithm == "most_recent" else self._seen.amax()
        return seen * 2.0**self.delayed.margin

    @property
    def current(self) -> Tensor:
        """The largest magnitude in this step: 0-dim float32. Ranks that agree on it have equal scales."""
        return self._current

    @torch.no_grad()
    def record(self, amax: Tensor) -> None:
        """Note a largest magnitude of this step. inf and NaN are left out: the scaler skips that step.

        Args:
            amax: one element; `Quantized.amax` of a tensor.
        """
        finite = torch.where(amax.isfinite(), amax, 0.0).to(self._current).view(())
        torch.maximum(self._current, finite, out=self._current)

    @torch.no_grad()
    def step(self) -> None:
        """End the step: its largest magnitude enters the history, and the oldest one leaves it."""
        self._seen = torch.cat([self._seen[1:], self._current.view(1)])
        self._current = torch.zeros_like(self._current)

    def state_dict(self) -> dict[str, Tensor]:
        """Return copies of ``seen``, oldest first, of shape ``(history,)``, and ``current``, 0-dim."""
        return {"seen": self._seen.clone(), "current": self._current.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned.

        Raises:
            KeyError: an entry is missing.
            ValueError: the history is of another length.
        """
        seen, current = state["seen"], state["current"]
        if seen.shape != self._seen.shape:
            raise ValueError(
                f"The saved history has {seen.numel()} steps, this one {self.delayed.history}: create it "
                f"with Delayed(history={seen.numel()})."
            )
        self._seen = seen.to(self._seen, copy=True)
        self._current = current.to(self._current, copy=True)
