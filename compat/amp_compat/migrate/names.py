"""Deprecated dotted names and their replacements."""

from __future__ import annotations

from dataclasses import dataclass

_DEVICES = {"torch.cuda.amp": "cuda", "torch.cpu.amp": "cpu"}
DEVICE_MODULES = frozenset({"torch.cuda", "torch.cpu"})
_SUBMODULES = frozenset({"autocast_mode", "grad_scaler", "common"})
OBJECTS = frozenset({"autocast", "GradScaler", "custom_fwd", "custom_bwd", "_cast", "OptState"})


@dataclass(frozen=True)
class Legacy:
    """A deprecated module (`name` is empty) or object for one device."""

    device: str
    name: str

    @property
    def dotted(self) -> str:
        """The deprecated name as torch documents it, without the submodule."""
        return f"torch.{self.device}.amp" + (f".{self.name}" if self.name else "")


def parse_legacy(dotted: str) -> Legacy | None:
    """Parse `dotted`; return None if it is not a deprecated name."""
    for module, device in _DEVICES.items():
        if dotted == module:
            return Legacy(device, "")
        if not dotted.startswith(module + "."):
            continue
        words = dotted[len(module) + 1 :].split(".")
        if words[0] in _SUBMODULES:
            words = words[1:]
        if not words:
            return Legacy(device, "")
        return Legacy(device, words[0]) if len(words) == 1 and words[0] in OBJECTS else None
    return None


@dataclass(frozen=True)
class Target:
    """The package to migrate to: ``torch.amp`` or ``amp_core``."""

    module: str

    @property
    def root(self) -> str:
        """The name that an import statement must bind."""
        return self.module.partition(".")[0]

    def suffix(self, name: str) -> str:
        """The path of object `name` below the target module."""
        submodules = {"_cast": "autocast_mode._cast", "OptState": "grad_scaler.OptState"}
        return submodules.get(name, name) if self.module == "torch.amp" else name


TARGETS = {name: Target(name) for name in ("torch.amp", "amp_core")}
