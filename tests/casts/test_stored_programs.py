"""Random training programs whose weights are stored in bfloat16, against the same ones in float32."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from amp_core import GradScaler, master_weights

from ..drawn import programs

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True),
    "fused sgd": lambda params: torch.optim.SGD(params, lr=0.05, fused=True),
    "adam": lambda params: torch.optim.Adam(params, lr=torch.tensor(0.01), foreach=False, amsgrad=True),
    "fused adamw": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.01),
    "rprop": lambda params: torch.optim.Rprop(params, lr=0.01),
}
SHAPES = [(3,), (4, 5), (2, 3, 2), (1,), (0,), ()]
EVENTS = ["bad", "freeze", "reload", "copy", "share", "lr", "partial", "micro-batches", "scaler"]
EVENTS += ["snapshot", "rollback", "rollback the optimizer first", "cast", "swap", "move", "switch", "split"]


class Run:
    """One training; the weights are stored in bfloat16, or stay as they are."""

    def __init__(self, drawn: dict[str, Any], stored: bool) -> None:
        torch.manual_seed(drawn["seed"])
        self.drawn, self.stored, self.scaler = drawn, stored, GradScaler("cpu", 64.0)
        self.snapshot: Any = None
        number = len(drawn["shapes"])
        self.start([torch.randn(s) for s in drawn["shapes"]], [1, number - 1] if number > 2 else [number])

    def start(self, values: list[Tensor], sizes: list[int]) -> None:
        params = [nn.Parameter(value.t().contiguous().t() if value.dim() == 2 else value) for value in values]
        rest = iter(params)
        groups = [{"params": [*itertools.islice(rest, size)]} for size in sizes]
        if len(params) > 2:
            groups[0]["lr"] = 0.02
        self.attach(nn.ParameterList(params), OPTIMIZERS[self.drawn["optimizer"]](groups))

    def attach(self, model: nn.ParameterList, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.masters = master_weights(model, optimizer, "remainder") if self.stored else None

    def before(self, event: str) -> None:
        """Do to model, optimizer or scaler what a program does between two steps."""
        getattr(self, "on_" + event.replace(" ", "_"), lambda: None)()

    def on_freeze(self) -> None:
        self.model[0].requires_grad_(not self.model[0].requires_grad)

    def on_reload(self) -> None:
        saved = pickle.loads(pickle.dumps((self.model.state_dict(), self.optimizer.state_dict())))
        trained = [p.requires_grad for p in self.model]
        sizes = [len(group["params"]) for group in self.optimizer.param_groups]
        self.start([torch.zeros_like(p.detach()) for p in self.model], sizes)
        for param, is_trained in zip(self.model, trained, strict=True):
            param.requires_grad_(is_trained)
        self.model.load_state_dict(saved[0])
        self.optimizer.load_state_dict(saved[1])

    def on_copy(self) -> None:
        self.attach(*copy.deepcopy((self.model, self.optimizer)))

    def on_share(self) -> None:
        self.model.share_memory()

    def on_lr(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = group["lr"] * 0.5

    def on_snapshot(self) -> None:
        self.snapshot = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))

    def on_rollback(self, step: int = 1) -> None:
        if self.snapshot is not None:
            # A copy, as torch's optimizers step on what they were given.
            parts = [*zip((self.model, self.optimizer), copy.deepcopy(self.snapshot), strict=True)]
            for part, saved in parts[::step]:
                part.load_state_dict(saved)

    def on_rollback_the_optimizer_first(self) -> None:
        self.on_rollback(-1)

    def on_cast(self) -> None:
        if self.stored:
            self.model.float().bfloat16()

    def on_swap(self) -> None:
        for param in self.model:
            param.grad = None
            torch.utils.swap_tensors(param, nn.Parameter(param.detach().clone(), param.requires_grad))

    def on_move(self) -> None:
        for state in self.optimizer.state.values():
            state.update({k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()})
        for param in self.model:
            param.data = param.data.clone()

    def on_switch(self) -> None:
        for group in self.optimizer.param_groups:
            other_way = not (group["foreach"] or group.get("fused") or isinstance(group["lr"], Tensor))
            group["foreach"] = other_way

    def on_split(self) -> None:
        group = self.optimizer.param_groups.pop()
        for part in (group["params"][:1], group["params"][1:]):
            self.optimizer.add_param_group({**group, "params": part})
        self.snapshot = None

    def on_scaler(self) -> None:
        state = self.scaler.state_dict()
        self.scaler = GradScaler("cpu")
        self.scaler.load_state_dict(state)

    def step(self, number: int, events: list[str]) -> list[Tensor]:
        """Take a step on gradients that bfloat16 holds exactly; return the float32 weights."""
        self.optimizer.zero_grad()
        self.scaler.scale(torch.ones(()))
        left_out = 1 if "partial" in events and len(self.model) > 1 else 0
        trained = [p for p in [*self.model][left_out:] if p.requires_grad]
        for micro_batch in range(3 if "micro-batches" in events else 1):
            draw = torch.Generator().manual_seed(10 * number + micro_batch)
            for param in trained:
                grad = torch.randint(-8, 9, param.shape, generator=draw).to(param.dtype)
                grad *= self.scaler.get_scale() / 8
                if "bad" in events and micro_batch == 0:
                    grad.view(-1)[:1] = math.inf
                param.grad = grad if param.grad is None else param.grad + grad
        if trained:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        if self.masters is None:
            return [p.detach().clone() for p in self.model]
        return [*self.masters.float32_weights().values()]


def program(draw: random.Random) -> dict[str, Any]:
    shapes = [draw.choice(SHAPES) for _ in range(draw.randint(1, 4))]
    events = [[draw.choice(EVENTS) for _ in range(draw.choice([0, 0, 1, 2]))] for _ in range(6)]
    optimizer = draw.choice([*OPTIMIZERS])
    # A copy of weights that have taken no step yet starts from their rounded values, as the docs say; without
    # states of the optimizer's own, also of those that have taken none since they were loaded.
    anew = optimizer == "fused sgd" and ["reload", "copy"] in events
    if any(e in ("freeze", "partial", "bad") for each in events for e in each) or "copy" in events[0] or anew:
        events = [[e for e in each if e != "copy"] for each in events]
    return {
        "shapes": shapes,
        "optimizer": optimizer,
        "events": events,
        "seed": draw.randrange(1000),
    }


def test_stored_weights_are_those_of_a_float32_run() -> None:
    """A checkpoint, a copy, a frozen weight or a skipped step loses the low bits of some weight."""
    for draw in programs(seconds=4.0, number="stored"):
        drawn = program(draw)
        wide, stored = Run(drawn, False), Run(drawn, True)
        for number, events in enumerate(drawn["events"]):
            for event in events:
                wide.before(event)
                stored.before(event)
            for exact, got in zip(wide.step(number, events), stored.step(number, events), strict=True):
                assert torch.equal(exact, got), f"step {number} differs: {drawn}"
            assert wide.scaler.get_scale() == stored.scaler.get_scale()
