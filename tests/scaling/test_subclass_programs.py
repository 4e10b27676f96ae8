"""Random programs with subclasses as projects write them: ours as base gives the bits that torch's gives."""

from __future__ import annotations

import copy
from collections import defaultdict
from random import Random
from typing import Any

import torch
import torch._dynamo  # the first optimizer would load it, for seconds
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state

import amp_core

from ..drawn import programs


def deciding(base: Any) -> Any:
    """As NeMo's: decides itself, and lowers the scale at the second overflow in a row."""

    class Scaler(base):  # type: ignore[misc]
        left = 2

        def _maybe_opt_step(self, optimizer: Any, optimizer_state: Any, *args: Any, **kwargs: Any) -> Any:
            found = sum(flag.item() for flag in optimizer_state["found_inf_per_device"].values())
            return None if found else optimizer.step(*args, **kwargs)

        def update(self, new_scale: Any = None) -> None:
            scale, tracker = self._check_scale_growth_tracker("update")
            states = self._per_optimizer_states.values()
            found = torch.stack([f for s in states for f in s["found_inf_per_device"].values()]).amax()
            self.left = self.left - 1 if found else 2
            if found and self.left > 0:
                tracker.fill_(0)
            else:
                factors = self._growth_factor, self._backoff_factor, self._growth_interval
                torch._amp_update_scale_(scale, tracker, found, *factors)
            self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)

        def load_state_dict(self, state: Any) -> None:
            self._init_scale, self._init_growth_tracker = state["scale"], state["_growth_tracker"]

    return Scaler


def bounded(base: Any) -> Any:
    """As many training scripts: keeps the scale within bounds, and makes it itself."""

    class Scaler(base):  # type: ignore[misc]
        def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
            self._scale = torch.full((), self._init_scale, device=dev)
            self._growth_tracker = torch.full((), self._init_growth_tracker, dtype=torch.int32, device=dev)

        def update(self, new_scale: Any = None) -> None:
            super().update(new_scale)
            if self._scale < 16:
                self._scale = torch.tensor(16).to(self._scale)
            self._scale.clamp_(max=128)

    return Scaler


def clipping(base: Any) -> Any:
    """Clips where it unscales, and replaces the gradients."""

    class Scaler(base):  # type: ignore[misc]
        def unscale_(self, optimizer: Any) -> None:
            super().unscale_(optimizer)
            for group in optimizer.param_groups:
                for param in group["params"]:
                    param.grad = None if param.grad is None else param.grad.clamp(-0.01, 0.01)

    return Scaler


class Outer:
    """As hivemind's: the scaler unscales for it, and steps what it wraps."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    @property
    def param_groups(self) -> Any:
        return self.inner.param_groups


def passing(base: Any) -> Any:
    """Unscales for a wrapper, and gives its state to what that wraps."""

    class Scaler(base):  # type: ignore[misc]
        def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            outer, states = Outer(optimizer), self._per_optimizer_states
            if states[id(optimizer)]["stage"] is OptState.READY:
                self.unscale_(outer)
                states[id(optimizer)] = copy.deepcopy(states.pop(id(outer)))
                states[id(optimizer)]["passed"] = True
            return super().step(optimizer, *args, **kwargs)

    return Scaler


SCALERS = (deciding, bounded, clipping, passing)
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "fused adam": lambda params: torch.optim.Adam(params, lr=0.01, fused=True),
}


def trained(base: Any, drawn: dict[str, Any]) -> list[Any]:
    torch.manual_seed(0)
    cls, draw, layers = drawn["scaler"](base), Random(drawn["seed"]), [nn.Linear(4, 3), nn.Linear(3, 2)]
    parts = layers if drawn["two"] else [nn.ModuleList(layers)]
    optimizers = [OPTIMIZERS[drawn["optimizer"]](part.parameters()) for part in parts]
    scaler, seen = cls("cpu", 64.0, growth_interval=2), list[Any]()
    for _ in range(8):
        out = layers[1](layers[0](torch.randn(5, 4)).tanh())
        scaler.scale(out.square().mean() * draw.choice([1.0, 1.0, torch.inf])).backward()
        for part, optimizer in zip(parts, optimizers, strict=True):
            if draw.random() < 0.4:
                scaler.unscale_(optimizer)
                if draw.random() < 0.5:
                    nn.utils.clip_grad_norm_(part.parameters(), 0.1)
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
        state = scaler.state_dict()
        event = draw.choice(["none", "none", "resume", "deepcopy", "copy"])
        if event == "resume":
            scaler = cls("cpu", 1.0, growth_interval=2)
            scaler.load_state_dict(state)
        elif event != "none":
            scaler = getattr(copy, event)(scaler)
        seen += [state["scale"], state["_growth_tracker"]]
    return [*seen, *(param.detach() for part in parts for param in part.parameters())]


def same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)


def test_subclass_programs() -> None:
    """A project's own scaler divides gradients twice, takes a bad step, or moves the scale otherwise."""
    for draw in programs(4.0, number="subclasses"):
        drawn = {
            "scaler": draw.choice(SCALERS),
            "optimizer": draw.choice([*OPTIMIZERS]),
            "two": draw.random() < 0.5,
            "seed": draw.randrange(9999),
        }
        wanted, got = (trained(base, drawn) for base in (torch.amp.GradScaler, amp_core.GradScaler))
        assert all(map(same, wanted, got)), drawn
