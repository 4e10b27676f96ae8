"""Programs with the deprecated names, written at random, do the same after `amp migrate`."""

from __future__ import annotations

import inspect
import random
from typing import Any

import pytest
import torch

from amp_compat.migrate.names import TARGETS
from amp_compat.migrate.source import migrate_source

from ..drawn import programs

TARGET = TARGETS["torch.amp"]

IMPORTS = (
    ("import torch", "torch.{d}.amp."),
    ("import torch.{d}.amp as old", "old."),
    ("from torch.{d} import amp", "amp."),
    ("from torch.{d}.amp import autocast, GradScaler", ""),
    ("from torch.{d}.amp import *", ""),
    ("import torch\nold = torch.{d}.amp", "old."),
    ("import torch\n_a = torch.{d}.amp.autocast\n_G = torch.{d}.amp.GradScaler", "_"),
    ("from torch.{d}.amp import *\nimport torch\n_a, _G = autocast, GradScaler", "_"),
    (
        "import torch\nfrom torch.{d}.amp import autocast, GradScaler\nGradScaler = torch.{d}.amp.GradScaler",
        "",
    ),
    ("import torch\nif hasattr(torch, 'zeros'):\n    from torch.{d}.amp import autocast, GradScaler", ""),
)
USES = (
    "with {a}(enabled=True, dtype=dtype): pass",
    "with {a}(True, dtype, False): pass",
    "args = (False,)\nwith {a}(*args): pass",
    "f{n} = {a}\nwith f{n}(False): pass",
    "f{n} = {a}\nargs = (False,)\nwith f{n}(*args): pass",
    "f{n} = g{n} = {a}\nf{n}(enabled=False), g{n}()",
    "f{n} = {a}\ng{n} = f{n}\nargs = (False,)\nwith g{n}(*args): pass",
    "f{n} = {a} if True else None\nf{n}(enabled=False)",
    "f{n}, g{n} = {a}, {g}\nf{n}(False), g{n}(4.0)",
    "def f{n}(make={g}): return make(4.0)\nf{n}()",
    "s = {g}(2.0, growth_interval=7)",
    "for make in ({a}, {g}): make()",
    "class S{n}({g}):\n    def __init__(self): super().__init__(8.0)\nS{n}()",
    "def f{n}():\n    make = {a}\n    return make(enabled=False)\nf{n}()",
    "def f{n}(autocast=dict, GradScaler=dict): return autocast(), GradScaler()\nf{n}()",
    "def f{n}(make):\n    match make:\n        case autocast: return autocast()\nf{n}(dict)",
    "made = [{g}(init_scale=2.0) for _ in range(2)] + [(lambda: {a}())()]",
    "f{n} = functools.partial({g}, 2.0)\nf{n}(growth_interval=3)",
    "from functools import partial\npartial({a}, enabled=False)()",
)


def program(pick: random.Random) -> str:
    lines, prefixes = [], []
    imports = pick.choice((IMPORTS, IMPORTS[3:]))  # the latter bind the same names, to either device's
    for _ in range(pick.randint(1, 3)):
        device, (line, prefix) = pick.choice(("cuda", "cpu")), pick.choice(imports)
        lines.append(line.format(d=device))
        prefixes.append(prefix.format(d=device))
    lines += ["import functools, torch", "dtype = torch.bfloat16"]
    for number in range(pick.randint(1, 4)):
        prefix = pick.choice(prefixes)
        names = ("_a", "_G") if prefix == "_" else (f"{prefix}autocast", f"{prefix}GradScaler")
        lines.append(pick.choice(USES).format(a=names[0], g=names[1], n=number))
    return "\n".join(lines) + "\n"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Collects the device and the arguments of each region and scaler that torch makes."""
    made: list[object] = []
    for cls in (torch.amp.autocast, torch.amp.GradScaler):
        start = cls.__init__

        def init(self: Any, *args: Any, start: Any = start, **kwargs: Any) -> None:
            given = inspect.signature(start).bind(self, *args, **kwargs)
            given.apply_defaults()
            start(self, *args, **kwargs)
            values = {**given.arguments, "self": type(self).__name__}
            if "cache_enabled" in values:
                values.update(dtype=self.fast_dtype, cache_enabled=self._cache_enabled)
            made.append(values)

        monkeypatch.setattr(cls, "__init__", init)
    return made


def run(text: str, made: list[object]) -> list[object]:
    made.clear()
    exec(text, {"__name__": "program"})
    return list(made)


@pytest.mark.filterwarnings("ignore")  # of the deprecated names, and of a missing CUDA
def test_a_program_makes_the_same_regions_and_scalers_after_migration(made: list[object]) -> None:
    """Aliases, star imports and half-migrated names would get another device, other arguments, or fail."""
    for pick in programs(8.0, 150):
        old = program(pick)
        new = migrate_source(old, TARGET).text
        assert run(new, made) == run(old, made), f"{old}\nbecame\n{new}"
        assert migrate_source(new, TARGET).text == new, f"a second run changes\n{new}"
