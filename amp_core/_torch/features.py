"""Features that depend on private torch names, and how each degrades when torch changes them.

Each feature lists the private names that it uses. Names are resolved once, when the module that uses them is
imported. A feature whose names are missing, or whose probe fails, is off; everything else goes on. The first
use of a feature that is off gives one warning, or raises an error where the user asked for that feature.
"""

from __future__ import annotations

import importlib
import threading
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from amp_core.common.locks import new_lock
from amp_core.errors import TorchFeatureError, TorchFeatureWarning

_MISSING: Any = object()


class FeatureStatus(NamedTuple):
    """The state of one feature.

    Attributes:
        feature: its name.
        works: whether the installed torch supports it.
        reason: what torch lacks, and what is lost; empty if it works.
        names: the private names that it uses.
    """

    feature: str
    works: bool
    reason: str
    names: tuple[str, ...]


class Feature:
    """One feature, its private torch names, and whether they are what amp-core expects.

    Args:
        name: a short name, as ``amp backends`` shows it.
        lost: what a user loses without it; completes "torch X lacks NAME: ...".
        uses: private names that are read from objects, as dotted paths to one such object.
        probed: private attributes of objects that no such path leads to; the probe checks them.
    """

    def __init__(self, name: str, lost: str, *uses: str, probed: tuple[str, ...] = ()) -> None:
        self.name = name
        self.lost = lost
        self.names = list(uses)
        self.probed = probed
        self._probe: Callable[[], None] | None = None
        self._fault: str | None = None
        self._checked = False
        self._warned = False
        self._lock = new_lock()
        FEATURES.append(self)

    def probe(self, function: Callable[[], None]) -> Callable[[], None]:
        """Run `function` before the first use: the feature is off if it raises."""
        self._probe = function
        return function

    def value(self, path: str, default: Any) -> Any:
        """Return the torch object at `path`, or `default` if torch lacks it."""
        self.names.append(path)
        found = resolve(path)
        if found is not _MISSING:
            return found
        self._fault = self._fault or f"has no {path}"
        return default

    def function(
        self,
        path: str,
        otherwise: Callable[..., Any] | None = None,
        check: Callable[[Any], object] | None = None,
    ) -> Any:
        """Return the torch function at `path` itself, so that a call costs nothing extra.

        If torch lacks it, or `check` of it raises, return a function that warns once and calls `otherwise`;
        without `otherwise`, one that raises `TorchFeatureError`.
        """
        function = self.value(path, _MISSING)
        usable = function is not _MISSING and (check is None or self.attempt(check, function))
        return function if usable else self.fallback(otherwise)

    def fallback(self, otherwise: Callable[..., Any] | None) -> Callable[..., Any]:
        """Return `otherwise`, preceded by the warning; or a function that raises."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if otherwise is None:
                raise TorchFeatureError(self.reason)
            self.warn()
            return otherwise(*args, **kwargs)

        return call

    def attempt(self, function: Callable[..., object], *args: Any) -> bool:
        """Call `function`; if it raises, the feature is off. Return whether it went well."""
        try:
            function(*args)
        except Exception as error:  # whatever a changed torch raises
            what = next(iter([*self.names[-1:], *self.probed]))
            self._fault = self._fault or f"has changed {what} ({type(error).__name__}: {error})"
            return False
        return True

    @property
    def complete(self) -> bool:
        """Whether all names that were resolved so far are there; runs no probe."""
        return self._fault is None

    @property
    def reason(self) -> str:
        """What torch lacks and what is lost; empty if nothing is."""
        fault = (self._fault or "").replace("\n", " ")
        return f"torch {torch.__version__} {fault}: {self.lost}." if fault else ""

    def works(self) -> bool:
        """Whether the feature can be used; the first call runs its probe. Never warns."""
        if not self._checked:
            with self._lock:
                if not self._checked and self._fault is None:
                    self._check()
                self._checked = True
        return self._fault is None

    def works_or_warn(self) -> bool:
        """Whether the feature can be used; warns once per process if not."""
        if self.works():
            return True
        self.warn()
        return False

    def require(self) -> None:
        """Raise if the feature cannot be used.

        Raises:
            TorchFeatureError: it is off.
        """
        if not self.works():
            raise TorchFeatureError(self.reason)

    def warn(self) -> None:
        """Warn, once per process, that the feature is off."""
        if not self._warned:
            self._warned = True
            from amp_core.common.call_site import level_outside

            warnings.warn(self.reason, TorchFeatureWarning, stacklevel=level_outside())

    def status(self) -> FeatureStatus:
        """Probe the feature and describe it."""
        works = self.works()
        return FeatureStatus(self.name, works, self.reason, (*self.names, *self.probed))

    def _check(self) -> None:
        missing = next((path for path in self.names if resolve(path) is _MISSING), None)
        if missing is not None:
            self._fault = f"has no {missing}"
        elif self._probe is not None:
            # The first use may be under no_grad, a default device, FakeTensorMode or a region; a new thread
            # is under none of them.
            probing = threading.Thread(target=self.attempt, args=(self._probe,), name=f"probe {self.name}")
            probing.start()
            probing.join()


FEATURES: list[Feature] = []
"""Every feature, in the order of import."""

_MODULES = (
    "autocast", "autograd", "bindings", "dispatcher", "dynamo", "list_writes", "modules", "op_kernels",
    "steps", "tensors", "torchscript", "tracing",
)  # fmt: skip


def statuses() -> list[FeatureStatus]:
    """Probe every feature and describe it."""
    for module in _MODULES:
        importlib.import_module(f"amp_core._torch.{module}")
    return [feature.status() for feature in FEATURES]


def resolve(path: str) -> Any:
    """Return what a dotted path below torch leads to, importing modules on the way, or `_MISSING`."""
    found: Any = torch
    walked = "torch"
    for part in path.split(".")[1:]:
        walked = f"{walked}.{part}"
        following = getattr(found, part, _MISSING)
        if following is _MISSING:
            following = _submodule(walked)
        if following is _MISSING:
            return _MISSING
        found = following
    return found


def _submodule(path: str) -> Any:
    try:
        return importlib.import_module(path)
    except ImportError:
        return _MISSING
