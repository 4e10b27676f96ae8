"""Casts of weights: one by one, together, and once over many regions."""

from __future__ import annotations

import contextlib
import copy
import os
import time
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import amp_core
from amp_core import CachedCasts
from amp_core.casts.memory import KeptMemory
from benchmarks.ab import Ratio, compare, enough
from benchmarks.shapes import gpt2_small, tensors


class Block(nn.Module):
    """A block of GPT-2."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x of shape (batch, tokens, d)."""
        b, t, d = x.shape
        q, k, v = self.qkv(self.first(x)).view(b, t, 3, d // 64, 64).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, d))
        return x + self.down(functional.gelu(self.up(self.second(x))))


class Gpt(nn.Module):
    """A transformer of GPT-2 small's shape."""

    def __init__(self, layers: int = 12, d: int = 768, vocabulary: int = 50257) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, d)
        self.blocks = nn.Sequential(*[Block(d) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits of shape (batch, tokens, vocabulary)."""
        return self.head(self.norm(self.blocks(self.embedding(tokens))))


def run() -> Iterator[Ratio]:
    """Compare the cast kernel, and models with and without `cached_casts`."""
    # Under a lower capability, torch 2.13's fused attention still asks the CPU for AMX, and fails.
    limited = os.environ.get("ATEN_CPU_CAPABILITY", "avx512") != "avx512"
    with sdpa_kernel(SDPBackend.MATH) if limited else contextlib.nullcontext():
        yield from _rows()


def _rows() -> Iterator[Ratio]:
    weights = tensors(gpt2_small())
    kernels = amp_core.get_backend("cpu").kernels()
    out = [torch.empty_like(w, dtype=torch.bfloat16) for w in weights]
    yield compare(
        "GPT-2 small: weights to bfloat16, storage kept",
        lambda: [w.to(torch.bfloat16) for w in weights],
        lambda: kernels.cast(weights, torch.bfloat16, out),
        rounds=7,
    )
    # Reading 4 bytes and writing 2 for each element is the traffic of copying 3 bytes.
    source = torch.randn(sum(w.nbytes for w in weights) * 3 // 16)
    copy_of = torch.empty_like(source)
    yield compare(
        "GPT-2 small: weights to bfloat16: limit (as many bytes copied)",
        lambda: [w.to(torch.bfloat16) for w in weights],
        lambda: copy_of.copy_(source),
        rounds=7,
    )
    yield _gradient_casts(weights)
    gpt = Gpt()
    for tokens in (1, 16, 128):
        yield from _inference(f"GPT-2 small, inference, {tokens} tokens", gpt, tokens)
    mlp = nn.Sequential(*[nn.Linear(256, 256) for _ in range(200)]).eval()
    x = torch.randn(64, 256)
    yield _scoped("200-layer MLP of 256x256, inference, batch 64", mlp, lambda: _no_grad(mlp, x))
    yield from _trained("200-layer MLP of 256x256, training, batch 64", mlp.train(), x)
    yield from _masters(mlp, x)
    yield from _small_gpt()
    yield from _lora(gpt)


def _gradient_casts(weights: list[torch.Tensor]) -> Ratio:
    """Compare the casts of a whole set of gradients, which are dropped before the next."""
    grads = [w.to(torch.bfloat16) for w in weights]
    kernels, memory = amp_core.get_backend("cpu").kernels(), KeptMemory()

    def together() -> None:
        wide = [memory.empty_like(g, torch.float32) for g in grads]
        kernels.cast(grads, torch.float32, wide)

    return compare(
        "GPT-2 small: gradients to float32", lambda: [g.float() for g in grads], together, rounds=7
    )


def _masters(mlp: nn.Module, x: torch.Tensor) -> Iterator[Ratio]:
    """Compare training with and without `master_weights`."""
    name = "200-layer MLP of 256x256, training, batch 64, master weights"
    yield _scoped(name, mlp, _training(mlp, x), amp_core.master_weights)
    wide = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(8)])
    name = "8 layers of 2048x2048, batch 16, accumulation 4, master weights"
    yield _scoped(name, wide, _training(wide, torch.randn(16, 2048), 4), amp_core.master_weights)


def _small_gpt() -> Iterator[Ratio]:
    # Without AVX-512, torch multiplies bfloat16 in a plain loop: a step of the large batch takes minutes.
    large = (8, 128) if torch.backends.cpu.get_cpu_capability() == "AVX512" else (1, 16)
    for vocabulary, (batch, length) in ((256, (8, 128)), (50257, large)):
        model = Gpt(4, 256, vocabulary)
        tokens = torch.randint(vocabulary, (batch, length))
        name = f"GPT of 4 layers, d=256, vocabulary {vocabulary}, training, batch {batch}x{length}"
        yield from _trained(name, model, tokens)


class Adapted(nn.Module):
    """A frozen linear layer with a trained product of rank 8 beside it (LoRA)."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 8, bias=False)
        self.up = nn.Linear(8, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of both."""
        return self.base(x) + self.up(self.down(x))


def _lora(gpt: Gpt) -> Iterator[Ratio]:
    gpt.train().requires_grad_(False)
    for block in gpt.blocks:
        for name in ("qkv", "out", "up", "down"):
            setattr(block, name, Adapted(getattr(block, name)))
    name = "LoRA: frozen 12 layers, d=768, rank 8, training, 1x128"
    yield from _trained(name, gpt.blocks, torch.randn(1, 128, 768))


def _trained(name: str, model: nn.Module, x: torch.Tensor) -> Iterator[Ratio]:
    """Compare steps with and without `cached_casts`; and what would be left if no weight were cast at all."""
    trained = [p for p in model.parameters() if p.requires_grad]
    step = _training(model, x)
    yield _scoped(name, model, step)
    low = _stored_low(model)
    masters = [nn.Parameter(p.detach().clone()) for p in trained]
    for master in masters:
        master.grad = torch.zeros_like(master)
    beside = torch.optim.AdamW(masters, lr=1e-6, fused=True)

    def uncast() -> None:
        _backward(low, x)
        beside.step()
        low.zero_grad()

    yield compare(f"{name}: limit", step, uncast, rounds=7)


def _inference(name: str, model: nn.Module, tokens: int) -> Iterator[Ratio]:
    """Compare inference with and without `cached_casts`; and the scope with weights stored in bfloat16."""
    prompt = torch.randint(50257, (1, tokens))
    model.eval()
    yield _scoped(name, model, lambda: _no_grad(model, prompt))
    low = _stored_low(model)
    with amp_core.cached_casts(model):
        yield compare(
            f"{name}: against weights stored in bfloat16",
            lambda: _no_grad(low, prompt),
            lambda: _no_grad(model, prompt),
            rounds=9,
        )


def _stored_low(model: nn.Module) -> nn.Module:
    """Return a copy whose linear layers hold their weights in bfloat16."""
    low = copy.deepcopy(model)
    for layer in low.modules():
        if isinstance(layer, nn.Linear):
            layer.to(torch.bfloat16)
    return low


def _no_grad(model: nn.Module, x: torch.Tensor) -> None:
    with torch.no_grad(), amp_core.autocast("cpu"):
        model(x)


def _training(model: nn.Module, x: torch.Tensor, micro_batches: int = 1) -> Callable[[], None]:
    """Return a training step."""
    trained = [p for p in model.parameters() if p.requires_grad]
    adamw = torch.optim.AdamW(trained, lr=1e-6, fused=True)

    def step() -> None:
        for _ in range(micro_batches):
            _backward(model, x)
        adamw.step()
        adamw.zero_grad()

    return step


def _backward(model: nn.Module, x: torch.Tensor) -> None:
    with amp_core.autocast("cpu"):
        loss = model(x).float().sum()
    loss.backward()


def _scoped(
    name: str,
    model: nn.Module,
    step: Callable[[], object],
    scope: Callable[[nn.Module], CachedCasts] = amp_core.cached_casts,
) -> Ratio:
    """Alternate stretches without and with the scope; its first, casting step is not timed."""
    theirs, ours = [], []
    for _ in enough(8):
        theirs += _times(step)
        with scope(model):
            ours += _times(step)
    theirs.sort()
    ours.sort()
    a, b = theirs[len(theirs) // 2], ours[len(ours) // 2]
    return Ratio(name, a, b, b / a)


def _times(step: Callable[[], object]) -> list[float]:
    step()
    taken: list[float] = []
    while len(taken) < 3 and sum(taken) < 5:
        start = time.perf_counter()
        step()
        taken.append(time.perf_counter() - start)
    return taken
