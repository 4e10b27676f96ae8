"""Every exception and warning that amp-core raises of its own.

Where `torch.amp` raises (``RuntimeError``, ``ValueError``, ``AssertionError`` ...) amp-core raises the
same class with the same text; the classes here are for conditions that torch does not have.
"""

from __future__ import annotations


class AmpError(Exception):
    """Base of all errors of amp-core's own."""


class BackendError(AmpError, RuntimeError):
    """A device backend cannot be used. Also a ``RuntimeError``, as torch raises for unknown devices."""


class BackendNotFoundError(BackendError):
    """No backend serves the device type that was asked for."""


class BackendLoadError(BackendError):
    """A backend is installed but failed to load; the original error is the ``__cause__``."""


class BackendConflictError(BackendError):
    """Two owners claim one device type."""


class BackendDisabledError(BackendError):
    """The backend was switched off through ``AMP_DISABLE_BACKENDS`` or ``AMP_PLUGIN_AUTOLOAD``."""


class KernelLaunchError(BackendError):
    """A kernel could not be compiled or launched; the original error is the ``__cause__``."""


class PolicyError(AmpError, ValueError):
    """An op policy is malformed or cannot be applied."""


class StaleCastError(AmpError, RuntimeError):
    """A cached cast differs from its weight (found by the debug mode of `amp_core.cached_casts`)."""


class ScriptRegionError(AmpError, RuntimeError):
    """`amp_core.script` met an autocast region that TorchScript cannot do what eager mode does."""


class TorchFeatureError(AmpError, RuntimeError):
    """A feature was asked for that the installed torch no longer supports; the text names both."""


class ScaleFloorError(AmpError, RuntimeError):
    """Gradients overflowed at the floor of the scale, and the schedule says `AtFloor.RAISE`."""


class AmpWarning(UserWarning):
    """Base of all warnings of amp-core's own."""


class PluginWarning(AmpWarning):
    """A third-party plugin failed and was left out."""


class TorchFeatureWarning(AmpWarning):
    """The installed torch no longer supports a feature, which is off; given once per feature."""


class SkippedStepsWarning(AmpWarning):
    """Many optimizer steps in a row were skipped."""


class ScaleFloorWarning(SkippedStepsWarning):
    """Gradients overflowed though the scale is at its floor."""


for _public in [
    AmpError,
    BackendError,
    BackendNotFoundError,
    BackendLoadError,
    BackendConflictError,
    BackendDisabledError,
    KernelLaunchError,
    PolicyError,
    ScaleFloorError,
    ScriptRegionError,
    StaleCastError,
    TorchFeatureError,
    AmpWarning,
    PluginWarning,
    ScaleFloorWarning,
    SkippedStepsWarning,
    TorchFeatureWarning,
]:
    _public.__module__ = "amp_core"  # tracebacks show the name that users import
