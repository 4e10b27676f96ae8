"""Delayed scales of models whose parameters are replaced or added."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from amp_core import OpPolicy, PolicyError, Recipe, autocast, delayed_scales


def test_delayed_scales_follow_the_parameters_of_the_model() -> None:
    """Parameters that are replaced by a load, or that a model grows, count as those of no model."""
    policy = OpPolicy.default("cpu").override({"linear": Recipe.fp8_delayed(history=2)})
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.ones(2, 4)
    with delayed_scales(model) as scales:

        def amax(name: str) -> float:
            with autocast("cpu", torch.bfloat16, policy=policy):
                model(x).sum().backward()
            return float(scales.state_dict()[name]["weight"]["current"])

        assert amax("0.weight") == model[0].weight.bfloat16().abs().max()
        model.load_state_dict({k: 2 * v for k, v in model.state_dict().items()}, assign=True)
        assert amax("0.weight") == model[0].weight.bfloat16().abs().max()
        model.append(nn.Linear(4, 3))
        assert amax("1.weight") == model[1].weight.bfloat16().abs().max()
        other = nn.Linear(4, 4)
        with (
            autocast("cpu", torch.bfloat16, policy=policy),
            pytest.raises(PolicyError, match="not a parameter of a model"),
        ):
            other(x)
