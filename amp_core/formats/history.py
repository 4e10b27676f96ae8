"""Delayed scaling: scales from the largest magnitudes of earlier steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from amp_core.common.text import counted
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
        with torch.inference_mode(False):  # training may continue with it
            self._seen = torch.zeros(delayed.history, dtype=torch.float32, device=device)
            self._current = torch.zeros((), dtype=torch.float32, device=device)
        self._settled: Tensor | None = None

    @property
    def amax(self) -> Tensor:
        """What `quantize` takes as `amax`: 0-dim float32, the margin included; 0 before the first step."""
        seen = self._seen[-1] if self.delayed.algorithm == "most_recent" else self._seen.amax()
        amax = seen * 2.0**self.delayed.margin
        # With inf, the scale is NaN in each step until the magnitude has left the history.
        return amax.clamp(max=torch.finfo(torch.float32).max) if self.delayed.margin > 0 else amax

    @property
    def current(self) -> Tensor:
        """The largest magnitude in this step: 0-dim float32."""
        return self._current if self._settled is None else torch.maximum(self._current, self._settled)

    @torch.no_grad()
    def record(self, amax: Tensor) -> None:
        """Note a largest magnitude of this step. inf and NaN are left out: the scaler skips that step.

        Args:
            amax: one element; `Quantized.amax` of a tensor.
        """
        finite = torch.where(amax.isfinite(), amax, 0.0).to(self._current).view(())
        torch.maximum(self._current, finite, out=self._current)

    @torch.no_grad()
    def settle(self, amax: Tensor) -> None:
        """Let `amax` be the largest magnitude of this step; what is recorded from now on is the next one's.

        Ranks that settle on the same magnitude, the largest of their `current`, have equal scales.

        Args:
            amax: one element.
        """
        self._settled = amax.to(self._current, copy=True).view(())
        self._current.zero_()

    @torch.no_grad()
    def step(self) -> None:
        """End the step: its largest magnitude enters the history, and the oldest one leaves it."""
        # The memory stays where it is: a CUDA graph writes to it.
        last = self._current if self._settled is None else self._settled
        self._seen.copy_(torch.cat([self._seen[1:], last.view(1)]))
        if self._settled is None:
            self._current.zero_()
        self._settled = None

    def state_dict(self) -> dict[str, Tensor]:
        """Return copies of ``seen``, oldest first, of shape ``(history,)``, and ``current``, 0-dim."""
        return {"seen": self._seen.clone(), "current": self.current.clone()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned.

        Raises:
            KeyError: an entry is missing.
            TypeError: the state is not a mapping, or an entry is not a tensor.
            ValueError: an entry has another shape, or something else than magnitudes.
        """
        self.check(state)
        self._seen.copy_(state["seen"])
        self._current.copy_(state["current"])
        self._settled = None

    def check(self, state: Any) -> None:
        """Raise what `load_state_dict` would raise of `state`; waits for the device."""
        check_saved(state)
        steps = state["seen"].numel()
        if steps != self.delayed.history:
            raise ValueError(
                f"The saved history has {counted(steps, 'step')}, this one {self.delayed.history}: create it "
                f"with Delayed(history={steps})."
            )


def check_saved(state: Any) -> None:
    """Check a saved history, of whatever length.

    Raises:
        KeyError: an entry is missing.
        TypeError: `state` is not a mapping, or an entry is not a tensor.
        ValueError: an entry has another shape, or something else than magnitudes.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"The state of an AmaxHistory must be a mapping, got {type(state).__name__}.")
    for name, dims in (("seen", 1), ("current", 0)):
        if name not in state:
            raise KeyError(f"The state of an AmaxHistory has no entry {name!r}.")
        value = state[name]
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} of an AmaxHistory must be a tensor, got {type(value).__name__}.")
        if value.dim() != dims or not value.numel() or not value.dtype.is_floating_point:
            raise ValueError(
                f"{name} of an AmaxHistory must have {dims} dimensions and floating-point elements, got "
                f"{value.dtype} of shape {tuple(value.shape)}."
            )
        if not bool(((value >= 0) & value.isfinite()).all()):
            raise ValueError(f"{name} of an AmaxHistory must be finite magnitudes, got {value}.")
