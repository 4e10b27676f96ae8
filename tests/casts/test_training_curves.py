"""master_weights in whole trainings: the curves of plain autocast, loss by loss."""

from __future__ import annotations

import contextlib
import itertools
from pydoc_data.topics import topics

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from amp_core import GradScaler, autocast, master_weights

pytestmark = pytest.mark.slow
DTYPES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_digits(dtype: torch.dtype) -> None:
    """The demo's training, skipped steps included, ends elsewhere. Tolerance: none."""
    pytest.importorskip("sklearn")
    from amp_core.demo.data import load_digits
    from amp_core.demo.train import Settings, Trainer, train

    results = []
    for on in (False, True):
        trainer = Trainer(Settings(torch.device("cpu"), dtype, epochs=6), load_digits(), mixed=True)
        with master_weights(trainer.model) if on else contextlib.nullcontext():
            (history,) = train([trainer], lambda _: None)
        results.append((history.losses, history.scales, history.accuracy))
    assert results[0] == results[1]
    assert results[1][2] > 0.9


class Characters(nn.Module):
    """One block of a transformer, over characters."""

    def __init__(self, vocabulary: int, d: int = 64, length: int = 64) -> None:
        super().__init__()
        self.embedding, self.place = nn.Embedding(vocabulary, d), nn.Embedding(length, d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)
        self.norms = nn.ModuleList(nn.LayerNorm(d) for _ in range(3))
        self.head = nn.Linear(d, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        batch, length = tokens.shape
        x = self.embedding(tokens) + self.place(torch.arange(length))
        q, k, v = self.qkv(self.norms[0](x)).view(batch, length, 3, 4, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        x = x + self.down(functional.gelu(self.up(self.norms[1](x))))
        return self.head(self.norms[2](x))


def language_losses(text: Tensor, vocabulary: int, dtype: torch.dtype, on: bool) -> list[float]:
    torch.manual_seed(0)
    model = Characters(vocabulary)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    scaler = GradScaler("cpu", init_scale=2.0**16, growth_interval=20)
    starts = torch.Generator().manual_seed(0)
    losses = []
    with master_weights(model) if on else contextlib.nullcontext():
        for _ in range(80):
            for _ in range(2):
                first = torch.randint(len(text) - 65, (16, 1), generator=starts)
                batch = text[first + torch.arange(65)]
                with autocast("cpu", dtype=dtype):
                    logits = model(batch[:, :-1])
                loss = functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
                scaler.scale(loss / 2).backward()
                losses.append(loss.item())
            scaler.step(optimizer, max_norm=1.0)
            scaler.update()
            optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_language_model(dtype: torch.dtype) -> None:
    """A model of the text of Python's help learns otherwise. Tolerance: none."""
    text = "".join(itertools.islice((topics[name] for name in sorted(topics)), 20))
    letters = sorted(set(text))
    codes = torch.tensor([letters.index(c) for c in text])
    plain, mastered = (language_losses(codes, len(letters), dtype, on) for on in (False, True))
    assert mastered == plain
    assert sum(mastered[-10:]) / 10 < 0.8 * mastered[0]
