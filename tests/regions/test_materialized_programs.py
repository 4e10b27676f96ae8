"""Random models whose graph gives what they give in a region, again and again, also exported and loaded."""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import amp_core
from amp_core import OpPolicy, autocast, materialize

from ..drawn import programs

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch copies its own graphs

LOW = torch.bfloat16
RULES = ("lower_precision_fp", "fp32", "unchanged", "low_in_fp32_out", "fp32_set_opt_dtype")
OPS = ("linear", "softmax", "layer_norm", "add", "mul", "gelu", "sum", "matmul", "embedding", "cat")


class Part(nn.Module):
    """A layer, perhaps in a region of its own, that is called in some way."""

    def __init__(self, layer: nn.Module, call: Callable[..., Tensor], around: str) -> None:
        super().__init__()
        self.layer, self.call, self.around = layer, call, around

    def forward(self, x: Tensor) -> Tensor:
        if self.around == "low":
            with autocast("cpu", LOW):
                return self.call(self.layer, x)
        if self.around == "fp16":
            with torch.autocast("cpu", torch.float16):
                return self.call(self.layer, x.float())
        if self.around == "off":
            with autocast("cpu", enabled=False):
                return self.call(self.layer, x.float())
        return self.call(self.layer, x)


class Statistic(nn.Module):
    """Keeps a mean: written in place, replaced, or as a parameter."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(8, 8)
        if kind == "parameter":
            self.mean = nn.Parameter(torch.zeros(8))
        else:
            self.register_buffer("mean", torch.zeros(8), persistent=kind != "hidden")

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        now = y.detach().mean((0, 1)).to(self.mean.dtype)
        if self.kind == "replaced":
            self.mean = self.mean.lerp(now, 0.5)
        else:
            with torch.no_grad():
                self.mean.lerp_(now, 0.5)
        return y - self.mean


def functionally(layer: nn.Module, x: Tensor) -> Tensor:
    return functional_call(layer, {name: p * 1.5 for name, p in layer.named_parameters()}, (x,))


def attend(layer: nn.Module, x: Tensor) -> Tensor:
    y = layer(x)
    return F.scaled_dot_product_attention(y, y, y)


LAYERS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor]]] = {
    "linear": (lambda: nn.Linear(8, 8), lambda f, x: f(x)),
    "twice": (lambda: nn.Linear(8, 8), lambda f, x: f(f(x)) + x),
    "transposed": (lambda: nn.Linear(8, 8), lambda f, x: x @ f.weight.t() + f.bias),
    "functional": (lambda: nn.Linear(8, 8), functionally),
    "attention": (lambda: nn.Linear(8, 8), attend),
    "norm": (lambda: nn.LayerNorm(8), lambda f, x: f(x)),
    "softmax": (lambda: nn.Softmax(-1), lambda f, x: f(x)),
    "gelu": (nn.GELU, lambda f, x: f(x)),
    "table": (lambda: nn.Embedding(5, 8), lambda f, x: x + f((x[..., 0] > 0).long())),
    "tied": (lambda: nn.Embedding(8, 8), lambda f, x: F.linear(f((x[..., 0] > 0).long()), f.weight)),
    "conv": (lambda: nn.Conv1d(8, 8, 1), lambda f, x: f(x.transpose(1, 2)).transpose(1, 2)),
    "cat": (lambda: nn.Linear(8, 4), lambda f, x: torch.cat([f(x), x[..., :4]], -1)),
    "weight norm": (lambda: parametrizations.weight_norm(nn.Linear(8, 8)), lambda f, x: f(x)),
    "in place": (lambda: nn.Linear(8, 8), lambda f, x: f(x).mul_(0.5).add_(1)),
    "write": (lambda: nn.Linear(8, 8), lambda f, x: torch.zeros_like(x).index_copy_(
        2, torch.arange(8), f(x).to(x.dtype))),
    "cond": (lambda: nn.Linear(8, 8), lambda f, x: torch.cond(x.sum() > 0, f, lambda x: f(x) * 2, (x,))),
    **{
        f"mean {kind}": (lambda kind=kind: Statistic(kind), lambda f, x: f(x))
        for kind in ("buffer", "hidden", "replaced", "parameter")
    },
}


class Model(nn.Module):
    """Parts one after the other, some of them shared, with plain containers around."""

    def __init__(self, choose: random.Random) -> None:
        super().__init__()
        names = choose.choices(list(LAYERS), k=choose.randrange(1, 5))
        arounds = [choose.choice(["", "", "", "low", "fp16", "off"]) for _ in names]
        made = [Part(LAYERS[n][0](), LAYERS[n][1], a) for n, a in zip(names, arounds, strict=True)]
        if choose.random() < 0.3:
            made.append(made[0])
        self.parts, self.about = nn.ModuleList(made), list(zip(names, arounds, strict=True))
        self.gives = choose.choice(["tensor", "dict", "tuple", "same twice", "argument"])
        self.about.append(self.gives)

    def forward(self, inputs: dict[str, Tensor], scale: Tensor | None = None) -> Any:
        x = inputs["x"]
        first = None
        for part in self.parts:
            x = part(x)
            first = x if first is None else first
        x = x if scale is None else x * scale
        return {
            "tensor": lambda: x,
            "dict": lambda: {"x": x, "first": [first]},
            "tuple": lambda: (x, (first, None, 3)),
            "same twice": lambda: (x, x),
            "argument": lambda: (x, inputs["x"]),
        }[self.gives]()


def flat(result: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(result) if isinstance(leaf, Tensor)]


def check(choose: random.Random, about: dict[str, Any]) -> None:
    torch.manual_seed(choose.randrange(1000))
    model = Model(choose)
    about["model"] = model.about
    model.train(choose.random() < 0.5)
    policy = None
    if choose.random() < 0.6:
        rules = {op: choose.choice(RULES) for op in choose.sample(OPS, choose.randrange(1, 4))}
        about["rules"] = rules
        policy = OpPolicy.default("cpu").override(rules)
    if choose.random() < 0.2:
        about["module rule"] = True
        amp_core.apply_policy(model, {"parts.0": "fp32"})
    dynamic = choose.random() < 0.5
    shapes = None
    kwargs = {"scale": torch.rand(1) + 0.5} if choose.random() < 0.5 else {}
    if dynamic:
        shapes = {"inputs": {"x": {0: torch.export.Dim.AUTO}}}
        if kwargs:
            shapes["scale"] = None
    about["dynamic"], about["kwargs"] = dynamic, list(kwargs)
    x, more = torch.randn(3, 4, 8), torch.randn(5 if dynamic else 3, 4, 8)
    model.requires_grad_(choose.random() < 0.3)
    before = copy.deepcopy(model.state_dict())
    held = {name: id(t) for name, t in (*model.named_parameters(), *model.named_buffers())}
    needs = [p.requires_grad for p in model.parameters()]
    runs = []
    wanted_model = copy.deepcopy(model).requires_grad_(False)
    try:
        with torch.no_grad(), autocast("cpu", LOW, policy=policy):
            for value in (x, more, x):
                runs.append(flat(wanted_model({"x": value.clone()}, **kwargs)))
    except RuntimeError as error:
        about["skipped"] = str(error)[:80]
        return
    low = materialize(model, ({"x": x},), kwargs, policy=policy, dtype=LOW, dynamic_shapes=shapes)
    after = model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items()), "state changed"
    assert held == {n: id(t) for n, t in (*model.named_parameters(), *model.named_buffers())}
    assert needs == [p.requires_grad for p in model.parameters()]
    graphs = {"copy": copy.deepcopy(low)}
    if choose.random() < 0.5:
        about["exported"] = True
        program = torch.export.export(copy.deepcopy(low), ({"x": x},), kwargs, dynamic_shapes=shapes)
        file = io.BytesIO()
        torch.export.save(program, file)
        file.seek(0)
        graphs["loaded"] = torch.export.load(file).module()
    for name, graph in graphs.items():
        for number, (value, wanted) in enumerate(zip((x, more, x), runs, strict=True)):
            with torch.no_grad():
                got = flat(graph({"x": value.clone()}, **kwargs))
            assert len(got) == len(wanted)
            for a, b in zip(got, wanted, strict=True):
                assert a.dtype is b.dtype and torch.equal(a.nan_to_num(), b.nan_to_num()), (name, number)
        mine = {n: t for n, t in (*graph.named_parameters(), *graph.named_buffers())}
        for n, t in (*wanted_model.named_buffers(), *wanted_model.named_parameters()):
            if "mean" in n and n in mine:
                assert torch.equal(mine[n], t), (name, n)


def test_materialized_programs() -> None:
    """A graph rounds elsewhere, keeps other statistics, or the check changes the model."""
    for choose in programs(seconds=8):
        about: dict[str, Any] = {}
        try:
            check(choose, about)
        except BaseException as error:
            error.add_note(f"program: {about}")
            raise
