"""Random programs of `GradScaler.step_closure` against the same ones without a scaler."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
import torch._dynamo  # the first optimizer would load it, for seconds
from torch import Tensor, nn

from amp_core import GradScaler, autocast, cached_casts, master_weights

from ..drawn import programs
from .test_closures import Wrapping


class Evaluating(torch.optim.Optimizer):
    """Moves after each evaluation, or before the first; may catch errors, and keeps numbers in its group."""

    def __init__(self, params: Any, calls: int = 1, *, catches: bool = False, before: bool = False) -> None:
        super().__init__(params, {"lr": 0.1, "rates": [torch.tensor(0.1)]})
        self.calls, self.catches, self.before = calls, catches, before

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if self.before:
            self.move()
        for _ in range(self.calls):
            try:
                loss = closure()
            except Exception:
                if not self.catches:
                    raise
            self.move()
        return loss

    def move(self) -> None:
        group = self.param_groups[0]
        for param in group["params"]:
            if param.grad is not None:
                state = self.state[param]
                state.setdefault("momentum", torch.zeros_like(param)).mul_(0.5).add_(param.grad)
                param.sub_(state["momentum"], alpha=group["lr"])
                group["rates"][0].mul_(0.9)


def lbfgs(params: Any, search: str | None = None) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(params, lr=0.2, max_iter=4, history_size=3, line_search_fn=search)


KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "lbfgs": lbfgs,
    "wolfe": lambda params: lbfgs(params, "strong_wolfe"),
    "wrapped": lambda params: Wrapping(lbfgs(params)),
    "one": Evaluating,
    "three": lambda params: Evaluating(params, 3),
    "catches": lambda params: Evaluating(params, 3, catches=True),
    "before": lambda params: Evaluating(params, 1, before=True),
    "none": lambda params: Evaluating(params, 0, before=True),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "fused": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
}
CHAOTIC = ("lbfgs", "wolfe", "wrapped")  # with clipped gradients a rounding error becomes another path
SCOPES: dict[str, Callable[[nn.Module], Any]] = {
    "none": lambda _: contextlib.nullcontext(),
    "cached_casts": cached_casts,
    "master_weights": master_weights,
}


@dataclass
class Step:
    """Which evaluation overflows, and how; which one raises; what the closure and the call do besides."""

    bad: int | None
    how: str
    fails: int | None
    max_norm: float | None
    unscales: bool


class Run:
    """A network and its optimizer, with a scaler or without."""

    def __init__(self, settings: dict[str, Any], scaler: GradScaler | None) -> None:
        torch.manual_seed(settings["seed"])
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        self.x = torch.randn(6, 3)
        self.settings, self.scaler, self.key = settings, scaler, settings["key"]
        self.optimizer = KINDS[settings["kind"]](self.model.parameters())
        if scaler is not None:
            scaler.name_parameters(self.model.named_parameters())
        self.scope = SCOPES[settings["scope"]](self.model)
        self.forward = torch.compile(self.model, backend="eager") if settings["compiled"] else self.model
        self.norm: float | None = None

    def params(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]

    def state(self) -> Any:
        inner = getattr(self.optimizer, "inner", self.optimizer)
        return copy.deepcopy((inner.state_dict(), self.optimizer.state_dict()["param_groups"]))

    def backward(self, factor: float = 1.0) -> Tensor:
        self.optimizer.zero_grad()
        with autocast("cpu", dtype=torch.bfloat16, enabled=self.settings["autocast"]):
            loss = self.forward(self.x).float().square().mean()
        (self.scaler.scale(loss * factor, key=self.key) if self.scaler else loss).backward()
        return loss

    def closure(self, step: Step) -> Tensor:
        number, self.evaluations = self.evaluations, self.evaluations + 1
        if number == step.fails:
            self.optimizer.zero_grad()
            raise MemoryError
        bad = number == step.bad and self.scaler is not None
        self.overflowed |= bad
        loss = self.backward(math.inf if bad and step.how == "loss" else 1.0)
        if bad and step.how != "loss":
            self.model[2].weight.grad[0, 1] = float(step.how)
        if step.unscales:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer, key=self.key)
            largest = 1000.0 if self.settings["kind"] in CHAOTIC else 0.01
            nn.utils.clip_grad_value_(self.model.parameters(), largest)
        if self.scaler is None and step.max_norm is not None:
            self.norm = nn.utils.clip_grad_norm_(self.model.parameters(), step.max_norm).item()
        return loss

    def step(self, step: Step) -> Any:
        self.evaluations, self.overflowed, self.norm = 0, False, None
        if self.settings["kind"] in ("before", "none"):
            self.backward()
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer, key=self.key)
        if self.scaler is None:
            return self.optimizer.step(torch.enable_grad()(lambda: self.closure(step)))
        return self.scaler.step_closure(
            self.optimizer, lambda: self.closure(step), max_norm=step.max_norm, key=self.key
        )


def drawn_step(chance: Random, kind: str) -> Step:
    return Step(
        bad=chance.choice([None, None, 0, 1, 2]),
        how=chance.choice(["inf", "nan", "loss"]),
        fails=chance.choice([None, None, None, 0, 1, 2]),
        max_norm=chance.choice([None, 1000.0] if kind in CHAOTIC else [None, 0.05, 100.0]),
        unscales=chance.random() < 0.2,
    )


def take(ours: Run, plain: Run, step: Step) -> bool:
    """Take a step in both runs, unless it is to be left out; return whether it ended without an error."""
    before, state, catches = ours.params(), ours.state(), ours.settings["kind"] == "catches"
    result, raised = None, False
    try:
        result = ours.step(step)
    except MemoryError:
        raised = True
    except AssertionError as error:
        raised = catches and step.fails == 2 and "caught the error of the last call" in str(error)
        if not raised:
            raise
    if ours.overflowed or raised:
        assert result is None
        assert all(map(torch.equal, ours.params(), before))
        same(ours.state(), state, 0, 0)
    else:
        torch.testing.assert_close(result, plain.step(step), rtol=1e-4, atol=1e-6)
    if raised:
        return False
    record = ours.scaler.last_step[ours.optimizer]
    assert (record.skipped, record.key) == (ours.overflowed, ours.key)
    if not ours.overflowed:
        assert (record.total_norm is None) == (plain.norm is None)
        assert plain.norm is None or math.isclose(record.total_norm, plain.norm, rel_tol=1e-3)
    elif not (step.unscales or catches):  # clamped, or of another evaluation
        bad = [n for n, p in ours.model.named_parameters() if not p.grad.isfinite().all()]
        assert [b.name for b in record.bad_parameters] == bad
        assert "2.weight" in bad
    return True


def same(one: Any, other: Any, rtol: float, atol: float) -> None:
    """Compare nested states; `assert_close` takes no strings."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        one, other = [*one.values()], [*other.values()]
    if isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for each, its in zip(one, other, strict=True):
            same(each, its, rtol, atol)
    elif isinstance(one, (Tensor, float)):
        torch.testing.assert_close(one, other, rtol=rtol, atol=atol)
    else:
        assert one == other


def run(chance: Random, said: list[Any]) -> None:
    scaler = GradScaler("cpu", 64.0, warn_after=0, overlap=chance.random() < 0.3)
    pairs, scales = [], dict.fromkeys([None, "a", "b"], 64.0)
    for _ in range(chance.choice([1, 1, 2])):
        settings = {
            "kind": chance.choice([*KINDS]),
            "scope": chance.choice([*SCOPES]),
            "seed": chance.randrange(100),
            "autocast": chance.random() < 0.5,
            "key": chance.choice([*scales]),
            "compiled": chance.random() < 0.01,
        }
        said.append(settings)
        pairs.append((Run(settings, scaler), Run(settings, None)))
    with contextlib.ExitStack() as scopes:
        for each in [one for pair in pairs for one in pair]:
            scopes.enter_context(each.scope)
        for _ in range(4):
            one_round(chance, said, scaler, pairs, scales)


def one_round(
    chance: Random,
    said: list[Any],
    scaler: GradScaler,
    pairs: list[tuple[Run, Run]],
    scales: dict[str | None, float],
) -> None:
    stepped, overflowed = False, set()
    for ours, plain in pairs:
        said.append(drawn_step(chance, ours.settings["kind"]))
        done = take(ours, plain, said[-1])
        torch.testing.assert_close(ours.params(), plain.params(), rtol=1e-4, atol=1e-6)
        same(ours.state(), plain.state(), 1e-3, 1e-5)
        stepped |= done
        if done and ours.overflowed:
            overflowed.add(ours.key)
        if chance.random() < 0.2:
            for each in (ours, plain):
                each.optimizer.load_state_dict(copy.deepcopy(each.optimizer.state_dict()))
    if stepped:
        scaler.update()
    for key in overflowed:
        scales[key] *= 0.5
    assert all(scaler.get_scale(key) == scales[key] for key in (None, *scaler._scales.keyed))
    if chance.random() < 0.2:
        scaler.load_state_dict(scaler.state_dict())


def test_closure_programs() -> None:
    """An evaluation is stepped on though it overflowed, or a step that was not taken leaves something."""
    for chance in programs(5.0):
        said: list[Any] = []
        try:
            run(chance, said)
        except Exception as error:
            raise AssertionError("\n".join(map(str, said))) from error
