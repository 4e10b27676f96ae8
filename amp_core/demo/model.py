"""Two small classifiers of 8x8 images, built from widely supported operations."""

from __future__ import annotations

from torch import nn


def build_model(name: str) -> nn.Sequential:
    """Build a classifier for images of shape ``(n, 1, 8, 8)``; its logits have shape ``(n, 10)``.

    Args:
        name: ``"conv"``: two convolutions and two linear layers; ``"mlp"``: only linear layers, for
            devices without convolutions.
    """
    if name == "mlp":
        layers = [nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)]
        return nn.Sequential(nn.Flatten(), *layers)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )
