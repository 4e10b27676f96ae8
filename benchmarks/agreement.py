"""``python -m benchmarks.agreement``: how far two implementations of one GPT agree, in bfloat16 and float16.

After arXiv 2510.26788: in reinforcement learning one implementation samples and another one learns. Here the
sampler has torch's fused attention under ``torch.compile``, and the trainer, eager, attention written out in
products and a softmax. Both have the same weights and compute in one dtype. What is measured is the
log-probability of each sampled byte, trainer's minus sampler's, while the model trains in that dtype; in
float16 with our `GradScaler`.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from amp_core import GradScaler, autocast
from benchmarks.curves import BATCH, CONTEXT, GPT, batches

RESULT = Path(__file__).parent / "results" / "agreement" / "gpt.json"
DTYPES = (torch.bfloat16, torch.float16)
STEPS, EVERY, LEARNING_RATE = 300, 60, 1e-3


class WrittenOutAttention(TorchFunctionMode):
    """Computes causal attention by products and a softmax, each under autocast's own rule."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Replace torch's fused attention; call everything else."""
        if func is not functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        q, k, v = args
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return scores.masked_fill(later, -math.inf).softmax(-1) @ v


def log_probs(model: Callable[[Tensor], Tensor], tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the log-probability ``(batch, time - 1)``, float32, of each byte after the first."""
    with torch.no_grad(), autocast("cpu", dtype=dtype):
        logits = model(tokens[:, :-1])
    return -functional.cross_entropy(logits.float().mT, tokens[:, 1:], reduction="none")


def sample(
    model: Callable[[Tensor], Tensor], start: Tensor, dtype: torch.dtype, generator: torch.Generator
) -> Tensor:
    """Continue ``(batch, 1)`` bytes to ``(batch, CONTEXT + 1)`` with what `model` predicts."""
    tokens = start.new_zeros(len(start), CONTEXT + 1)
    tokens[:, :1] = start
    for place in range(CONTEXT):
        with torch.no_grad(), autocast("cpu", dtype=dtype):
            chances = model(tokens[:, :-1])[:, place].float().softmax(-1)
        tokens[:, place + 1] = torch.multinomial(chances, 1, generator=generator)[:, 0]
    return tokens


def gaps(model: nn.Module, dtype: torch.dtype) -> Tensor:
    """Return trainer's minus sampler's log-probability ``(BATCH, CONTEXT)`` of sampled bytes."""
    generator = torch.Generator().manual_seed(2)
    sampler = torch.compile(model)
    start = next(batches())[:, :1]
    tokens = sample(sampler, start, dtype, generator)
    sampled = log_probs(sampler, tokens, dtype)
    with WrittenOutAttention():
        return log_probs(model, tokens, dtype) - sampled


def run(dtype: torch.dtype) -> dict[str, Any]:
    """Train in `dtype`; return the gap of a byte and of a sequence at every `EVERY` steps."""
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
    scaler = GradScaler("cpu", enabled=dtype == torch.float16)
    rows = []
    for step, batch in zip(range(STEPS + 1), batches(), strict=False):
        if step % EVERY == 0:
            gap = gaps(model, dtype)
            rows.append(
                {
                    "step": step,
                    "byte": gap.abs().mean().item(),
                    "sequence": gap.sum(-1).abs().mean().item(),
                    "largest": gap.abs().max().item(),
                }
            )
        with autocast("cpu", dtype=dtype):
            logits = model(batch[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        scaler.scale(loss).backward()
        scaler.step(optimizer, max_norm=1.0)
        scaler.update()
        optimizer.zero_grad()
    return {"loss": loss.item(), "scale": scaler.get_scale(), "rows": rows}


def main() -> None:
    """Measure both dtypes; write the gaps."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.agreement", description=__doc__)
    parser.add_argument("--json", type=Path, default=RESULT, help="where to write the gaps")
    path = parser.parse_args().json
    found = {str(dtype).removeprefix("torch."): run(dtype) for dtype in DTYPES}
    path.parent.mkdir(parents=True, exist_ok=True)
    result = {"sequences": BATCH, "bytes": CONTEXT, "torch": torch.__version__, "runs": found}
    path.write_text(json.dumps(result, indent=1) + "\n")
    for name, measured in found.items():
        print(name, measured["loss"], measured["scale"], *measured["rows"], sep="\n  ")


if __name__ == "__main__":
    main()
