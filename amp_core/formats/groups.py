"""Views of a tensor as the groups that share a scale.

Blocks and tiles get dimensions of their own: ``split`` pads a tensor with zeros and returns
``(..., rows / m, m, columns / n, n)`` for tiles and ``(..., columns / n, n)`` for blocks, where columns are
the contracted dimension. A scale per group has 1 in place of m and n, and so multiplies the view.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from amp_core._torch.tensors import uncut
from amp_core._torch.tracing import may_hold
from amp_core.formats.quantization import Granularity


class Groups:
    """How tensors of one shape are split.

    Args:
        shape: the shape of the tensor.
        granularity: see `amp_core.formats.Quantization`.
        dim: the dimension that a matrix product contracts.
    """

    def __init__(self, shape: torch.Size, granularity: Granularity, dim: int) -> None:
        self.shape, self.granularity, self.dim = shape, granularity, dim

    def split(self, x: Tensor) -> Tensor:
        """Return `x`, whose shape is `shape`, as groups; a view if no padding is needed."""
        if isinstance(self.granularity, str):
            return x
        if x.dim() == 1 and isinstance(self.granularity, tuple):
            x = x.unsqueeze(0)
        x = x.movedim(self._dim, -1)
        if isinstance(self.granularity, int):
            return _blocks(x, -1, self.granularity)
        rows, columns = self.granularity
        return _blocks(_blocks(x, -1, columns), -3, rows)

    def join(self, x: Tensor) -> Tensor:
        """Undo `split`."""
        if isinstance(self.granularity, str):
            return x
        x = x.flatten(-2)
        columns = self.shape[self.dim]
        if not isinstance(self.granularity, int):
            x = x.flatten(-3, -2)[..., : self._rows, :]
        return x[..., :columns].movedim(-1, self._dim).reshape(self.shape)

    def amax(self, groups: Tensor) -> Tensor:
        """Return the largest magnitude of each group, NaN if it has one; 0 for no elements."""
        if self.granularity == "tensor":
            return largest(groups)
        if self.granularity == "row":
            return largest(groups, self.dim)
        of_rows = largest(groups, -1)
        return of_rows if isinstance(self.granularity, int) else largest(of_rows, -3)

    def outward(self, scale: Tensor) -> Tensor:
        """Return what `amax` returned without the dimensions of size 1 that stand for m and n."""
        if isinstance(self.granularity, str):
            return scale
        scale = scale.squeeze(-1)
        if not isinstance(self.granularity, int):
            scale = scale.squeeze(-2)
        return scale.movedim(-1, self._dim)

    def inward(self, scale: Tensor) -> Tensor:
        """Undo `outward`."""
        if isinstance(self.granularity, str):
            return scale
        scale = scale.movedim(self._dim, -1).unsqueeze(-1)
        return scale if isinstance(self.granularity, int) else scale.unsqueeze(-3)

    @property
    def _dim(self) -> int:
        """The contracted dimension, counted from the end."""
        return self.dim % len(self.shape) - len(self.shape)

    @property
    def _rows(self) -> int:
        """The size of the dimension that is next to the contracted one in a tile; 1 for a vector."""
        if len(self.shape) == 1:
            return 1
        return self.shape[-2 if self._dim == -1 else -1]


def largest(x: Tensor, dim: int | None = None) -> Tensor:
    """Return the largest magnitude, 0 for no elements, without a temporary tensor; `dim` stays, of size 1."""
    if may_hold((x.numel() if dim is None else x.shape[dim]) == 0):  # which aminmax refuses; add a zero
        x = pad(x.reshape(-1), [0, 1]) if dim is None else pad(x.movedim(dim, -1), [0, 1]).movedim(-1, dim)
    low, high = torch.aminmax(x) if dim is None else torch.aminmax(x, dim=dim, keepdim=True)
    return torch.maximum(low.abs(), high.abs())


def _blocks(x: Tensor, dim: int, size: int) -> Tensor:
    """Split one dimension, given from the end, into blocks of `size`, the last one padded with zeros."""
    x = uncut(x, dim, size)
    length = x.shape[dim]
    if not (may_hold(length >= size) or may_hold(length == 0)):
        size = length  # a larger block holds the same elements, and zeros
    count = -(-length // size)
    missing = count * size - length
    if may_hold(missing != 0):
        x = pad(x, [0, 0] * (-dim - 1) + [0, missing])
    return torch.unflatten(x, dim, (count, size))
