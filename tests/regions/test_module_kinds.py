"""Kinds of modules under transforms and with features of amp-core, at random, against torch's regions.

A policy whose rules are torch's, but run in Python, must change no result; nor must a scope or an observer.
"""

from __future__ import annotations

import functools
import random
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import amp_core
from amp_core import OpPolicy, PolicyError, autocast, cached_casts
from amp_core.dispatch.activate import pushed

from ..drawn import programs
from ..modes import Passing

X = torch.linspace(-1, 1, 72).reshape(3, 3, 8)
CPU = OpPolicy.default("cpu")
Region = Callable[[], Any]
Program = Callable[[nn.Module, Tensor], Any]


class Model(nn.Module):
    """A function over layers."""

    def __init__(self, program: Program, **layers: nn.Module) -> None:
        super().__init__()
        self.program = program
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> list[Tensor]:
        leaves = tree_leaves(self.program(self, x))
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def model(program: Program, **layers: nn.Module) -> Model:
    return Model(program, **layers)


def attention(choose: random.Random) -> Model:
    settings = {name: choose.random() < 0.4 for name in ("bias", "add_bias_kv", "add_zero_attn")}
    layer = nn.MultiheadAttention(8, 2, batch_first=True, **settings)
    padding = torch.tensor([[False, False, choose.random() < 0.5]] * 3)
    masks: dict[str, Any] = choose.choice([{}, {"key_padding_mask": padding}])
    weights = choose.random() < 0.5
    return model(lambda m, x: m.layer(x, x, x, need_weights=weights, **masks), layer=layer)


def transformer(choose: random.Random) -> Model:
    first = choose.random() < 0.5
    layer = nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True, norm_first=first)
    return model(lambda m, x: m.layer(x, x.flip(1)), layer=layer)


def jagged(choose: random.Random) -> Model:
    attends = choose.random() < 0.5

    def program(m: Any, x: Tensor) -> Tensor:
        rows = m.one(torch.nested.nested_tensor_from_jagged(x.reshape(9, 8), torch.tensor([0, 2, 5, 9])))
        if attends:
            heads = rows.unflatten(-1, [2, 4]).transpose(1, 2)
            rows = F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(-2)
        return m.other(rows).values()  # type: ignore[no-any-return]

    return model(program, one=nn.Linear(8, 8), other=nn.Linear(8, 4))


def recurrent(choose: random.Random) -> Model:
    kind: Any = choose.choice([nn.LSTM, nn.GRU, nn.RNN])
    layer = kind(8, 4, num_layers=2, bidirectional=choose.random() < 0.5, batch_first=True)
    packs = choose.random() < 0.5

    def program(m: Any, x: Tensor) -> Any:
        if not packs:
            return m.layer(x)
        packed, state = m.layer(pack_padded_sequence(x, [3, 2, 1], batch_first=True))
        return pad_packed_sequence(packed)[0], state

    return model(program, layer=layer)


def cells(choose: random.Random) -> Model:
    kind: Any = choose.choice([nn.LSTMCell, nn.GRUCell, nn.RNNCell])

    def program(m: Any, x: Tensor) -> Any:
        return functools.reduce(lambda state, row: m.layer(row, state), x.unbind(1), None)

    return model(program, layer=kind(8, 4))


def tables(choose: random.Random) -> Model:
    bag = nn.EmbeddingBag(5, 8, mode=choose.choice(["sum", "mean", "max"]))
    ids = torch.tensor([[0, 1, 4], [2, 3, 1], [4, 4, 2]])

    def program(m: Any, x: Tensor) -> Any:
        rows = m.norm(m.bag(ids).unsqueeze(1) + x)
        return F.linear(rows, m.bag.weight)

    return model(program, bag=bag, norm=nn.LayerNorm(8))


def reparametrized(choose: random.Random) -> Model:
    layer = nn.Linear(8, 8)
    norms = parametrizations.weight_norm, parametrizations.spectral_norm
    wrap: Any = choose.choice([*norms, lambda layer: prune.l1_unstructured(layer, "weight", 0.3)])
    wrap(layer)
    return model(lambda m, x: m.layer(m.layer(x).tanh()), layer=layer)


def images(choose: random.Random) -> Model:
    layer = nn.Conv2d(3, 4, 2, padding=choose.choice(["same", "valid"]))
    return model(lambda m, x: m.up(m.norm(m.layer(x.unsqueeze(0)))), layer=layer, norm=nn.BatchNorm2d(4),
                 up=nn.ConvTranspose2d(4, 2, 2))  # fmt: skip


def losses(choose: random.Random) -> Model:
    def ctc(y: Tensor) -> Tensor:
        ends = torch.tensor([3, 3, 3]), torch.tensor([1, 2, 1])
        return F.ctc_loss(F.log_softmax(y, -1), torch.tensor([[1, 2], [3, 4], [5, 6]]), *ends)

    loss: Any = choose.choice([
        ctc,
        lambda y: F.cross_entropy(y.flatten(0, 1), torch.arange(9) % 8, label_smoothing=0.1),
        lambda y: F.kl_div(F.log_softmax(y, -1), F.softmax(X, -1), reduction="batchmean"),
        lambda y: F.huber_loss(y, X) + F.cosine_similarity(y, X).sum(),
        lambda y: F.binary_cross_entropy_with_logits(y, X.sigmoid()) + torch.cdist(y, X).sum(),
        lambda y: torch.fft.rfft(y.float()).abs() + torch.einsum("abc,abd->cd", y.float(), X).sum(),
    ])  # fmt: skip
    return model(lambda m, x: loss(m.layer(x)), layer=nn.Linear(8, 8))


KINDS = [attention, transformer, jagged, recurrent, cells, tables, reparametrized, images, losses]


def loss_of(results: list[Tensor]) -> Tensor:
    return torch.stack([result.float().square().sum() for result in results]).sum()


def trained(region: Region, m: nn.Module, x: Tensor, call: Any = None) -> list[Any]:
    x = x.clone().requires_grad_()
    with region():
        results = (call or m)(x)
    loss_of(results).backward()
    return [*results, x.grad, *(p.grad for p in m.parameters())]


def inferred(region: Region, m: nn.Module, x: Tensor) -> list[Any]:
    with torch.inference_mode(), region():
        return [result.clone() for result in (*m.eval()(x), *m(x))]


def stepped(region: Region, m: nn.Module, x: Tensor) -> list[Any]:
    optimizer = torch.optim.SGD(m.parameters(), 0.1)
    first = [t.clone() for t in trained(region, m, x) if t is not None]
    optimizer.step()
    m.zero_grad()
    return first + trained(region, m, x)


def checkpointed(reentrant: bool, region: Region, m: nn.Module, x: Tensor) -> list[Any]:
    def block(x: Tensor) -> tuple[Tensor, ...]:
        with region():
            return tuple(m(x))

    return trained(nullcontext, m, x, lambda x: [*checkpoint(block, x, use_reentrant=reentrant)])


def hooked(region: Region, m: nn.Module, x: Tensor) -> list[Any]:
    seen: list[Tensor] = []
    for part in m.modules():
        part.register_full_backward_hook(lambda _m, _i, grads: seen.extend(g for g in grads if g is not None))
    return trained(region, m, x) + seen


def packed(region: Region, m: nn.Module, x: Tensor) -> list[Any]:
    kept: list[str] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(str(t.dtype)), t)[1], lambda t: t):
        return [*trained(region, m, x), sorted(kept)]


def seen(region: Region, m: nn.Module, x: Tensor) -> list[Any]:
    with Passing():
        return trained(region, m, x)


def gradient(region: Region, m: nn.Module, x: Tensor) -> list[Any]:
    weights = {name: p.detach() for name, p in m.named_parameters()}

    def loss(weights: Any) -> Tensor:
        with region():
            return loss_of(functional_call(m.eval(), weights, (x,)))

    return [*torch.func.grad(loss)(weights).values()]


def batched(region: Region, m: nn.Module, x: Tensor) -> list[Any]:
    with region():
        return [*torch.vmap(lambda x: tuple(m.eval()(x)), randomness="same")(torch.stack([x, x * 2]))]


def tangent(region: Region, m: nn.Module, x: Tensor) -> list[Any]:
    with region():
        return tree_leaves(torch.func.jvp(lambda x: tuple(m.eval()(x)), (x,), (x + 1,)))


TRANSFORMED = [gradient, batched, tangent]
TRANSFORMS: list[Any] = [
    trained, inferred, stepped, functools.partial(checkpointed, True),
    functools.partial(checkpointed, False), hooked, packed, seen, *TRANSFORMED,
]  # fmt: skip


@functools.cache
def in_python() -> OpPolicy:
    """Return the default policy with each matrix product cast in Python."""
    policy = CPU
    for op, rule in CPU.rules.items():
        if rule == "lower_precision_fp":
            try:
                policy = policy.override({op: "lower_precision_fp above 0 FLOP"})
            except PolicyError:  # not every op has an amount of work
                continue
    assert len(policy.diff(CPU)) > 20
    return policy


FEATURES: dict[str, Callable[[nn.Module], Any]] = {
    "none": lambda _: nullcontext(),
    "policy": lambda _: nullcontext(),
    "cached_casts": lambda m: cached_casts(m, debug=True),
    "record": amp_core.record,
    "watch": lambda m: amp_core.watch(m, every=1),
    "guard": lambda m: amp_core.guard(m, steps=lambda _: True),
}


def outcome(number: int, kind: Any, transform: Any, region: Region, feature: Any) -> list[Any] | str:
    """Return what a program computes, or torch's error, which must then be the same with amp-core."""
    torch.manual_seed(number)
    m = kind(random.Random(number))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what torch runs slowly, or once per process
        try:
            with feature(m):
                return transform(region, m, X)  # type: ignore[no-any-return]
        except RuntimeError as error:  # such as vmap's, of ops that draw random numbers
            return str(error)[:60]


def same(wanted: Any, got: Any) -> bool:
    if not isinstance(wanted, Tensor) or not isinstance(got, Tensor):
        return bool(wanted == got)
    if wanted.is_nested and got.is_nested:
        wanted, got = wanted.values(), got.values()
    return wanted.dtype is got.dtype and torch.equal(wanted.nan_to_num(), got.nan_to_num())


def check_as_torch(number: int, kind: Any, transform: Any, dtype: torch.dtype, feature: str) -> None:
    """Compare a program in torch's region with the same in amp-core's, with one of the `FEATURES`."""
    policy = in_python() if feature == "policy" else None
    # Torch keeps casts inside transforms, rules in Python do not: sums of gradients round elsewhere.
    caches = not policy or transform not in TRANSFORMED
    settings: dict[str, Any] = {"dtype": dtype, "cache_enabled": caches}

    plain = functools.partial(torch.autocast, "cpu", **settings)
    wanted = outcome(number, kind, transform, plain, FEATURES["none"])
    if transform is packed and feature in ("record", "guard") and isinstance(wanted, list):
        wanted[-1] = outcome(number, kind, transform, plain, lambda _: Passing())[-1]  # ctc_loss saves others
    region = functools.partial(autocast, "cpu", policy=policy, **settings)
    got = outcome(number, kind, transform, region, FEATURES[feature])
    assert len(wanted) == len(got), (kind, transform, feature, number, wanted, got)
    for one, other in zip(wanted, got, strict=True):
        assert same(one, other), (kind, transform, feature, number, dtype, one, other)
    assert (torch.is_autocast_enabled("cpu"), pushed()) == (False, 0)


@pytest.mark.filterwarnings("ignore:.torch.jit")  # torch's own forward mode
def test_random_programs() -> None:
    """A kind of module computes otherwise than in torch's region, in a policy, a scope or a recording."""
    for choose in programs(8.0):
        number, dtype = choose.randrange(10**6), choose.choice([torch.bfloat16, torch.float16])
        kind, transform = choose.choice(KINDS), choose.choice(TRANSFORMS)
        feature = choose.choice(list(FEATURES))
        if feature == "guard":
            dtype = torch.bfloat16  # it raises where float16 overflows
        if kind is jagged and transform in TRANSFORMED:
            continue  # torch transforms no jagged tensors
        check_as_torch(number, kind, transform, dtype, feature)
