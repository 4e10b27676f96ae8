"""Random training programs, each run with torch.amp and with amp-core: every tensor has the same bits."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import amp_core
from amp_core import OpPolicy, apply_policy, cached_casts, master_weights

from ..drawn import programs

POLICY = OpPolicy.default("cpu").override({"linear": "lower_precision_fp", "erfinv": "fp32"})
SCOPES: dict[str, Callable[[nn.Module], AbstractContextManager[Any]]] = {
    "none": lambda _: nullcontext(),
    "cached_casts": cached_casts,
    "master_weights": master_weights,
    "guard": amp_core.guard,
    "record": amp_core.record,
    "modules": lambda model: apply_policy(model, {nn.Linear: {"linear": "lower_precision_fp"}}),
}
OPTIMIZERS: dict[str, Callable[[Iterable[Tensor]], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.01),
}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
BAD = 2  # the loss of this step is inf


class Program:
    """One run: what the two libraries call differently, and the tensors that it makes."""

    def __init__(self, ours: bool, scope: str, optimizer: str, dtype: str, policy: bool) -> None:
        self.ours, self.scope, self.dtype = ours, scope, DTYPES[dtype]
        self.policy = {"policy": POLICY} if ours and policy else {}
        self.optimizer = OPTIMIZERS[optimizer]
        self.scaler = (amp_core if ours else torch.amp).GradScaler("cpu", 1024.0, growth_interval=2)
        self.seen: list[Tensor] = []
        self.scopes = ExitStack()
        torch.manual_seed(0)

    def region(self) -> AbstractContextManager[Any]:
        return (amp_core if self.ours else torch).autocast("cpu", dtype=self.dtype, **self.policy)

    def start(self, *modules: nn.Module) -> torch.optim.Optimizer:
        model = nn.ModuleList(modules)
        self.model = model
        if self.ours:
            self.scopes.enter_context(SCOPES[self.scope](model))
        return self.optimizer([p for p in model.parameters() if p.requires_grad])

    def step(self, optimizer: torch.optim.Optimizer, loss: Tensor, number: int) -> None:
        optimizer.zero_grad()
        self.scaler.scale(loss * torch.inf if number == BAD else loss).backward()
        self.finish(optimizer, loss)

    def finish(self, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
        self.scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 0.5)
        self.scaler.step(optimizer)
        self.scaler.update()
        self.seen += [loss.detach(), torch.tensor(self.scaler.get_scale())]

    def end(self, *optimizers: torch.optim.Optimizer) -> list[Tensor]:
        self.seen += [p.detach() for p in self.model.parameters()]
        self.seen += [
            v.detach() for o in optimizers for s in o.state.values() for v in s.values() if v is not None
        ]
        self.scopes.close()
        return self.seen


def mlp(inputs: int = 6, outputs: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, outputs))


def gan(p: Program) -> list[Tensor]:
    generator, critic = mlp(4, 6), mlp(6, 1)
    one, two = p.start(generator), p.start(critic)
    for number in range(5):
        with p.region():
            fake = generator(torch.randn(5, 4))
            real = F.softplus(-critic(torch.randn(5, 6))).mean()
            loss = real + F.softplus(critic(fake.detach())).mean()
        p.step(two, loss, number)
        with p.region():
            loss = F.softplus(-critic(fake)).mean()
        p.step(one, loss, -1)
    return p.end(one, two)


def gradient_penalty(p: Program) -> list[Tensor]:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = p.start(model)
    for number in range(4):
        x = torch.randn(5, 6, requires_grad=True)
        with p.region():
            out = model(x).float().sum()
        (slope,) = torch.autograd.grad(p.scaler.scale(out), x, create_graph=True)
        norm = (slope / p.scaler.get_scale()).norm(dim=1)
        p.step(optimizer, out + (norm - 1).square().mean(), number)
    return p.end(optimizer)


def averages_and_growth(p: Program) -> list[Tensor]:
    """An average that is evaluated, layers frozen and thawed, a layer and a group added."""
    model = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
    optimizer, average = p.start(model), AveragedModel(model, use_buffers=True)
    for number in range(6):
        model[0].requires_grad_(number != 1)
        if number == 4:
            model.append(nn.Linear(6, 6))
            optimizer.add_param_group({"params": list(model[2].parameters())})
        x = torch.randn(5, 6)
        with p.region():
            for layer in model:
                x = x + F.relu(layer(x))
            loss = x.float().square().mean()
        p.step(optimizer, loss, number)
        if number < 4:
            average.update_parameters(model)
        with torch.inference_mode(), p.region():
            p.seen.append(average.module[0](torch.ones(1, 6)).clone())
    return p.end(optimizer)


def micro_batches(p: Program) -> list[Tensor]:
    """Windows of several lengths through checkpoints, and a copy of the model that goes back."""
    model = mlp()
    optimizer, best = p.start(model), copy.deepcopy(model.state_dict())
    for number, parts in enumerate([2, 1, 3, 1, 2]):
        optimizer.zero_grad(set_to_none=number % 2 == 0)
        for part in range(parts):
            with p.region():
                x = torch.randn(3, 6)
                out = model(x) if p.policy else checkpoint(model, x, use_reentrant=False)
                loss = out.float().square().mean() / parts
            p.scaler.scale(loss * torch.nan if (number, part) == (BAD, 1) else loss).backward()
        p.finish(optimizer, loss)
        if number == 3:
            model.load_state_dict(best)
    return p.end(optimizer)


def truncated_backward(p: Program) -> list[Tensor]:
    cell, head = nn.GRUCell(4, 6), nn.Linear(6, 2)
    optimizer, hidden = p.start(cell, head), torch.zeros(3, 6)
    for number in range(4):
        with p.region():
            for x in torch.randn(3, 3, 4):
                hidden = cell(x, hidden)
            loss = head(hidden).float().square().mean()
        p.step(optimizer, loss, number)
        hidden = hidden.detach()
    return p.end(optimizer)


def perturbed_weights(p: Program) -> list[Tensor]:
    """Two passes per step, the second at other weights; then weights are clamped."""
    model = mlp()
    optimizer = p.start(model)
    for number in range(4):
        x = torch.randn(3, 6)
        for second in (False, True):
            optimizer.zero_grad()
            with p.region():
                loss = model(x).float().square().mean()
            if not second:
                p.scaler.scale(loss).backward()
                with torch.no_grad():
                    moves = [0.01 * param.grad.sign() for param in model.parameters()]
                    torch._foreach_add_([*model.parameters()], moves)
        p.scaler.scale(loss * torch.inf if number == BAD else loss).backward()
        with torch.no_grad():
            torch._foreach_sub_([*model.parameters()], moves)
        p.finish(optimizer, loss)
        with torch.no_grad():
            model[0].weight.clamp_(-0.3, 0.3)
    return p.end(optimizer)


def per_sample_gradients(p: Program) -> list[Tensor]:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = p.start(model)
    p.scaler.scale(torch.ones(()))

    def loss_of(params: dict[str, Tensor], x: Tensor) -> Tensor:
        with p.region():
            return functional_call(model, params, x[None]).float().square().mean() * p.scaler.get_scale()

    for _ in range(3):
        params = {name: param.detach() for name, param in model.named_parameters()}
        gradients = vmap(grad(loss_of), in_dims=(None, 0))(params, torch.randn(5, 6))
        for name, param in model.named_parameters():
            param.grad = gradients[name].clamp(-1, 1).sum(0)
        p.finish(optimizer, torch.zeros(()))
    return p.end(optimizer)


PROGRAMS = (
    gan,
    gradient_penalty,
    averages_and_growth,
    micro_batches,
    truncated_backward,
    perturbed_weights,
    per_sample_gradients,
)


def test_training_programs() -> None:
    """A scheme of training meets a feature in a way that no test of either has."""
    for chance in programs(8.0):
        program = chance.choice(PROGRAMS)
        settings = {
            "scope": chance.choice([*SCOPES]),
            "optimizer": chance.choice([*OPTIMIZERS]),
            "dtype": chance.choice([*DTYPES]),
            "policy": chance.random() < 0.3,
        }
        try:
            wanted, got = (program(Program(ours, **settings)) for ours in (False, True))
            for one, other in zip(wanted, got, strict=True):
                torch.testing.assert_close(other, one, rtol=0, atol=0, equal_nan=True)
        except Exception as error:
            raise AssertionError(f"{program.__name__} with {settings}") from error
