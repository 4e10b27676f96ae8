"""Rules of modules, applied and removed in random orders on nested and shared modules, against dicts."""

from __future__ import annotations

import copy
import pathlib
import pickle
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from amp_core import PolicyError, apply_policy, autocast

from ..drawn import programs

LOW, WIDE = torch.bfloat16, torch.float32
OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: F.linear(x, torch.ones(4, 4)),
    "mm": lambda x: torch.mm(x, torch.ones(4, 4)),
    "softmax": lambda x: torch.softmax(x, -1),
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
}
BY_DEFAULT = {"linear": "lower_precision_fp", "mm": "lower_precision_fp"}
DTYPES = {"lower_precision_fp": LOW, "fp32": WIDE}
Table = dict[nn.Module, Any]
Seen = list[tuple[str, torch.dtype]]

_seen: Seen = []


class Leaf(nn.Module):
    def __init__(self, op: str) -> None:
        super().__init__()
        self.op = op

    def forward(self, x: Tensor) -> None:
        _seen.append((self.op, OPS[self.op](x).dtype))


class Branch(nn.Module):
    def __init__(self, parts: list[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> None:
        for part in self.parts:
            part(x)


def tree(draw: random.Random, depth: int = 0) -> nn.Module:
    if depth == 3 or draw.random() < 0.35 * bool(depth):
        return Leaf(draw.choice([*OPS]))
    parts = [tree(draw, depth + 1) for _ in range(draw.randint(1, 3))]
    return Branch([*parts, draw.choice(parts)] if draw.random() < 0.3 else parts)


def merged(below: Any, rules: Any) -> Any:
    return rules if below is None or "fp32" in (below, rules) else {**below, **rules}


def expected(module: nn.Module, table: Table, x: torch.dtype, rules: Any) -> Seen:
    """Return the dtypes that `module` gives; the rules are "fp32" in a module that runs without autocast."""
    if rules != "fp32" and module in table:
        own = table[module]
        x, rules = (WIDE, own) if own == "fp32" else (x, {**rules, **own})
    if isinstance(module, Branch):
        return [each for part in module.parts for each in expected(part, table, x, rules)]
    assert isinstance(module, Leaf)
    return [(module.op, x if rules == "fp32" else DTYPES.get(rules.get(module.op, ""), x))]


def selection(draw: random.Random, model: nn.Module) -> tuple[Any, list[nn.Module]]:
    """Return what selects some modules of `model`, and these."""
    how = draw.choice(["name", "module", "class", "all"])
    name, module = draw.choice([*model.named_modules(remove_duplicate=False)])
    if how == "class":
        return type(module), [each for each in model.modules() if type(each) is type(module)]
    if how == "all":
        return "**", [*model.modules()]
    return (name if how == "name" else module), [module]


def drawn_rules(draw: random.Random) -> Any:
    if draw.random() < 0.4:
        return "fp32"
    return {op: draw.choice([*DTYPES]) for op in draw.sample([*OPS], draw.randint(1, 2))}


class Program:
    """A model, and what was applied to it: each handle with the rules that were there before."""

    def __init__(self, draw: random.Random, folder: pathlib.Path) -> None:
        self.draw, self.file, self.model = draw, folder / "rules.toml", tree(draw)
        self.plain = {module: {*vars(module)} for module in self.model.modules()}
        self.table: Table = {}
        self.applied: list[tuple[Any, Table]] = []

    def apply(self) -> None:
        target = self.draw.choice([*self.model.modules()])
        rules, new = {}, dict[nn.Module, Any]()
        for _ in range(self.draw.randint(1, 3)):
            selector, modules = selection(self.draw, target)
            if selector not in rules:
                rules[selector] = drawn_rules(self.draw)
                new.update({module: merged(new.get(module), rules[selector]) for module in modules})
        if self.draw.random() < 0.3:
            with apply_policy(target, rules, device_type="cpu") as applied:
                self.file.write_text(applied.to_toml())
        given: Any = self.file if self.file.exists() else rules
        handle = apply_policy(target, given, device_type="cpu")
        self.file.unlink(missing_ok=True)
        self.applied.append((handle, {module: self.table.get(module) for module in new}))
        self.table.update({module: merged(self.table.get(module), own) for module, own in new.items()})

    def remove(self) -> None:
        """Remove one application, which is refused if a later one has rules for the same modules."""
        if not self.applied:
            return
        number = self.draw.randrange(len(self.applied))
        handle, before = self.applied[number]
        if any(module in later for _, later in self.applied[number + 1 :] for module in before):
            try:
                handle.remove()
            except PolicyError:
                return
            raise AssertionError("it was removed below a later one")
        handle.remove()
        del self.applied[number]
        self.table.update(before)
        self.table = {module: own for module, own in self.table.items() if own is not None}

    def copy(self) -> None:
        """Go on with a copy, from which nothing can be removed."""
        twin = self.draw.choice([copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])(self.model)
        pairs = zip(self.model.modules(), twin.modules(), strict=True)
        self.table = {other: self.table[module] for module, other in pairs if module in self.table}
        self.model, self.applied, self.plain = twin, [], {}

    def check(self) -> None:
        _seen.clear()
        x = self.draw.choice([LOW, WIDE])
        with autocast("cpu", dtype=LOW):
            self.model(torch.ones(4, 4, dtype=x))
        assert _seen == expected(self.model, self.table, x, BY_DEFAULT)


def test_random_orders(tmp_path: pathlib.Path) -> None:
    """A rule outlives its removal, wins over a later one, or is that of a module beside or around."""
    for draw in programs(seconds=5.0, number="module rules"):
        program = Program(draw, tmp_path)
        for _ in range(draw.randint(2, 9)):
            getattr(program, draw.choice(["apply", "apply", "apply", "remove", "remove", "copy"]))()
            program.check()
        for handle, _ in reversed(program.applied):
            handle.remove()
        assert all({*vars(module)} == names for module, names in program.plain.items())
