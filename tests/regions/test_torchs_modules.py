"""The modules of torch's own tests with their samples, as `test_module_kinds` runs kinds of models."""

from __future__ import annotations

import copy
import functools
import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ..drawn import programs
from .test_module_kinds import FEATURES, TRANSFORMS, Model, check_as_torch

TOOLS = [name for name in FEATURES if name != "guard"]  # which raises where a sample gives inf
UNLIKE = {
    "nn.CTCLoss": "record",  # torch 2.11 saves other tensors for it under any mode
    "nn.Bilinear": "record",  # the page on recordings names it, and the encoder, as exceptions
    "nn.TransformerEncoder": "record",
    "nn.TransformerEncoderLayer": "record",
}


@functools.cache
def infos() -> list[Any]:
    """Return what torch's tests know of its modules."""
    from torch.testing._internal.common_modules import module_db  # takes seconds

    return [info for info in module_db if not info.is_lazy]


@functools.cache
def samples(number: int, training: bool) -> list[Any]:
    torch.manual_seed(0)
    info = infos()[number]
    settings = {"device": "cpu", "dtype": torch.float32, "requires_grad": False, "training": training}
    return [*itertools.islice(info.module_inputs_func(info, **settings), 0, 200, 5)]


class Sample(nn.Module):
    """A module with arguments of its own, the first of which depends on `x` and a parameter."""

    def __init__(self, layer: nn.Module, args: Any, kwargs: Any) -> None:
        super().__init__()
        self.layer, self.args, self.kwargs = layer, args, kwargs
        self.factor = nn.Parameter(torch.tensor(0.01))

    def forward(self, x: Tensor) -> Any:
        args = [copy.copy(value) for value in self.args]
        first = next((i for i, v in enumerate(args) if isinstance(v, Tensor) and v.is_floating_point()), None)
        if first is not None:
            args[first] = args[first] + x.sum() * self.factor
        return self.layer(*args, **self.kwargs)


def made(number: int, choose: random.Random) -> Model:
    """Return the module with this number in torch's list, made for one of its samples."""
    info, training = infos()[number], choose.random() < 0.7
    sample = choose.choice(samples(number, training))
    torch.manual_seed(choose.randrange(999))  # the samples are made once
    made_by, given = sample.constructor_input, sample.forward_input
    args, kwargs = (given.args, given.kwargs) if given else ((), {})
    layer = info.module_cls(*made_by.args, **made_by.kwargs).train(training)
    args, kwargs = tree_map(lambda v: v.clone() if isinstance(v, Tensor) else v, (args, kwargs))
    return Model(lambda m, x: m.sample(x), sample=Sample(layer, args, kwargs))


@pytest.mark.filterwarnings("ignore")
def test_torchs_modules() -> None:
    """A module of torch computes otherwise than in torch's region, in a policy, a scope or a recording."""
    assert len(infos()) > 100
    for choose in programs(10.0, number="torch's modules"):
        number, seed = choose.randrange(len(infos())), choose.randrange(10**6)
        name, feature = infos()[number].name, choose.choice(TOOLS)
        transform = choose.choice(TRANSFORMS)
        dtype = choose.choice([torch.bfloat16, torch.float16])
        if UNLIKE.get(name) == "record" and feature in ("record", "watch"):
            continue
        check_as_torch(seed, functools.partial(made, number), transform, dtype, feature)
