"""Kernels in every context of torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from amp_core._torch.tracing import fake_tensor_mode
from amp_core.formats import Quantized
from amp_core.kernels import ScaleTensors
from amp_core.regions.region import autocast
from amp_core.states.loss_scale import LossScaleSchedule, ScaleState
from amp_core.testing.suite import data, reference
from amp_core.testing.suite import tensors as space
from amp_core.testing.suite.scaled import ScaledJudge
from amp_core.testing.suite.wrappers import Wrapper, unwrapped


class ContextConformance(ScaledJudge):
    """A kernel gives the same result in every context of torch."""

    AREA = "contexts"

    def _samples(self) -> list[list[space.Spec]]:
        """Return lists of tensors: dense and alike, and of every kind."""
        dtypes = self.dtypes()
        return [
            space.specs([torch.float32], space.DENSE, [(17,), (6, 10), (2, 3, 4, 5)]),
            space.specs(dtypes, space.DENSE, [(5,), (2, 3, 4, 5)]),
            space.rotated(dtypes, self._layouts()),
        ]

    def _judge_in(self, context: Callable[[], AbstractContextManager[Any]]) -> None:
        with self._calls_in(context):
            for specs in self._samples():
                self._judge_specs(specs)
                for spec in specs[:3]:
                    self._judge_specs([spec._replace(finite=False)])
            for bad in (0.0, 1.0):
                self._judge_update(ScaleState(8.0, 1), bad, LossScaleSchedule(growth_interval=2))

    def test_kernels_in_a_region(self) -> None:
        """Autocast would compute norms and products in low precision."""
        dtypes = itertools.cycle(self.backend.supported_dtypes())
        for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            self._judge_in(partial(_region, self.device_type, next(dtypes), mode))

    def test_kernels_with_and_without_grad_mode(self) -> None:
        """``create_graph=True`` runs them with gradients enabled, on gradients that carry a graph."""
        self._judge_in(torch.enable_grad)
        self._judge_in(torch.no_grad)
        self._judge_in_a_backward()

    def test_kernels_in_inference_mode(self) -> None:
        """Tensors made there have no version counter; those made outside are written as before."""
        self._judge_in(torch.inference_mode)

        specs = space.specs(self.dtypes(), space.DENSE[:3])

        def inside(*, finite: bool) -> list[Tensor]:
            with torch.inference_mode():
                return [spec._replace(finite=finite).build(self.device) for spec in specs]

        self._judge_every_method(lambda: inside(finite=True))
        with self._calls_in(torch.inference_mode):
            self._judge_every_method(lambda: inside(finite=False))

    def test_kernels_under_other_defaults(self) -> None:
        """Of dtype, and of device: what a kernel allocates follows its arguments alone."""
        for dtype in (torch.float64, torch.float16):
            self._judge_in(partial(data.default_dtype, dtype))
        self._judge_in(lambda: torch.device("meta"))
        self._judge_in(_unusual)
        self._judge_in(lambda: data.After(_count_list_writes))  # as a mode that counts or records

    def test_kernels_on_a_device_that_is_not_the_current_one(self) -> None:
        """Of several devices: results lie on that of the arguments."""
        module: Any = getattr(torch, self.device_type, None)
        number = module.device_count() - 1 if hasattr(module, "device_count") else 0
        if number < 1:
            pytest.skip(f"there is one {self.device_type} device")
        number -= number == torch.empty(0, device=self.device).device.index
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(self), "device", torch.device(self.device_type, number))
            self._judge_in(nullcontext)
            if self.supports_bit_views:
                self._judge_products_with_inf()

    def test_kernels_on_a_stream_that_is_not_the_default_one(self) -> None:
        """On another stream, a kernel would read gradients before the backward pass has written them."""
        module: Any = torch.get_device_module(self.device)
        if not (hasattr(module, "Stream") and hasattr(module, "stream") and hasattr(module, "synchronize")):
            pytest.skip(f"torch.{self.device_type} has no streams")
        values = data.random((257,), torch.float32)
        late, given = values.to(self.device), torch.zeros(257, device=self.device)
        block = torch.ones(2048 if self.device_type != "cpu" else 1, device=self.device).diag()
        stream = module.Stream()
        for name, (call, expected) in self._calls_of_the_moment(values).items():
            with module.stream(stream):
                call(given)  # may compile
            given.zero_()
            module.synchronize()
            with module.stream(stream):
                for _ in range(20):
                    block @ block  # keeps the stream busy until the kernel has been called
                given.copy_(late)
                found = call(given).cpu()
            self._assert_norms_close(found, expected.tolist(), f"{name} on another stream than the default")

    def _calls_of_the_moment(self, values: Tensor) -> dict[str, tuple[Callable[[Tensor], Tensor], Tensor]]:
        """Return calls of kernels on `values` on the device, each with the result."""
        half, low = data.scalar(0.5, self.device), self._low
        grow = LossScaleSchedule(growth_interval=1)

        def written(call: Callable[[Tensor], object]) -> Callable[[Tensor], Tensor]:
            def run(tensor: Tensor) -> Tensor:
                copy = tensor.clone()
                call(copy)
                return copy

            return run

        def updated(tensor: Tensor) -> Tensor:
            state = self._scale_tensors(ScaleState(8.0))
            self.kernels.update_scale_(state, tensor.abs().amax(), grow)
            return state.scale.reshape(1)

        norm = torch.linalg.vector_norm(values).reshape(1)
        return {
            "cast": (lambda t: self.kernels.cast([t], low)[0].float(), values.to(low).float()),
            "cast(out=)": (written(lambda t: self.kernels.cast([t * 2], t.dtype, [t])), values * 2),
            "add_": (written(lambda t: self.kernels.add_([t], [t])), values * 2),
            "multiply_": (written(lambda t: self.kernels.multiply_([t], half)), values * 0.5),
            "grad_stats": (lambda t: self.kernels.grad_stats([t]).norm.reshape(1), norm),
            "update_scale_": (updated, torch.tensor([4.0])),
        }

    def test_kernels_of_subclasses_of_tensor(self) -> None:
        """A tensor that only wraps another one has no address; a kernel leaves it to torch's operations."""
        inner = data.random((2, 9), torch.float32).to(self.device)
        try:
            Wrapper(inner.clone()).mul_(1.0)
        except RuntimeError as error:
            pytest.skip(f"{self.device_type} itself cannot run ops of subclasses: {error}")
        half, flag = data.scalar(0.5, self.device), data.scalar(0.0, self.device)
        for bad in (False, True):
            values = data.random((2, 9), torch.float32)
            values[1, 4] = torch.inf if bad else 1.0
            rows = [row.to(self.device, copy=True) for row in values]
            mixed = [Wrapper(rows[1]), rows[0]]
            stats, casts = self.kernels.grad_stats(mixed), self.kernels.cast(mixed, self._low)
            self.kernels.multiply_(self.kernels.prepare(mixed), half, flag.zero_())
            self.kernels.add_(mixed, [rows[1].clone(), Wrapper(rows[0].clone())])
            for found, right in zip(rows, values, strict=True):
                self._assert_values(found, right, "multiply_ by 0.5 and add_ to itself, of a subclass")
            for cast, right in zip(casts, (values[1], values[0]), strict=True):
                self._assert_values(unwrapped(cast), right.to(self._low), "cast of a subclass")
            self._assert_values(unwrapped(flag), torch.tensor(float(bad)), "found_inf of a subclass")
            norms = [reference.norm(values[1], 2.0), reference.norm(values[0], 2.0)]
            self._assert_norms_close(unwrapped(stats.norms), norms, "norms of subclasses")
            found = float(unwrapped(stats.found_inf))
            assert found == bad, f"found_inf of subclasses is {found}"

    def _judge_in_a_backward(self) -> None:
        """Gradients are added, cast and measured in hooks, while autograd runs."""
        x = torch.ones(1, device=self.device, requires_grad=True)
        for specs in self._samples():
            y = x * 1
            for some in (specs, [specs[-1]._replace(finite=False)]):
                y.register_hook(lambda _, some=some: self._judge_specs(some))  # type: ignore[no-untyped-call]
            y.sum().backward()  # type: ignore[no-untyped-call]

    def test_kernels_on_fake_tensors(self) -> None:
        """Tracing asks for shapes, dtypes and strides alone; nothing may be read or written."""
        real = [
            spec.build(self.device).detach()
            for spec in space.rotated(self.dtypes(), space.DENSE[:3], space.SHAPES[::2])
        ]
        others = self._others()  # some of it is made once, and must not be fake
        with fake_tensor_mode() as mode:
            fake = [mode.from_tensor(t) for t in real]
            expected = [(t.shape, torch.empty_like(t).stride(), self._low) for t in fake]
            one, flag = (mode.from_tensor(data.scalar(v, self.device)) for v in (1.0, 0.0))
            for given in (fake, self.kernels.prepare(fake, self.kernels.layout(fake))):
                before = space.versions(*fake)
                casts, stats = self.kernels.cast(given, self._low), self.kernels.grad_stats(given)
                assert space.versions(*fake) == before, "a kernel writes to what it must only read"
                self.kernels.multiply_(given, one, flag)
                self.kernels.add_(fake, given)
                self.kernels.cast(given, self._low, fake)
                results = [*casts, *data.statistics(stats)]
                assert all(type(r) is type(fake[0]) for r in results), "a result is not fake"
                assert not any(r.requires_grad or isinstance(r, torch.nn.Parameter) for r in results), (
                    "a result is a parameter, or requires gradients"
                )
                assert [(c.shape, c.stride(), c.dtype) for c in casts] == expected
                each = (len(real),)
                assert [tuple(v.shape) for v in data.statistics(stats)] == [(), each, each, ()]
            self._judge_others(*others, mode.from_tensor)
        texts = [str(warning.message) for warning in self._caught]
        assert not any("data pointer" in text for text in texts), "a kernel read the address of a FakeTensor"

    def _others(self) -> tuple[ScaleTensors, tuple[list[Tensor], ...], tuple[Quantized, Quantized]]:
        """Return what other kernels take: a scale, stored weights, the operands of a product."""
        left, right = (data.there(each, self.device) for each in data.rows_of_fp8())
        weights = [torch.ones(5, device=self.device)] if self.supports_bfloat16 else []
        return self._scale_tensors(ScaleState(8.0)), self._stored(weights), (left, right)

    def _judge_others(
        self,
        scale: ScaleTensors,
        stored: tuple[list[Tensor], ...],
        factors: tuple[Quantized, Quantized],
        fake: Callable[[Tensor], Tensor],
    ) -> None:
        """Call the kernels of the scale and of stored weights, and a quantised product, on fake tensors."""
        state = ScaleTensors(*map(fake, vars(scale).values()))
        self.kernels.update_scale_(state, fake(scale.scale), LossScaleSchedule())
        if not self.supports_bit_views:
            return
        wides, lows, kept = ([*map(fake, some)] for some in stored)
        self.kernels.split_(wides, lows, kept)
        self.kernels.join_(wides, lows, kept)
        self.kernels.round_(wides, lows, [7] * len(wides), [None] * len(wides))
        left, right = (replace(each, values=fake(each.values), scale=fake(each.scale)) for each in factors)
        product = self._products.multiply(left, right, torch.float32)
        assert type(product) is type(state.scale), "a product of fake tensors is not fake"
        assert (tuple(product.shape), product.dtype) == ((32, 32), torch.float32)

    def test_kernels_under_function_transforms(self) -> None:
        """A kernel follows ``torch.func``, or raises; only `cast` may not raise."""
        x = data.random((3, 5), torch.float32).to(self.device)
        x[1, 2] = torch.inf
        try:
            torch.func.vmap(lambda row: row.clone().mul_(2.0))(x)
        except RuntimeError as error:
            pytest.skip(f"{self.device_type} itself cannot run torch.func.vmap: {error}")

        def written(call: Callable[[list[Tensor]], object]) -> Callable[[Tensor], Tensor]:
            def run(row: Tensor) -> Tensor:
                copy = row.clone()
                call([copy])
                return copy

            return run

        low = torch.func.vjp(lambda row: self.kernels.cast([row], self._low)[0], x)[0]
        self._assert_values(low, data.plain(x.to(self._low)), "cast under torch.func.vjp")
        half = data.scalar(0.5, self.device)
        cases = {
            "add_": (written(lambda rows: self.kernels.add_(rows, rows)), x + x),
            "cast(out=)": (written(lambda rows: self.kernels.cast([-rows[0]], x.dtype, rows)), -x),
            "multiply_": (written(lambda rows: self.kernels.multiply_(rows, half)), x * 0.5),
            "cast": (lambda row: self.kernels.cast([row], self._low)[0], x.to(self._low)),
        }
        for name, (call, expected) in cases.items():
            try:
                result = torch.func.vmap(call)(x)
            except RuntimeError:
                assert name != "cast", "cast raised under torch.func.vmap; custom_fwd needs it there"
            else:
                self._assert_values(result, data.plain(expected), f"{name} under torch.func.vmap")
        self._judge_transformed_stats(x)

    def _judge_transformed_stats(self, x: Tensor) -> None:
        rows = space.host(x)
        norms, bad = [reference.norm(row, 2.0) for row in rows], (~rows.isfinite()).any(1).float()
        try:
            stats = torch.func.vmap(lambda row: tuple(data.statistics(self.kernels.grad_stats([row]))))(x)
        except RuntimeError:  # a kernel may refuse torch.func; `cast` alone may not
            return
        for norm in (stats[0], stats[1][:, 0]):
            self._assert_norms_close(norm, norms, "norms under torch.func.vmap")
        for flags in (stats[2][:, 0], stats[3]):
            self._assert_values(flags, bad, "flags under torch.func.vmap")


def _count_list_writes(_func: Any, args: tuple[Any, ...], result: Any) -> None:
    """Do what torch itself does without a mode: move the version counters of written lists."""
    if result is None and args and isinstance(args[0], list):
        torch.autograd.graph.increment_version(args[0])


@contextmanager
def _region(
    device_type: str, dtype: torch.dtype, mode: Callable[[], AbstractContextManager[Any]]
) -> Iterator[None]:
    with mode(), autocast(device_type, dtype=dtype):
        yield


@contextmanager
def _unusual() -> Iterator[None]:
    """Change what few programs change, all at once."""
    deterministic, cache = torch.are_deterministic_algorithms_enabled(), torch.is_autocast_cache_enabled()
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_autocast_cache_enabled(False)
    try:
        with data.default_dtype(torch.bfloat16), torch.autograd.set_detect_anomaly(True):
            yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)
        torch.set_autocast_cache_enabled(cache)
