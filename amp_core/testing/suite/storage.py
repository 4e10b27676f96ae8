"""What the kernels of stored weights must do: `Kernels.split_`, `Kernels.join_` and `Kernels.round_`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from amp_core.kernels import PORTABLE
from amp_core.testing.suite import data
from amp_core.testing.suite.judge import Judge
from amp_core.testing.suite.tensors import Memory

_KEYS = (0, 2**64 - 1, 0x9E3779B97F4A7C15)
_SPECIAL = (0.0, 1.0, 1e-30, 1e-41, 3.3895314e38, 3.3961775e38, 3.4028235e38, math.inf, math.nan, 1 + 2.0**-8)


class StorageConformance(Judge):
    """A weight in two parts has one right form, bit for bit; so has one that is rounded at random."""

    AREA = "storage"

    def _weights(self) -> Iterator[Tensor]:
        """Yield float32 weights on the host: special numbers, odd counts, other layouts."""
        yield self._computable(torch.tensor([sign * value for value in _SPECIAL for sign in (1.0, -1.0)]))
        for shape in ((), (0,), (1031,), (5, 7), (2**15 + 1,)):
            yield data.random(shape, torch.float32)
        yield data.random((7, 5), torch.float32).T

    def _here(self, tensor: Tensor) -> Tensor:
        """Return a copy on the device, with the strides of `tensor`."""
        return torch.empty_like(tensor, device=self.device).copy_(tensor)

    def _written(self, call: Callable[..., Any], read: list[Tensor], written: list[Tensor]) -> None:
        memory = Memory(read, written)
        with self._context():
            assert call() is None
        memory.check()

    def test_storage_splits_and_joins_as_the_reference(self) -> None:
        """With other bits, a checkpoint would mean other weights on another device."""
        self.requires("supports_bit_views")
        self.requires("supports_bfloat16")
        for wide, kept in itertools.product(self._weights(), (torch.int16, torch.bfloat16)):
            low, rest = torch.empty_like(wide, dtype=torch.bfloat16), torch.empty_like(wide, dtype=kept)
            PORTABLE.split_([wide.clone()], [low], [rest])
            joined = torch.empty_like(wide)
            PORTABLE.join_([joined], [low], [rest])
            here, *parts = (self._here(torch.zeros_like(t)) for t in (wide, low, rest))
            source = self._here(wide)
            scratch = Memory([], [source])  # it may be overwritten, but not what lies around it
            self._written(lambda s=source, p=parts: self.kernels.split_([s], p[:1], p[1:]), [], parts)
            scratch.check(wrote=False)
            what = f"weights of shape {tuple(wide.shape)}, kept as {kept}"
            self._assert_values(parts[0], low, f"{what}, rounded")
            if kept is torch.int16:
                assert torch.equal(parts[1].cpu(), rest), f"{what}: other lower bits"
            else:
                self._assert_values(parts[1], rest, f"{what}, the rest")
            self._written(lambda h=here, p=parts: self.kernels.join_([h], p[:1], p[1:]), parts, [here])
            self._assert_values(here, joined, f"{what}, joined")
        self._judge_a_list_of_weights()
        self._judge_the_moment_of_joining()

    def _judge_a_list_of_weights(self) -> None:
        """Every weight of a list is split and joined, each into the kind that is kept of it."""
        wides = [data.random((n,), torch.float32, n) for n in (5, 17, 3)]
        lows = [torch.zeros_like(w, dtype=torch.bfloat16) for w in wides]
        kinds = (torch.int16, torch.bfloat16, torch.int16)
        kept = [torch.zeros_like(w, dtype=kind) for w, kind in zip(wides, kinds, strict=True)]
        here, *parts = ([self._here(t) for t in some] for some in (wides, lows, kept))
        PORTABLE.split_([w.clone() for w in wides], lows, kept)
        self.kernels.split_(here, *parts)
        joined, expected = ([torch.zeros_like(w) for w in some] for some in (here, wides))
        self.kernels.join_(joined, *parts)
        PORTABLE.join_(expected, lows, kept)
        for found, wanted in ((parts[0], lows), (joined, expected)):
            for i, (result, right) in enumerate(zip(found, wanted, strict=True)):
                self._assert_values(result, right, f"weight {i} of a list")

    def test_storage_rounds_by_the_bits_of_each_number(self) -> None:
        """With other random bits, a run would go on otherwise on another device or number of ranks."""
        self.requires("supports_bit_views")
        self.requires("supports_bfloat16")
        weights = list(self._weights())
        for key, numbered in itertools.product(_KEYS, (False, True)):
            lows = [torch.empty_like(w, dtype=torch.bfloat16) for w in weights]
            # Some are numbered, or the others; each has a key of its own.
            counted = [self._numbers(w) if i % 2 == numbered else None for i, w in enumerate(weights)]
            keys = [key ^ i for i in range(len(lows))]
            PORTABLE.round_([w.clone() for w in weights], lows, keys, counted)
            here = [self._here(torch.zeros_like(low)) for low in lows]
            wides = [self._here(w) for w in weights]
            numbers = [None if n is None else self._here(n) for n in counted]
            self._written(
                lambda w=wides, h=here, n=numbers, k=keys: self.kernels.round_(w, h, k, n),
                [n for n in numbers if n is not None],
                here,
            )
            for low, result in zip(lows, here, strict=True):
                self._assert_values(result, low, f"rounded by the key {key:#x}, shape {tuple(low.shape)}")

    def _numbers(self, weight: Tensor) -> Tensor:
        """Return numbers as a shard has them, beyond 2**31 too."""
        first = 2**31 - weight.numel() // 2
        numbers = torch.arange(first, first + weight.numel()).to(torch.int32)
        return torch.empty_like(weight, dtype=torch.int32).copy_(numbers.view(weight.shape))

    def _judge_the_moment_of_joining(self) -> None:
        """Low weights that are kept for their tensor are stale after an optimizer's step."""
        wide, low = (torch.zeros(9, dtype=d, device=self.device) for d in (torch.float32, torch.bfloat16))
        kept = torch.zeros(9, dtype=torch.int16, device=self.device)
        for value in (1.5, -2.25):
            low.data.fill_(value)
            self.kernels.join_([wide], [low], [kept])
            assert wide.cpu().tolist() == [value] * 9

    def test_storage_refuses_other_shapes_before_it_writes(self) -> None:
        """A weight that is left out, or broadcast, must not pass silently."""
        self.requires("supports_bfloat16")

        def make(dtype: torch.dtype, sizes: tuple[int, ...]) -> list[Tensor]:
            return [torch.ones(n, dtype=dtype, device=self.device) for n in sizes]

        for sizes in ((4,), (4, 3), (4, 1)):
            wides, lows = make(torch.float32, (4, 2)), make(torch.bfloat16, sizes)
            kept, fit = make(torch.int16, (4, 2)), make(torch.bfloat16, (4, 2))
            calls: list[Callable[[], None]] = [
                partial(self.kernels.split_, wides, lows, kept),
                partial(self.kernels.join_, wides, lows, kept),
                partial(self.kernels.split_, wides, fit, lows),
                partial(self.kernels.join_, wides, fit, lows),
                partial(self.kernels.round_, wides, lows, [0, 0], [None, None]),
            ]
            for call in calls:
                with self._refused([*wides, *lows, *kept, *fit]):
                    call()
