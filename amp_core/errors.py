"""amp-core's own exceptions and warnings.

Where `torch.amp` raises (``RuntimeError``, ``ValueError``, ``AssertionError`` ...), amp-core raises the
same class with the same text; the classes here are for conditions that do not exist in torch.
"""

from __future__ import annotations

import typing

__all__ = [
    "AmpError",
    "AmpWarning",
    "BackendConflictError",
    "BackendDisabledError",
    "BackendError",
    "BackendLoadError",
    "BackendNotFoundError",
    "EmulationWarning",
    "KernelLaunchError",
    "MaterializeError",
    "NonFiniteError",
    "PluginWarning",
    "PolicyError",
    "RankLostError",
    "ScaleFloorError",
    "ScaleFloorWarning",
    "ScriptRegionError",
    "SkippedStepsWarning",
    "StaleCastError",
    "TorchFeatureError",
    "TorchFeatureWarning",
]


class AmpError(Exception):
    """Base class of amp-core's own errors."""


class BackendError(AmpError, RuntimeError):
    """A device backend cannot be used. Also a ``RuntimeError``, as torch raises for unknown devices."""


class BackendNotFoundError(BackendError):
    """No backend serves the requested device type."""


class BackendLoadError(BackendError):
    """A backend is installed but failed to load; the original error is the ``__cause__``."""


class BackendConflictError(BackendError):
    """Two plugins claim the same device type."""


class BackendDisabledError(BackendError):
    """``AMP_DISABLE_BACKENDS`` names the device type."""


class KernelLaunchError(BackendError):
    """A kernel could not be compiled or launched; the original error is the ``__cause__``."""


class PolicyError(AmpError, ValueError):
    """An op policy is malformed or cannot be applied."""


class StaleCastError(AmpError, RuntimeError):
    """A cached cast differs from its weight; raised in the debug mode of `amp_core.cached_casts`."""


class ScriptRegionError(AmpError, RuntimeError):
    """`amp_core.script` cannot compile an autocast region with the behaviour of eager mode."""


class MaterializeError(AmpError, RuntimeError):
    """`amp_core.materialize` cannot write a model as one graph; the message names the line."""


class TorchFeatureError(AmpError, RuntimeError):
    """The installed torch no longer supports a requested feature; the message names both."""


class ScaleFloorError(AmpError, RuntimeError):
    """Gradients overflowed with the scale at its floor, and the schedule is set to `AtFloor.RAISE`."""


class RankLostError(AmpError, RuntimeError):
    """Ranks that take steps together did not all arrive at a decision; torch's error is the ``__cause__``.

    Attributes:
        ranks: the ranks that this one waited for.
        step: the number of the step, as in `StepRecord.number`; None if no `GradScaler` knows it.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = (), step: int | None = None) -> None:
        super().__init__(message)
        self.ranks, self.step = ranks, step

    def __str__(self) -> str:
        message = super().__str__()
        return message if self.step is None else f"In step {self.step}: {message}"


class NonFiniteError(AmpError, FloatingPointError):
    """A model under `amp_core.guard` computed inf or NaN.

    Attributes:
        fault: the op that made them, an `amp_core.debugging.OpFault`; None if no single op did.
    """

    def __init__(self, message: str, fault: typing.Any = None) -> None:
        super().__init__(message)
        self.fault = fault


class AmpWarning(UserWarning):
    """Base class of amp-core's own warnings."""


class PluginWarning(AmpWarning):
    """A third-party plugin failed to load and was skipped, or it changed global state while loading."""


class TorchFeatureWarning(AmpWarning):
    """The installed torch no longer supports a feature, which is disabled; issued once per feature."""


class EmulationWarning(AmpWarning):
    """A recipe is in force on a device that only emulates its formats; once per device type and reason."""


class SkippedStepsWarning(AmpWarning):
    """Many optimizer steps in a row were skipped."""


class ScaleFloorWarning(SkippedStepsWarning):
    """Gradients overflowed although the scale is at its floor."""


for _name in __all__:
    globals()[_name].__module__ = "amp_core"  # tracebacks show the name that users import
