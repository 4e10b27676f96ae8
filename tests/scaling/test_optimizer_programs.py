"""Random programs of many optimizers: bits, warnings and errors with amp-core are those with torch.amp."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import warnings
from collections.abc import Callable
from random import Random
from typing import Any

import torch
import torch._dynamo  # the first optimizer would load it, for seconds
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel

import amp_core

from ..drawn import programs

FUSED = [{}, {"foreach": True}, {"foreach": False}, {"fused": True}, {"fused": True}]
OPTIMIZERS: dict[str, list[dict[str, Any]]] = {
    **dict.fromkeys(["SGD", "Adam", "AdamW", "Adagrad"], FUSED),
    **dict.fromkeys(
        ["Adafactor", "NAdam", "RAdam", "Rprop", "ASGD", "Adadelta", "Adamax", "RMSprop"], FUSED[:3]
    ),
    "Muon": [{}],
}
LAYOUTS = [("a", "b", "norm"), ("a",), ("b", "norm"), ("table",)]
SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 2),
    "cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.05, 50, cycle_momentum=False),
    "after": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.LinearLR(optimizer), lr_scheduler.CosineAnnealingLR(optimizer, 5)], [2]
    ),
}
COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda everything: pickle.loads(pickle.dumps(everything)),
}
CHECKS = ("No inf checks were recorded for this optimizer.", "No inf checks were recorded prior to update.")
DOCUMENTED = (*CHECKS, "'int' object has no attribute 'device'")
MISUSE = ("No inf checks were recorded", "() has already been called")


class Net(nn.Module):
    """Layers of which a loss uses some; the gradient of the table is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 6, sparse=True)
        self.a, self.b, self.norm = nn.Linear(6, 6), nn.Linear(6, 6), nn.LayerNorm(6)
        self.more = nn.ModuleList()

    def forward(self, x: Tensor, numbers: Tensor, used: str) -> Tensor:
        x = x + self.table(numbers) if "t" in used else x
        x = torch.tanh(self.a(x)) if "a" in used else x
        x = self.norm(x + self.b(x) if "b" in used else x)
        for layer in self.more:
            x = x + layer(x)
        return x


class Run:
    """One training; its methods are what a program may do."""

    def __init__(self, drawn: dict[str, Any], ours: bool) -> None:
        torch.manual_seed(drawn["seed"])
        self.drawn, self.amp = drawn, amp_core if ours else torch.amp
        options = drawn["options"] if ours else {}
        self.scaler = self.amp.GradScaler("cpu", 256.0, growth_interval=drawn["interval"], **options)
        self.net = Net()
        self.scope = drawn["scope"](self.net) if ours else contextlib.nullcontext()
        self.optimizers = [self.optimizer_of(*each) for each in drawn["optimizers"]]
        self.schedules: list[Any] = []
        self.averages: list[AveragedModel] = []

    def optimizer_of(self, kind: str, options: dict[str, Any], layers: tuple[str, ...], split: Any) -> Any:
        params = [p for layer in layers for p in self.net.get_submodule(layer).parameters()]
        if kind == "Muon":
            params = [p for p in params if p.dim() == 2]
        if options.get("lr") == "tensor":
            options = {**options, "lr": torch.tensor(0.02)}
        groups = [{"params": params[:1], **split}, {"params": params[1:]}] if split and params[1:] else params
        return getattr(torch.optim, kind)(groups, **options)

    def pick(self, number: int) -> Any:
        return self.optimizers[number % len(self.optimizers)]

    def backward(self, used: str, dtype: torch.dtype, factor: float, seed: int) -> float:
        torch.manual_seed(seed)
        with self.amp.autocast("cpu", dtype=dtype):
            out = self.net(torch.randn(4, 6), torch.randperm(9)[:4], used)
        loss = out.float().square().mean() * factor
        self.scaler.scale(loss).backward()
        if self.net.table.weight.grad is not None:
            self.net.table.weight.grad = self.net.table.weight.grad.coalesce()
        return float(loss.item())

    def unscale(self, number: int, how: str) -> float:
        self.scaler.unscale_(optimizer := self.pick(number))
        grads = [
            p for g in optimizer.param_groups for p in g["params"] if p.grad is None or not p.grad.is_sparse
        ]
        if how == "value":
            nn.utils.clip_grad_value_(grads, 0.01)
        finite = all(p.grad.isfinite().all() for p in grads if p.grad is not None)
        return nn.utils.clip_grad_norm_(grads, 0.1).item() if how == "norm" and finite else 0.0

    def step(self, number: int) -> None:
        self.scaler.step(self.pick(number))

    def update(self) -> None:
        self.scaler.update()
        for each in self.schedules:
            each.step()
        for average in self.averages:
            average.update_parameters(self.net)

    def clear(self, to_none: bool) -> None:
        self.net.zero_grad(to_none)

    def grow(self, number: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.net.more.append(nn.Linear(6, 6, bias=False))
        self.pick(number).add_param_group({"params": list(self.net.more[-1].parameters())})

    def freeze(self, layer: str, trained: bool) -> None:
        self.net.get_submodule(layer).requires_grad_(trained)

    def assign(self) -> None:
        """Replace the parameters, and the optimizers with others that go on from their states."""
        self.net.load_state_dict({k: v * 0.9 for k, v in self.net.state_dict().items()}, assign=True)
        before = self.optimizers
        self.optimizers = [self.optimizer_of(*each) for each in self.drawn["optimizers"]]
        for optimizer, old in zip(self.optimizers, before, strict=True):
            if len(optimizer.param_groups) == len(old.param_groups):
                optimizer.load_state_dict(old.state_dict())

    def convert(self, dtype: torch.dtype) -> None:
        self.net.to(dtype)

    def copy(self, how: str, scaler: bool) -> None:
        """Go on with copies: of everything, or of the scaler alone."""
        names = ["scaler"] if scaler else ["net", "optimizers", "scaler", "schedules", "averages"]
        vars(self).update(COPIES[how]({name: getattr(self, name) for name in names}))

    def checkpoint(self) -> None:
        parts = [self.net, *self.optimizers, self.scaler]
        file = io.BytesIO()
        torch.save([part.state_dict() for part in parts], file)
        file.seek(0)
        for part, state in zip(parts, torch.load(file, weights_only=True), strict=True):
            part.load_state_dict(state)

    def schedule(self, number: int, kind: str) -> None:
        self.schedules.append(SCHEDULES[kind](self.pick(number)))

    def average(self) -> None:
        self.averages.append(AveragedModel(self.net))

    def spoil(self, number: int, value: float) -> None:
        grads = [p.grad for p in self.net.parameters() if p.grad is not None]
        if grads:
            grad = grads[number % len(grads)]
            (grad._values() if grad.is_sparse else grad).view(-1)[:1] = value

    def seen(self) -> list[tuple[str, Any]]:
        """Return all that a program could look at."""
        state = self.scaler.state_dict()
        seen: list[tuple[str, Any]] = [("scale", state["scale"]), ("growth", state["_growth_tracker"])]
        for name, param in self.net.named_parameters():
            seen += [(name, param.detach()), (f"{name}.grad", param.grad)]
        for optimizer in self.optimizers:
            groups = [v for g in optimizer.param_groups for k, v in g.items() if k != "params"]
            params = [p for g in optimizer.param_groups for p in g["params"]]
            states = [optimizer.state.get(p, {}) for p in params]
            seen += [("groups", groups), ("stepped", [p.detach() for p in params]), ("states", states)]
        seen += [("average", [p.detach() for p in average.parameters()]) for average in self.averages]
        return seen


def outcome(run: Run, action: tuple[Any, ...]) -> tuple[Any, list[str]]:
    """Return what an action returns or raises, and its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result: Any = getattr(run, action[0])(*action[1:])
        except Exception as error:
            result = error
    texts = {str(w.message)[:60] for w in caught if "Sparse invariant" not in str(w.message)}
    return result, sorted(texts)  # that one comes once per process


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        one, other = (t.to_dense() if t.is_sparse else t for t in (one, other))
        nan = one.isnan(), other.isnan()
        return one.dtype is other.dtype and torch.equal(*nan) and torch.equal(one[~nan[0]], other[~nan[1]])
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, Exception):
        texts = str(one), str(other)
        documented = texts[0] in DOCUMENTED and texts[1].startswith(
            texts[0] if texts[0] in CHECKS else CHECKS[0]
        )
        return documented or (type(one) is type(other) and texts[0][:45] == texts[1][:45])
    return type(one) is type(other) and (one == other or one != one)


def check(drawn: dict[str, Any], actions: list[tuple[Any, ...]]) -> None:
    theirs, ours = Run(drawn, False), Run(drawn, True)
    with ours.scope:
        for number, action in enumerate(actions):
            wanted, got = outcome(theirs, action), outcome(ours, action)
            assert same(wanted, got), f"{number} {action}: {wanted} and {got}"
            if isinstance(wanted[0], Exception) and not any(text in str(wanted[0]) for text in MISUSE):
                return  # torch's own limits leave a step half done
            for (name, one), (_, other) in zip(theirs.seen(), ours.seen(), strict=True):
                assert same(one, other), f"{number} {action}: {name} differs"


def drawn_optimizer(draw: Random, layers: tuple[str, ...]) -> tuple[Any, ...]:
    if layers == ("table",):
        return (*draw.choice([("SparseAdam", {}), ("SGD", {"lr": 0.1}), ("Adagrad", {})]), layers, None)
    kind = draw.choice([*OPTIMIZERS])
    options = {"lr": 0.02, **draw.choice(OPTIMIZERS[kind])}
    if kind != "Muon":
        options["maximize"] = draw.random() < 0.3
    if kind in ("Adam", "AdamW") and "foreach" not in options and draw.random() < 0.5:
        options["lr"] = "tensor"
    if kind == "SGD" and "fused" not in options:  # torch leaves garbage where a first fused step is skipped
        options["momentum"] = 0.9
    split = draw.choice([None, {"lr": 0.01}, {"weight_decay": 0.1}]) if options["lr"] != "tensor" else None
    return kind, options, layers, split if kind not in ("Muon", "Rprop") else None


def event(draw: Random) -> tuple[Any, ...]:
    """Draw what happens between two steps, or in the midst of one."""
    number, layer = draw.randrange(9), draw.choice(["a", "b", "norm"])
    return draw.choice(
        [
            ("grow", number, draw.randrange(99)),
            ("freeze", layer, draw.random() < 0.5),
            ("assign",),
            ("convert", draw.choice([torch.float64, torch.bfloat16])),
            ("copy", draw.choice([*COPIES]), draw.random() < 0.3),
            ("copy", draw.choice([*COPIES]), False),
            ("checkpoint",),
            ("checkpoint",),
            ("schedule", number, draw.choice([*SCHEDULES])),
            ("average",),
            ("spoil", number, draw.choice([torch.inf, torch.nan])),
            ("clear", draw.random() < 0.5),
            ("unscale", number, "no"),
            ("step", number),
            ("update",),
        ]
    )


def program(draw: Random) -> tuple[dict[str, Any], list[tuple[Any, ...]]]:
    layouts = draw.choice([LAYOUTS[:1], LAYOUTS[1:3], [LAYOUTS[3], LAYOUTS[0]]])
    drawn = {
        "seed": draw.randrange(999),
        "optimizers": [drawn_optimizer(draw, layers) for layers in layouts],
        "options": {"overlap": draw.random() < 0.4, "history": draw.choice([0, 9]), "warn_after": 0},
        "scope": draw.choice([contextlib.nullcontext, amp_core.cached_casts, amp_core.master_weights]),
        "interval": draw.choice([1, 2, 3]),
    }
    actions: list[tuple[Any, ...]] = []
    for _ in range(draw.randint(2, 6)):
        actions.append(("clear", draw.random() < 0.7))
        for _ in range(draw.choice([1, 1, 2])):
            used, dtype = draw.choice(["ab", "ab", "a", "b"]), draw.choice([torch.bfloat16, torch.float16])
            used += "t" if len(layouts) == 2 and layouts[0] == ("table",) else ""
            factor = draw.choice([1.0, 1.0, 0.001, torch.inf])
            actions.append(("backward", used, dtype, factor, draw.randrange(999)))
        for number in range(len(layouts)):
            if draw.random() < 0.3:
                actions.append(("unscale", number, draw.choice(["no", "norm", "value"])))
            actions.append(("step", number))
        actions.append(("update",))
        for _ in range(draw.choice([0, 1, 2])):
            actions.insert(draw.choice([len(actions), draw.randint(0, len(actions))]), event(draw))
    return drawn, actions


def test_optimizer_programs() -> None:
    """An optimizer, a copy or a checkpoint meets the scaler in a way that torch's scaler takes otherwise."""
    for draw in programs(8.0, number="optimizers"):
        drawn, actions = program(draw)
        try:
            check(drawn, actions)
        except Exception as error:
            raise AssertionError("\n".join(map(str, [drawn, *actions]))) from error
