"""`install` and `uninstall`: redirect torch's import paths to amp-core."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

from amp_core.common.locks import new_lock
from amp_core.common.text import counted

# torch's module -> ours.
_DEPRECATED = {
    f"torch.{device}.amp{part}": f"amp_compat.{device}.amp{part}"
    for device, parts in {
        "cuda": ("", ".autocast_mode", ".common", ".grad_scaler"),
        "cpu": ("", ".autocast_mode", ".grad_scaler"),
    }.items()
    for part in parts
}
_CURRENT = {
    "torch": "amp_core",
    "torch.amp": "amp_core",
    "torch.amp.autocast_mode": "amp_core",
    "torch.amp.grad_scaler": "amp_core",
}
_NAMES = ("GradScaler", "OptState", "_cast", "autocast", "custom_bwd", "custom_fwd", "is_autocast_available")

_lock = new_lock()  # a module that `install` imports may call it
# id of torch's object -> (torch's object, ours). Keeping both objects alive keeps the ids valid.
_installed: dict[int, tuple[Any, Any]] = {}
# The globals replaced by install.
_replaced: list[tuple[ModuleType, str]] = []
# The modules loaded at install time: any other use of our names in them was there before.
_modules_before: set[str] = set()


def install(*, deprecated_only: bool = False) -> str:
    """Make torch's mixed precision resolve to amp-core's, in every module.

    ``torch.autocast``, ``torch.GradScaler`` and the names in ``torch.amp`` become those of `amp_core`; those
    in ``torch.cuda.amp`` and ``torch.cpu.amp`` become those of `amp_compat`. In modules
    that already imported a name, the global is replaced; modules imported later get ours from the old path.
    Calling it again changes nothing.

    Args:
        deprecated_only: replace only ``torch.cuda.amp`` and ``torch.cpu.amp``. Trainers that
            use ``torch.amp`` are then unaffected.

    Returns:
        A line that lists what was replaced and in which modules.
    """
    modules = _DEPRECATED if deprecated_only else {**_DEPRECATED, **_CURRENT}
    with _lock:
        pairs = _pairs(modules)
        ours = {key: new for key, (_, new) in pairs.items()}
        for module, name in _references(ours, set(modules)):
            setattr(module, name, ours[id(getattr(module, name))])
            _replaced.append((module, name))
        _modules_before.update(sys.modules)
        _installed.update(pairs)
        return _summary()


def uninstall() -> None:
    """Restore torch's names, including in modules imported since `install`."""
    with _lock:
        theirs = {id(ours): old for old, ours in _installed.values()}
        later = [(m, name) for m, name in _references(theirs, set()) if m.__name__ not in _modules_before]
        for module, name in [*_replaced, *later]:
            value = vars(module).get(name)
            if id(value) in theirs:
                setattr(module, name, theirs[id(value)])
        _installed.clear()
        _replaced.clear()
        _modules_before.clear()


def _summary() -> str:
    modules = {module.__name__ for module, _ in _replaced}
    packages = sorted(modules & {"torch.amp", "torch.cpu.amp", "torch.cuda.amp"})
    others = sorted(name for name in modules if not _is_ours(name))
    users = f", imported by {', '.join(others)}" if others else ""
    return f"amp_compat: amp-core replaces {', '.join(packages)} ({counted(len(_replaced), 'name')}{users})"


def _pairs(modules: Mapping[str, str]) -> dict[int, tuple[Any, Any]]:
    """Map the id of each torch object to replace to the object and its replacement."""
    pairs: dict[int, tuple[Any, Any]] = {}
    for theirs, ours in modules.items():
        old, new = importlib.import_module(theirs), importlib.import_module(ours)
        for name in _NAMES:
            if hasattr(old, name) and hasattr(new, name):
                pairs[id(getattr(old, name))] = (getattr(old, name), getattr(new, name))
    # After an earlier install, torch's modules hold our objects.
    ours_already = {id(ours) for _, ours in [*_installed.values(), *pairs.values()]}
    return {key: pair for key, pair in pairs.items() if key not in ours_already}


def _references(values: Mapping[int, Any], torch_modules: set[str]) -> Iterator[tuple[ModuleType, str]]:
    """Yield the globals that are one of `values` in `torch_modules` and third-party modules."""
    for name, module in list(sys.modules.items()):
        if not isinstance(module, ModuleType) or (_is_ours(name) and name not in torch_modules):
            continue
        for key, value in list(vars(module).items()):
            if id(value) in values:
                yield module, key


def _is_ours(name: str) -> bool:
    return name.partition(".")[0] in {"torch", "amp_core", "amp_compat"} or name.startswith("amp_backend_")
