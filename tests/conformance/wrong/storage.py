"""Stored weights, wrong in one plausible way each; `fails` names the checks that must say so."""

from __future__ import annotations

import torch

from amp_core.kernels import Portable

SPLITS = ("storage_splits_and_joins_as_the_reference",)
ROUNDS = ("storage_rounds_by_the_bits_of_each_number",)


class StorageRoundsTiesToEven(Portable):
    fails = SPLITS

    def split_(self, wides, lows, kept):
        for wide, low, rest in zip(wides, lows, kept, strict=True):
            if rest.dtype is torch.int16:
                rest.copy_(wide.view(torch.int32))
                low.copy_(wide)
            else:
                super().split_([wide], [low], [rest])


class StorageCompensatesInfinity(Portable):
    fails = SPLITS

    def split_(self, wides, lows, kept):
        for wide, low, rest in zip(wides, lows, kept, strict=True):
            if rest.dtype is torch.int16:
                super().split_([wide], [low], [rest])
            else:
                low.copy_(wide)
                rest.copy_(wide - low)


class StorageDrawsByPlace(Portable):
    fails = ROUNDS

    def round_(self, wides, lows, keys, numbers):
        super().round_(wides, lows, keys, [None] * len(wides))


class StorageLosesTheUpperHalfOfTheKey(Portable):
    fails = ROUNDS

    def round_(self, wides, lows, keys, numbers):
        super().round_(wides, lows, [key & 0xFFFFFFFF for key in keys], numbers)


class StorageZipsShort(Portable):
    fails = ("storage_refuses_other_shapes_before_it_writes",)

    def join_(self, wides, lows, kept):
        for parts in zip(wides, lows, kept, strict=False):
            super().join_(*([part] for part in parts))
