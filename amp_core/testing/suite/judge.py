"""Call a kernel and compare everything that the contract promises of the call with the reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from amp_core._torch.tensors import version_of
from amp_core.formats import ELEMENTS, Quantization, Recipe
from amp_core.kernels import GradStats, ScaleTensors
from amp_core.kernels.interface import as_int32
from amp_core.states.loss_scale import LossScaleSchedule, ScaleState, next_scale
from amp_core.testing.suite import data, reference
from amp_core.testing.suite.calls import Calls
from amp_core.testing.suite.tensors import LAYOUTS, UNTRACKED, Spec, host

Tensors = Sequence[Tensor]


class Judge(Calls):
    """The judged calls that the areas of kernels share."""

    _turn = 0

    def _gradient_dtypes(self) -> list[torch.dtype]:
        wide = [torch.complex128] if self.supports_float64 else []
        return [*self.dtypes(), *([torch.complex64, *wide] if self.supports_complex else [])]

    @property
    def _low(self) -> torch.dtype:
        """The dtype of most casts."""
        return torch.bfloat16 if self.supports_bfloat16 else self.backend.supported_dtypes()[0]

    def _float8(self) -> list[torch.dtype]:
        return [torch.float8_e4m3fn, torch.float8_e5m2] if self.supports_float8 else []

    def _cast_dtypes(self) -> list[torch.dtype]:
        return [*self.dtypes(), *self._float8()]

    def _layouts(self) -> list[str]:
        lazy = () if self.supports_lazy_signs else ("negated", "conjugated")
        return [layout for layout in LAYOUTS if layout not in lazy]

    def _summed_dtypes(self) -> list[tuple[torch.dtype, torch.dtype]]:
        """Return pairs of dtypes: of totals and of gradients that are no wider."""
        dtypes = self.dtypes()
        return [(a, b) for a in dtypes for b in dtypes if a is b or a.itemsize > b.itemsize]

    def _judge_cast(
        self,
        tensors: Tensors,
        dtype: torch.dtype,
        out: Tensors | None = None,
        what: str = "",
        given: Tensors | None = None,
    ) -> list[Tensor]:
        """Cast `tensors`, which the kernel may be `given` in another form, and check the results."""
        given = tensors if given is None else given
        sources = [host(t) for t in tensors]
        results: list[Tensor] = self._call(
            "cast", lambda: self.kernels.cast(given, dtype, out), tensors, out or (), given=given
        )
        assert len(results) == len(tensors), f"{len(results)} results for {len(tensors)} tensors {what}"
        for i, (result, source, tensor) in enumerate(zip(results, sources, tensors, strict=True)):
            if out is not None:
                wrong = "" if result is out[i] else "is not the tensor of out="
            elif result.dtype is not dtype:
                wrong = f"became {result.dtype}"
            elif result.stride() != (strides := torch.empty_like(tensor.detach()).stride()):
                wrong = f"got the strides {result.stride()}, not {strides}"
            else:
                wrong = ""
            wrong = wrong or self._departure(result, data.rounded_once(source, result.dtype))
            assert not wrong, (
                f"{what} tensor {i} of {len(tensors)}, {source.dtype} of shape {tuple(source.shape)} "
                f"to {result.dtype}: {wrong}"
            )
        return results

    def _judge_add(
        self, totals: Tensors, grads: Tensors, what: str = "", given: Tensors | None = None
    ) -> None:
        given = grads if given is None else given
        expected = [reference.rounded_sum(host(t), host(g)) for t, g in zip(totals, grads, strict=True)]
        self._call("add_", lambda: self.kernels.add_(totals, given), grads, totals, given=given)
        for i, (total, grad, values) in enumerate(zip(totals, grads, expected, strict=True)):
            kind = f"total {i} of {len(totals)}, {grad.dtype} onto {total.dtype}"
            self._assert_values(total, values, f"{what} {kind}")

    def _judge_multiply(
        self,
        grads: Tensors,
        factor: float = 0.5,
        flag: float | None = 0.0,
        shape: tuple[int, ...] = (),
        what: str = "",
        given: Tensors | None = None,
        flag_shape: tuple[int, ...] | None = None,
    ) -> None:
        given = grads if given is None else given
        flag_shape = shape if flag_shape is None else flag_shape
        expected = [reference.product(host(g), factor) for g in grads]
        number = data.scalar(factor, self.device, shape)
        flags = [] if flag is None else [data.scalar(flag, self.device, flag_shape)]
        bad = any(map(reference.nonfinite, expected))  # no product with inf or NaN is finite
        self._call(
            "multiply_",
            lambda: self.kernels.multiply_(given, number, *flags),
            [number],
            grads,
            given=given,
            flags=flags,
        )
        for i, (grad, values) in enumerate(zip(grads, expected, strict=True)):
            kind = f"{grad.dtype} of shape {tuple(grad.shape)}"
            self._assert_products(grad, values, f"{what} tensor {i} of {len(grads)}, {kind} times {factor}")
        if flag is not None:
            right = torch.full(flag_shape, 1.0 if bad else flag, dtype=torch.float32, device="cpu")
            self._assert_values(
                flags[0], right, f"{what} found_inf of multiply_ by {factor}, which was {flag}"
            )
            assert not bad or flag or version_of(flags[0]) > 0, f"multiply_: {UNTRACKED} to found_inf"

    def _judge_stats(
        self, grads: Tensors, order: float = 2.0, what: str = "", given: Tensors | None = None
    ) -> GradStats:
        given = grads if given is None else given
        values = [host(g) for g in grads]
        stats: GradStats = self._call(
            "grad_stats", lambda: self.kernels.grad_stats(given, order), grads, (), given=given
        )
        wide = any(v.dtype in (torch.float64, torch.complex128) for v in values)
        dtype, n = torch.float64 if wide else torch.float32, len(grads)
        for name, shape, kind in (
            ("norm", (), dtype),
            ("norms", (n,), dtype),
            ("nonfinite", (n,), torch.float32),
            ("found_inf", (), torch.float32),
        ):
            part = getattr(stats, name)
            right = (tuple(part.shape), part.dtype) == (shape, kind)
            assert right, f"{what} {name} is {part.dtype} {tuple(part.shape)} in place of {kind} {shape}"
        expected = [reference.norm(v, order) for v in values]
        flags = [float(reference.nonfinite(v)) for v in values]
        self._assert_values(
            stats.nonfinite,
            torch.tensor(flags, dtype=torch.float32),
            f"{what} nonfinite of {len(grads)} tensors",
        )
        found, bad = float(stats.found_inf), max(flags, default=0.0)
        assert found == bad, f"{what} found_inf is {found}, not {bad}"
        self._assert_norms_close(stats.norms, expected, f"{what} norms of order {order}")
        whole = [reference.norm(torch.tensor(expected, dtype=torch.float64), order)]
        self._assert_norms_close(stats.norm.reshape(1), whole, f"{what} total norm of order {order}")
        return stats

    def _scale_tensors(self, state: ScaleState) -> ScaleTensors:
        counts = state.growth_tracker, state.hysteresis_left
        integers = (data.scalar(c, self.device, dtype=torch.int32) for c in counts)
        return ScaleTensors(data.scalar(state.scale, self.device), *integers)

    def _judge_update(
        self,
        state: ScaleState,
        found: float,
        schedule: LossScaleSchedule,
        shape: tuple[int, ...] = (),
        tensors: ScaleTensors | None = None,
        flag: Tensor | None = None,
    ) -> ScaleState:
        tensors = self._scale_tensors(state) if tensors is None else tensors
        flag = data.scalar(found, self.device, shape) if flag is None else flag
        flag.data.fill_(found)  # which moves no version counter
        written = list(vars(tensors).values())
        self._call(
            "update_scale_",
            lambda: self.kernels.update_scale_(tensors, flag, schedule),
            [flag],
            written,
            wrote=False,
        )
        after = ScaleState(float(tensors.scale), int(tensors.growth_tracker), int(tensors.hysteresis_left))
        expected = next_scale(state, found > 0, _in_int32(schedule))
        if not self.supports_float64 and abs(after.scale - expected.scale) <= expected.scale * 2.0**-23:
            expected = expected._replace(scale=after.scale)  # the product was one of float32 numbers
        # Short, as the report cuts a line before pytest has shown both.
        assert after == expected, f"update_scale_ from {state}, found_inf={found}, must give {expected}"
        moved = after.scale == state.scale or version_of(tensors.scale) > 0
        assert moved, f"update_scale_: {UNTRACKED} to the scale"
        return after

    def _kernel_calls(self, tensors: Tensors) -> dict[str, Callable[[], Any]]:
        """Return a call of each kernel on `tensors`."""
        one, flag = data.scalar(1.0, self.device), data.scalar(0.0, self.device)
        totals = [t.to(torch.promote_types(t.dtype, torch.float32), copy=True) for t in tensors]
        counts = (torch.tensor(1, dtype=torch.int32).to(self.device) for _ in range(2))
        state = ScaleTensors(one.clone(), *counts)
        how = Recipe.mxfp8().input
        assert how is not None
        random = Quantization(ELEMENTS["e4m3"], rounding="stochastic")
        seed = 7 if self.device.type == "cpu" else torch.tensor(7).to(self.device)  # the host reads a CPU's
        real = [t for t in tensors if t.is_floating_point() and self.supports_bit_views]
        left, right = (data.there(each, self.device) for each in data.rows_of_fp8())
        multiply = partial(self.backend.scaled_products().multiply, left, right, torch.float32)
        stored = self._stored(real) if self.supports_bfloat16 else ([], [], [])
        return {
            **({"multiply of scaled_products": multiply} if self.supports_bit_views else {}),
            "quantize": lambda: [self.kernels.quantize(t, how).values for t in real],
            "quantize(seed=, amax=)": lambda: [
                self.kernels.quantize(t, random, seed=seed, amax=one).values for t in real
            ],
            "layout": lambda: self.kernels.layout(tensors),
            "prepare": lambda: self.kernels.prepare(tensors),
            "cast": lambda: self.kernels.cast(tensors, self._low),
            "cast(out=)": lambda: self.kernels.cast(tensors, torch.float32, totals),
            "add_": lambda: self.kernels.add_(totals, tensors),
            "grad_stats": lambda: self.kernels.grad_stats(tensors),
            "grad_stats of order 3": lambda: self.kernels.grad_stats(tensors, 3.0),
            "multiply_": lambda: self.kernels.multiply_(tensors, one, flag),
            "update_scale_": lambda: self.kernels.update_scale_(state, flag, LossScaleSchedule()),
            "split_": lambda: self.kernels.split_(*stored),
            "join_": lambda: self.kernels.join_(*stored),
            "round_": lambda: self.kernels.round_(*stored[:2], [7] * len(stored[0]), [None] * len(stored[0])),
        }

    def _stored(self, tensors: Tensors) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Return float32 weights of the values of `tensors`, and zeros for their parts."""
        wides = [t.detach().to(torch.float32, copy=True) for t in tensors]
        lows, kept = ([torch.zeros_like(w, dtype=d) for w in wides] for d in (torch.bfloat16, torch.int16))
        return wides, lows, kept

    def _judge_every_method(self, tensors: Callable[[], list[Tensor]]) -> None:
        """Judge each kernel on fresh tensors."""
        low = self.backend.supported_dtypes()[0]
        self._judge_cast(tensors(), low)
        self._turn += 1
        self._judge_stats(tensors(), (2.0, torch.inf, 3.0)[self._turn % 3])
        with torch.no_grad():
            written, out = ([t.detach() for t in tensors()] for _ in range(2))
        for target in out:  # must not already hold the results
            with torch.inference_mode(target.is_inference()):
                target.zero_()
        self._judge_cast(tensors(), low, out)
        self._judge_multiply(written, flag=(0.0, 3.0)[self._turn % 2])
        self._judge_add([t.detach() for t in tensors()], tensors())

    def _judge_specs(self, specs: Sequence[Spec]) -> None:
        self._judge_every_method(lambda: [spec.build(self.device) for spec in specs])


def _in_int32(schedule: LossScaleSchedule) -> LossScaleSchedule:
    """Return `schedule` with the counts that the device holds."""
    interval, hysteresis = as_int32(schedule.growth_interval), as_int32(schedule.hysteresis)
    return replace(schedule, growth_interval=interval, hysteresis=hysteresis)
