"""`compare` blames the line that loses digits, however its result is passed on."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import amp_core

from ..drawn import programs

FP16 = torch.float16


def shifted(y: Tensor) -> Tensor:
    return (y + 3000.0) - 3000.0  # here


def shifted_in_place(y: Tensor) -> Tensor:
    z = y * 1
    return z.add_(3000.0).sub_(3000.0)  # here


def shifted_in_part(y: Tensor) -> Tensor:
    z = y * 1
    z[:, 2:].add_(3000.0).sub_(3000.0)  # here
    z[:, :2].mul_(1)
    return z


def copied_to_a_part(y: Tensor) -> Tensor:
    z = y * 1
    z[1:3] = (y[1:3] + 3000.0) - 3000.0  # here
    z[3:] = y[3:]
    return z


def copied_to_the_other_layout(y: Tensor) -> Tensor:
    z = torch.zeros_like(y).t()
    z.copy_((y.t() + 3000.0) - 3000.0)  # here
    return z.t()


def shifted_in_a_list(y: Tensor) -> Tensor:
    z = [y * 0, y * 1]
    torch._foreach_add_(z, 3000.0)
    return z[1] - z[0]  # here


def joined(y: Tensor) -> Tensor:
    return torch.cat([y[:, :4], (y[:, 4:] + 3000.0) - 3000.0], -1)  # here


def too_large(y: Tensor) -> Tensor:
    return torch.matmul(y * 200, (y * 200).t()) @ y / 4e4  # here


def too_small(y: Tensor) -> Tensor:
    return (y * 1e-8) * 1e8  # here


FAULTS: list[Callable[[Tensor], Tensor]] = [
    *(shifted, shifted_in_place, shifted_in_part, copied_to_a_part, copied_to_the_other_layout),
    *(shifted_in_a_list, joined, too_large, too_small),
]


class Faulty(nn.Module):
    """Loses digits in one of its calls."""

    def __init__(self, fault: Callable[[Tensor], Tensor], call: int) -> None:
        super().__init__()
        self.layer, self.fault, self.left = nn.Linear(8, 8), fault, call

    def forward(self, x: Tensor) -> Tensor:
        self.left -= 1
        y: Tensor = self.layer(x)
        return self.fault(y) if self.left == -1 else y


class Block(nn.Module):
    """Loses none."""

    def __init__(self, kind: int) -> None:
        super().__init__()
        self.layer, self.norm, self.kind = nn.Linear(8, 8), nn.LayerNorm(8), kind

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == 0:
            return x + torch.tanh(self.layer(x))
        if self.kind == 1:
            return x + torch.softmax(self.layer(x), -1)
        y: Tensor = self.norm(x)
        return y


def source(line: str) -> str:
    file, _, number = line.rpartition(":")
    with open(file, encoding="utf-8") as lines:
        return lines.readlines()[int(number) - 1]


def loss(model: nn.Module, faulty: Faulty, call: int, x: Tensor, wanted: Tensor) -> Tensor:
    faulty.left = call
    return F.mse_loss(model(x).float(), wanted)


def test_the_line_that_loses_digits_is_blamed() -> None:
    """An error that a copy writes to a part of a tensor is blamed on the next op that reads the tensor."""
    for drawn in programs(seconds=5, number="errors"):
        torch.manual_seed(seed := drawn.randrange(2**32))
        calls = drawn.randint(1, 2)
        faulty = Faulty(drawn.choice(FAULTS), call := drawn.randrange(calls))
        modules = [Block(drawn.randrange(3)) for _ in range(drawn.randrange(4))]
        at = drawn.randint(0, len(modules))
        model = nn.Sequential(*modules[:at], faulty, *modules[at:], *[faulty] * (calls - 1))
        x, wanted = torch.randn(6, 8), torch.randn(6, 8)

        found = amp_core.compare(functools.partial(loss, model, faulty, call, x, wanted), "cpu", dtype=FP16)
        if leads := found.leads():
            assert leads[0].key.place.module == str(at), (seed, faulty.fault, leads[0])
            assert "# here" in source(leads[0].line), (seed, faulty.fault, leads[0])
        else:
            assert found.result_error < 0.125, (seed, faulty.fault)
