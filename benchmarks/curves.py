"""``python -m benchmarks.curves``: train a small GPT on real text in each format; write the loss curves.

The text is the reference of the Python language that every Python contains (`pydoc_data.topics`), by bytes.
All runs have the same weights, batches and optimizer. The blocks' linear layers have the recipe; the first
and the last layer, an embedding and the head, have none.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional

import amp_core
from amp_core import OpPolicy, autocast

RESULT = Path(__file__).parent / "results" / "curves" / "gpt.json"
RUNS = ("float32", "bfloat16", "fp8_tensorwise", "fp8_rowwise", "fp8_tiles", "mxfp8", "nvfp4")
WIDTH, HEADS, LAYERS, CONTEXT, BATCH = 128, 4, 2, 64, 16
STEPS, MEAN_OF = 500, 10
LEARNING_RATE, WARMUP = 3e-3, 20


class Block(nn.Module):
    """Attention and an MLP, each after a norm and beside the residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Take and return ``(batch, time, WIDTH)``."""
        parts = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, WIDTH // HEADS))
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Predicts the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Take ``(batch, time)``, return logits ``(batch, time, 256)``."""
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        return self.head(self.norm(self.blocks(x)))


def batches() -> Iterator[Tensor]:
    """Yield the same batches ``(BATCH, CONTEXT + 1)`` of bytes in each run."""
    text = "\n".join(topics.values()).encode()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(1)
    while True:
        starts = torch.randint(len(data) - CONTEXT - 1, (BATCH, 1), generator=generator)
        yield data[starts + torch.arange(CONTEXT + 1)]


def region(run: str) -> autocast:
    """Return the region of a run."""
    dtype = torch.float32 if run == "float32" else torch.bfloat16
    policy = OpPolicy.default("cpu")
    if run not in ("float32", "bfloat16"):
        policy = policy.override({"linear": f"recipe {run}"})
    return autocast("cpu", dtype=dtype, policy=policy)


def train(run: str) -> list[float]:
    """Return the mean loss of each `MEAN_OF` steps."""
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min((i + 1) / WARMUP, 0.5 + 0.5 * math.cos(math.pi * i / STEPS))
    )
    losses = torch.zeros(STEPS)
    plain = {"head": {"linear": "lower_precision_fp"}}
    with amp_core.apply_policy(model, plain, device_type="cpu"):
        for step, batch in zip(range(STEPS), batches(), strict=False):
            with region(run):
                logits = model(batch[:, :-1])
                loss = functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            losses[step] = loss.detach()
    return losses.view(-1, MEAN_OF).mean(-1).tolist()


def main() -> None:
    """Train in each format and write the curves, after each run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.curves", description=__doc__)
    parser.add_argument("--json", type=Path, default=RESULT, help="where to write the curves")
    path = parser.parse_args().json
    path.parent.mkdir(parents=True, exist_ok=True)
    curves: dict[str, list[float]] = {}
    for run in RUNS:
        start = time.process_time()
        curves[run] = [round(loss, 4) for loss in train(run)]
        print(
            f"{run}: {curves[run][-1]:.4f} after {STEPS} steps, {time.process_time() - start:.0f} s of CPU",
            flush=True,
        )
        path.write_text(json.dumps({"steps": STEPS, "mean_of": MEAN_OF, "loss": curves}) + "\n")


if __name__ == "__main__":
    main()
