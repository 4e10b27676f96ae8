"""What the kernels of stored weights must do: `Kernels.split_`, `Kernels.join_` and `Kernels.round_`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from amp_core.kernels import PORTABLE
from amp_core.regions.region import autocast
from amp_core.testing.suite import data
from amp_core.testing.suite.judge import Judge
from amp_core.testing.suite.tensors import Spec
from amp_core.testing.suite.threads import Judged, interleave

_KEYS = (0, 2**64 - 1, 0x9E3779B97F4A7C15)
_SPECIAL = (0.0, 1.0, 1e-30, 1e-41, 3.3895314e38, 3.3961775e38, 3.4028235e38, math.inf, math.nan, 1 + 2.0**-8)
_NANS = (0x7F800001, 0x7FFFFFFF, -0x7FFFFF, -1)
"""Bits of NaN that rounding by integer arithmetic turns into inf or zero."""
_LAYOUTS = (
    ("contiguous", "contiguous", "contiguous"),
    ("reversed", "reversed", "reversed"),
    ("channels_last", "channels_last", "channels_last"),
    ("contiguous", "gaps", "contiguous"),
    ("contiguous", "padded rows", "reversed"),
    ("odd offset", "contiguous", "gaps"),
    ("cut", "channels_last", "padded rows"),
)
"""Of a float32 weight, its bfloat16 weight, and what is kept: a step makes the first and the last anew."""
_HELD = {torch.int16: torch.bfloat16, torch.int32: torch.float32}


class StorageConformance(Judge):
    """A weight in two parts has one right form, bit for bit; so has one that is rounded at random."""

    AREA = "storage"

    def _weights(self) -> Iterator[Tensor]:
        """Yield float32 weights on the host: special numbers, odd counts, many dimensions."""
        yield self._computable(torch.tensor([sign * value for value in _SPECIAL for sign in (1.0, -1.0)]))
        yield torch.tensor(_NANS, dtype=torch.int32).view(torch.float32)
        for shape in ((), (0,), (1031,), (5, 7), (2, 3, 4, 5)):
            yield data.random(shape, torch.float32)

    def _here(self, values: Tensor, layout: str = "contiguous") -> Tensor:
        """Return a copy of `values` on the device; a small one in a layout, with other memory around it."""
        if values.numel() > 1 << 13:
            return values.to(self.device, copy=True)
        spec = Spec(tuple(values.shape), layout, _HELD.get(values.dtype, values.dtype))
        there = (spec if spec.applies() else spec._replace(layout="contiguous")).build(self.device)
        return there.view(values.dtype).copy_(values)

    def _judge_split(self, wide: Tensor, kind: torch.dtype, layouts: tuple[str, ...] = _LAYOUTS[0]) -> None:
        """Split `wide`, on the host, on the device; compare with the reference."""
        low, kept = torch.empty_like(wide, dtype=torch.bfloat16), torch.empty_like(wide, dtype=kind)
        PORTABLE.split_([wide.clone()], [low], [kept])
        # The float32 weight may be overwritten, but not what lies around it.
        source = self._here(wide, layouts[0])
        parts = [
            self._here(torch.zeros_like(t), how) for t, how in zip((low, kept), layouts[1:], strict=True)
        ]
        self._call(
            "split_", lambda: self.kernels.split_([source], parts[:1], parts[1:]), [], parts, flags=[source]
        )
        what = f"weights of shape {tuple(wide.shape)}, kept as {kind}, {', '.join(layouts)}"
        self._assert_values(parts[0], low, f"{what}, rounded")
        if kind is torch.int16:
            wrong = (parts[1].cpu() != kept) & ~wide.isnan()
            assert not wrong.any(), f"{what}: other lower bits"
        else:
            self._assert_values(parts[1], kept, f"{what}, the rest")

    def _judge_join(self, wide: Tensor, kind: torch.dtype, layouts: tuple[str, ...] = _LAYOUTS[0]) -> None:
        """Join on the device what the reference splits `wide` into; compare with the reference."""
        low, kept = torch.empty_like(wide, dtype=torch.bfloat16), torch.empty_like(wide, dtype=kind)
        PORTABLE.split_([wide.clone()], [low], [kept])
        joined = torch.empty_like(wide)
        PORTABLE.join_([joined], [low], [kept])
        here = self._here(torch.zeros_like(wide), layouts[0])
        parts = [self._here(t, how) for t, how in zip((low, kept), layouts[1:], strict=True)]
        self._call("join_", lambda: self.kernels.join_([here], parts[:1], parts[1:]), parts, [here])
        what = f"weights of shape {tuple(wide.shape)}, kept as {kind}, {', '.join(layouts)}"
        self._assert_values(here, joined, f"{what}, joined")

    def _judge_round(
        self, weights: list[Tensor], key: int, layouts: tuple[str, ...] = _LAYOUTS[0], turn: int = 0
    ) -> None:
        """Round a list on the device, each weight by a key of its own; compare with the reference."""
        lows = [torch.empty_like(w, dtype=torch.bfloat16) for w in weights]
        # Some are numbered, or the others.
        counted = [self._numbers(w) if i % 2 == turn else None for i, w in enumerate(weights)]
        keys = [key ^ i for i in range(len(lows))]
        PORTABLE.round_([w.clone() for w in weights], lows, keys, counted)
        here = [self._here(torch.zeros_like(low), layouts[1]) for low in lows]
        wides = [self._here(w, layouts[0]) for w in weights]
        numbers = [None if n is None else self._here(n, layouts[2]) for n in counted]
        read = [n for n in numbers if n is not None]
        self._call("round_", lambda: self.kernels.round_(wides, here, keys, numbers), read, here, flags=wides)
        for low, rounded in zip(lows, here, strict=True):
            what = f"rounded by the key {key:#x}, shape {tuple(low.shape)}, {', '.join(layouts)}"
            self._assert_values(rounded, low, what)

    def test_storage_splits_and_joins_as_the_reference(self) -> None:
        """With other bits, a checkpoint would mean other weights on another device."""
        self.requires("supports_bit_views")
        self.requires("supports_bfloat16")
        for kind in (torch.int16, torch.bfloat16):
            for wide, layouts in itertools.product(self._weights(), _LAYOUTS):
                self._judge_split(wide, kind, layouts)
                self._judge_join(wide, kind, layouts)
            large = data.random((self.large_numel // 16,), torch.float32)
            self._judge_split(large, kind)
            self._judge_join(large, kind)
        self._judge_a_list_of_weights()
        self._judge_the_moment_of_joining()
        for call in (self.kernels.split_, self.kernels.join_):
            call([], [], [])

    def _judge_a_list_of_weights(self) -> None:
        """Every weight of a list is split and joined, each into the kind that is kept of it."""
        wides = [data.random((n,), torch.float32, n) for n in (5, 17, 3, *range(1, 40))]
        lows = [torch.zeros_like(w, dtype=torch.bfloat16) for w in wides]
        kinds = itertools.cycle((torch.int16, torch.bfloat16, torch.int16))
        kept = [torch.zeros_like(w, dtype=kind) for w, kind in zip(wides, kinds, strict=False)]
        here, *parts = (tuple(self._here(t) for t in some) for some in (wides, lows, kept))
        parts[0][-1].requires_grad_()  # as the weights of a model are
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
        layouts = itertools.cycle(_LAYOUTS)
        for key, turn in itertools.product(_KEYS, (0, 1)):
            self._judge_round(weights, key, _LAYOUTS[0], turn)
            self._judge_round(weights, key, next(layouts), turn)
        for layout in _LAYOUTS:
            self._judge_round(weights[-2:], _KEYS[2], layout)
        self._judge_round([data.random((n,), torch.float32, n) for n in range(1, 40)], _KEYS[2])
        self._judge_round([data.random((self.large_numel // 16,), torch.float32)], _KEYS[1], turn=1)
        self.kernels.round_([], [], [], [])

    def test_storage_in_every_context(self) -> None:
        """A step may run in any mode, in a region, and in several threads; the bits are the same."""
        self.requires("supports_bit_views")
        self.requires("supports_bfloat16")
        weights = [data.random((5, 7), torch.float32), torch.tensor([1.5, math.inf, math.nan])]
        calls: tuple[Callable[[], None], ...] = (
            *(partial(self._judge_split, w, kind) for w in weights for kind in (torch.int16, torch.bfloat16)),
            *(partial(self._judge_join, w, kind) for w in weights for kind in (torch.int16, torch.bfloat16)),
            partial(self._judge_round, weights, _KEYS[2]),
        )
        contexts: tuple[Callable[[], AbstractContextManager[Any]], ...] = (
            torch.enable_grad,
            torch.no_grad,
            torch.inference_mode,
            lambda: autocast(self.device_type),
            lambda: torch.device("meta"),
            partial(data.default_dtype, torch.float64),
            partial(data.default_dtype, torch.float16),
        )
        for context, call in itertools.product(contexts, calls):
            with self._calls_in(context):
                call()
        with torch.inference_mode():  # whose own tensors have no version counters
            for call in calls:
                call()
        self._judge_threads_of_storage(weights[0])

    def _judge_threads_of_storage(self, weight: Tensor) -> None:
        names = ("_judge_split", "_judge_join", "_judge_round")
        for name in names:

            def judged(number: int, name: str = name) -> Judged:
                values = weight[: number + 2] * (number + 1)

                def run(context: Callable[[], AbstractContextManager[Any]]) -> None:
                    judge = type(self)()
                    judge._context = context
                    if name == "_judge_round":
                        judge._judge_round([values], number)
                    else:
                        getattr(judge, name)(values, torch.int16)

                return run

            interleave(judged, 10_000 if self.thorough else 6)

    def _numbers(self, weight: Tensor) -> Tensor:
        """Return numbers as a shard of columns has them, beyond 2**31 too."""
        numbers = torch.arange(weight.numel()) * 3 + (2**31 - weight.numel())
        return torch.empty_like(weight, dtype=torch.int32).copy_(numbers.to(torch.int32).view(weight.shape))

    def _judge_the_moment_of_joining(self) -> None:
        """Parts that are kept for their tensors are stale after an optimizer's step."""
        wide, low = (torch.zeros(9, dtype=d, device=self.device) for d in (torch.float32, torch.bfloat16))
        kept = torch.zeros(9, dtype=torch.int16, device=self.device)
        for value in (1.5, -2.25):
            low.data.fill_(value)
            self.kernels.join_([wide], [low], [kept])
            assert wide.cpu().tolist() == [value] * 9
            wide.data.fill_(value * 2)
            self.kernels.split_([wide], [low], [kept])
            assert low.float().cpu().tolist() == [value * 2] * 9

    def test_storage_refuses_other_shapes_before_it_writes(self) -> None:
        """A weight that is left out, or broadcast, must not pass silently."""
        self.requires("supports_bfloat16")

        def make(dtype: torch.dtype, sizes: tuple[int, ...]) -> list[Tensor]:
            return [torch.ones(n, dtype=dtype, device=self.device) for n in sizes]

        for sizes in ((4,), (4, 3), (4, 1)):
            wides, lows = make(torch.float32, (4, 2)), make(torch.bfloat16, sizes)
            kept, fit = make(torch.int16, (4, 2)), make(torch.bfloat16, (4, 2))
            calls: list[tuple[str, Callable[[], None]]] = [
                ("split_", partial(self.kernels.split_, wides, lows, kept)),
                ("join_", partial(self.kernels.join_, wides, lows, kept)),
                ("split_", partial(self.kernels.split_, wides, fit, lows)),
                ("join_", partial(self.kernels.join_, wides, fit, lows)),
                ("round_", partial(self.kernels.round_, wides, lows, [0, 0], [None, None])),
            ]
            for name, call in calls:
                what = f"{name} of weights of sizes (4, 2) with parts of {sizes}"
                with self._refused(what, [*wides, *lows, *kept, *fit]):
                    call()
