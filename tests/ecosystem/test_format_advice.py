"""`advise(format=)` on a small GPT of transformers, with random and with briefly trained weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp_core
from amp_core import autocast

hf = pytest.importorskip("transformers", reason="transformers is not installed; tox -e ecosystem installs it")

TOKENS = (torch.arange(4 * 16).reshape(4, 16) * 7 % 61) % 50
"""Sequences that a model can learn."""


def model_after(steps: int) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    config = hf.GPT2Config(
        n_layer=1, n_embd=32, n_head=4, vocab_size=50, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    model = hf.GPT2LMHeadModel(config).eval()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def loss() -> Tensor:
        return model(TOKENS, labels=TOKENS).loss

    for _ in range(steps):
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, loss


@pytest.mark.parametrize("steps", [0, 30], ids=["random", "trained"])
def test_a_gpt_of_transformers(steps: int) -> None:
    """The proposal leaves out more than it has to, or exceeds the tolerance in the user's own region."""
    model, loss = model_after(steps)
    advice = amp_core.advise(loss, "cpu", format="mxfp4", tolerance=0.15)
    names = {layer.module for layer in advice.layers}
    assert names >= {f"transformer.h.0.{part}" for part in ("attn.c_attn", "mlp.c_proj")}
    assert advice.is_tolerable
    assert 0 < advice.share < 1
    assert advice.before.result_error > 0.15 >= advice.after.result_error
    exact = loss()
    with advice.apply(model), autocast("cpu", torch.bfloat16, policy=advice.policy):
        assert abs(loss() - exact) <= 0.15 * exact
