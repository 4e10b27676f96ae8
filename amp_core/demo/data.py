"""The handwritten digits from scikit-learn: 1,797 real images of 8x8 pixels, ten classes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Digits:
    """Two thirds for training and one third for testing, as float32 images and int64 labels.

    Images have shape ``(n, 1, 8, 8)`` and values from 0 to 1.
    """

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor

    def to(self, device: torch.device) -> Digits:
        """Return the same images on `device`."""
        return Digits(*(t.to(device) for t in vars(self).values()))

    def batches(self, size: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield one epoch of training batches in the order given by `generator` (on the CPU).

        The last, smaller batch is skipped, so that all steps cost the same.
        """
        order = torch.randperm(len(self.train_labels), generator=generator)
        for start in range(0, len(order) - size + 1, size):
            chosen = order[start : start + size].to(self.train_images.device)
            yield self.train_images[chosen], self.train_labels[chosen]


def load_digits(seed: int = 0) -> Digits:
    """Load the digits with a stratified split by `seed`. Needs ``amp-core[demo]``."""
    from sklearn.datasets import load_digits as load
    from sklearn.model_selection import train_test_split

    images, labels = load(return_X_y=True)
    split = train_test_split(images / 16, labels, test_size=1 / 3, random_state=seed, stratify=labels)
    train_x, test_x, train_y, test_y = (torch.from_numpy(part) for part in split)
    return Digits(
        train_x.float().reshape(-1, 1, 8, 8),
        train_y.long(),
        test_x.float().reshape(-1, 1, 8, 8),
        test_y.long(),
    )
