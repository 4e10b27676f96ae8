"""`install` and `uninstall`: the old import paths, resolved to amp_compat."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

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

# id of torch's object -> (torch's object, ours); holding both keeps the ids true.
_installed: dict[int, tuple[Any, Any]] = {}
# The globals that install replaced, and the modules that it saw: what else holds ours, meant ours.
_places: list[tuple[ModuleType, str]] = []
_seen: set[str] = set()


def install(*, torch_amp: bool = False) -> None:
    """Make ``torch.cuda.amp`` and ``torch.cpu.amp`` resolve to `amp_compat`, in every module.

    A module that took a name before gets ours in its place, as far as the name is one of its globals;
    a module imported later finds ours at the old path. Calling it again changes nothing.

    Args:
        torch_amp: also make ``torch.amp``, ``torch.autocast`` and ``torch.GradScaler`` resolve to `amp_core`.
    """
    pairs = _pairs(_DEPRECATED)
    if torch_amp:
        pairs |= _pairs(_CURRENT)
    new = {key: ours for key, (_, ours) in pairs.items()}
    for module, name in _holders(new, {*_DEPRECATED, *(_CURRENT if torch_amp else ())}):
        setattr(module, name, new[id(getattr(module, name))])
        _places.append((module, name))
    _seen.update(sys.modules)
    _installed.update(pairs)


def uninstall() -> None:
    """Put everything back, in modules imported since `install` too."""
    theirs = {id(ours): old for old, ours in _installed.values()}
    later = [(m, name) for m, name in _holders(theirs, set()) if m.__name__ not in _seen]
    for module, name in [*_places, *later]:
        value = vars(module).get(name)
        if id(value) in theirs:
            setattr(module, name, theirs[id(value)])
    _installed.clear()
    _places.clear()
    _seen.clear()


def _pairs(modules: Mapping[str, str]) -> dict[int, tuple[Any, Any]]:
    """Each object that torch has under one of the names, with ours."""
    found: dict[int, tuple[Any, Any]] = {}
    for theirs, ours in modules.items():
        old, new = importlib.import_module(theirs), importlib.import_module(ours)
        for name in _NAMES:
            if hasattr(old, name) and hasattr(new, name):
                found[id(getattr(old, name))] = (getattr(old, name), getattr(new, name))
    # What is ours already, after an earlier install, is not torch's.
    mine = {id(ours) for _, ours in [*_installed.values(), *found.values()]}
    return {key: pair for key, pair in found.items() if key not in mine}


def _holders(values: Mapping[int, Any], torch_modules: set[str]) -> Iterator[tuple[ModuleType, str]]:
    """Find the globals that are one of `values`, in all modules but torch's other ones and our own."""
    for name, module in list(sys.modules.items()):
        if not isinstance(module, ModuleType) or (_is_ours(name) and name not in torch_modules):
            continue
        for key, value in list(vars(module).items()):
            if id(value) in values:
                yield module, key


def _is_ours(name: str) -> bool:
    return name.partition(".")[0] in {"torch", "amp_core", "amp_compat"} or name.startswith("amp_backend_")
