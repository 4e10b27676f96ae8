"""Stored weights, wrong in one plausible way each; `fails` names the checks that must say so."""

from __future__ import annotations

import time
import warnings

import torch

from amp_core.kernels import Portable

CONTEXTS = ("storage_in_every_context",)
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


def dense(tensor):
    """Return what a kernel reads that takes `tensor` for contiguous."""
    return torch.as_strided(tensor.detach(), (tensor.numel(),), (1,), tensor.storage_offset()).view(
        tensor.shape
    )


class StorageReadsLowsAsDense(Portable):
    fails = SPLITS

    def join_(self, wides, lows, kept):
        pairs = zip(wides, lows, strict=True) if len(wides) == len(lows) else ()
        super().join_(wides, [dense(low) if w.is_contiguous() else low for w, low in pairs] or lows, kept)


class StorageRoundsIntoLowsAsDense(Portable):
    fails = ROUNDS

    def round_(self, wides, lows, keys, numbers):
        super().round_(
            wides,
            [dense(low) if low.shape == w.shape else low for w, low in zip(wides, lows, strict=True)],
            keys,
            numbers,
        )
        for low in lows:
            if not low.is_inference():
                torch.autograd.graph.increment_version(low)


class StorageMakesInfOfNan(Portable):
    fails = (*SPLITS, *ROUNDS)

    def _mended(self, wides, lows, call):
        bits = [w.detach().clone().view(torch.int32) for w in wides]
        call()
        for b, low in zip(bits, lows, strict=True):
            low.masked_fill_((b & 0x7FFFFFFF > 0x7F800000) & (b & 0x7FFFFF < 0x10000), torch.inf)

    def split_(self, wides, lows, kept):
        self._mended(wides, lows, lambda: super(StorageMakesInfOfNan, self).split_(wides, lows, kept))

    def round_(self, wides, lows, keys, numbers):
        self._mended(
            wides, lows, lambda: super(StorageMakesInfOfNan, self).round_(wides, lows, keys, numbers)
        )


class StorageDrawsByCountingOn(Portable):
    """Takes the numbers of a shard of columns for consecutive ones."""

    fails = ROUNDS

    def round_(self, wides, lows, keys, numbers):
        counted = [
            n
            if n is None or n.dim() == 0 or not n.numel()
            else (torch.arange(n.numel(), device="cpu", dtype=torch.int32).view(n.shape) + n.flatten()[0])
            for n in numbers
        ]
        super().round_(wides, lows, keys, counted)


class StorageSplitsTheFirstSixtyFourThousand(Portable):
    fails = SPLITS

    def split_(self, wides, lows, kept):
        super().split_(wides, lows, kept)
        for low in lows:
            low.flatten()[1 << 16 :].zero_()


class StorageSplitsAsBefore(Portable):
    fails = SPLITS

    def __init__(self):
        super().__init__()
        self.known = None, None

    def split_(self, wides, lows, kept):
        super().split_(wides, lows, kept)
        if len(lows) == 1 and lows[0].data_ptr() == self.known[0] and lows[0].shape == self.known[1].shape:
            lows[0].copy_(self.known[1])
        elif len(lows) == 1:
            self.known = lows[0].data_ptr(), lows[0].clone()


class StorageTakesNoEmptyList(Portable):
    fails = SPLITS

    def join_(self, wides, lows, kept):
        assert wides[0].dtype is torch.float32
        super().join_(wides, lows, kept)


class StorageKeepsTheWeights(Portable):
    fails = SPLITS

    def split_(self, wides, lows, kept):
        super().split_(wides, lows, kept)
        self.last = list(lows)


class StorageWarnsEachTime(Portable):
    fails = SPLITS

    def join_(self, wides, lows, kept):
        warnings.warn("the slow way", stacklevel=2)
        super().join_(wides, lows, kept)


class StorageRoundsUnderAutocast(Portable):
    fails = CONTEXTS

    def join_(self, wides, lows, kept):
        super().join_(wides, lows, kept)
        if torch.is_autocast_enabled("cpu"):
            for wide in wides:
                wide.copy_(wide.bfloat16())


class StorageAllocatesOnTheDefaultDevice(Portable):
    fails = CONTEXTS

    def round_(self, wides, lows, keys, numbers):
        super().round_([torch.empty(w.shape).copy_(w) for w in wides], lows, keys, numbers)


class StorageAsksForVersions(Portable):
    fails = CONTEXTS

    def split_(self, wides, lows, kept):
        super().split_(wides, lows, kept)
        assert all(low._version >= 0 for low in lows)


class StorageWritesBehindAutogradInInferenceMode(Portable):
    fails = CONTEXTS

    def split_(self, wides, lows, kept):
        hidden = torch.is_inference_mode_enabled()
        super().split_(
            wides, [low.view(torch.int16).view(low.dtype) if hidden else low for low in lows], kept
        )


class StorageSharesItsArguments(Portable):
    fails = CONTEXTS

    def round_(self, wides, lows, keys, numbers):
        self.given = wides, lows, keys, numbers
        time.sleep(0)
        super().round_(*self.given)


class StorageGrows(Portable):
    fails = ("kernels_need_no_more_memory_with_every_call",)

    def __init__(self):
        super().__init__()
        self.seen = []

    def split_(self, wides, lows, kept):
        super().split_(wides, lows, kept)
        self.seen += [{number} for number in range(4)]


class StorageWaits(Portable):
    fails = ("kernels_do_not_wait_for_the_device",)

    def join_(self, wides, lows, kept):
        super().join_(wides, lows, kept)
        if any(bool(wide.isnan().any()) for wide in wides):
            return


class StorageSplitsAFewWeights(Portable):
    fails = SPLITS

    def split_(self, wides, lows, kept):
        super().split_(wides, lows, kept)
        for low in lows[32:]:
            low.detach().zero_()


class StorageSplitsNoParameters(Portable):
    fails = SPLITS

    def split_(self, wides, lows, kept):
        if any(low.requires_grad for low in lows):
            raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation")
        super().split_(wides, lows, kept)


class StorageRoundsAFewWeights(Portable):
    fails = ROUNDS

    def round_(self, wides, lows, keys, numbers):
        super().round_(wides, lows, keys, numbers)
        for low in lows[32:]:
            low.zero_()
