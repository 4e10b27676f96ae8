"""Kernels in every context of torch, and what they must not remember from call to call."""

from __future__ import annotations

import gc
import itertools
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from amp_core._torch import internals as _torch
from amp_core.kernels import GradStats
from amp_core.regions.region import autocast
from amp_core.states.loss_scale import LossScaleSchedule, ScaleState
from amp_core.testing.suite import data
from amp_core.testing.suite import tensors as space
from amp_core.testing.suite.judge import Judge


class ContextConformance(Judge):
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

    def _judge_specs(self, specs: list[space.Spec]) -> None:
        self._judge_every_method(lambda: [spec.build(self.device) for spec in specs])

    def _judge_in(self, context: Callable[[], AbstractContextManager[Any]]) -> None:
        self._context = context
        try:
            for specs in self._samples():
                self._judge_specs(specs)
                for spec in specs[:3]:
                    self._judge_specs([spec._replace(finite=False)])
            for bad in (0.0, 1.0):
                self._judge_update(ScaleState(8.0, 1), bad, LossScaleSchedule(growth_interval=2))
        finally:
            del self._context

    def test_kernels_in_a_region(self) -> None:
        """Autocast would compute norms and products in low precision."""
        dtypes = itertools.cycle(self.backend.supported_dtypes())
        for mode, dtype in zip(
            (torch.enable_grad, torch.no_grad, torch.inference_mode), dtypes, strict=False
        ):
            self._judge_in(lambda m=mode, d=dtype: _both(m(), autocast(self.device_type, dtype=d)))  # type: ignore[misc]

    def test_kernels_with_and_without_grad_mode(self) -> None:
        """``create_graph=True`` runs them with gradients enabled, on gradients that carry a graph."""
        self._judge_in(torch.enable_grad)
        self._judge_in(torch.no_grad)
        self._judge_in_a_backward()

    def test_kernels_in_inference_mode(self) -> None:
        """Tensors made there have no version counter; those made outside are written as before."""
        self._judge_in(torch.inference_mode)

        specs = space.specs(self.dtypes(), space.DENSE[:3])

        def inside() -> list[Tensor]:
            with torch.inference_mode():
                return [spec.build(self.device) for spec in specs]

        self._judge_every_method(inside)
        self._context = torch.inference_mode
        try:
            self._judge_every_method(inside)
        finally:
            del self._context

    def test_kernels_under_other_defaults(self) -> None:
        """Of dtype, and of device: what a kernel allocates follows its arguments alone."""
        for dtype in (torch.float64, torch.float16):
            self._judge_in(lambda dtype=dtype: _default_dtype(dtype))  # type: ignore[misc]
        self._judge_in(lambda: torch.device("meta"))
        self._judge_in(_unusual)
        self._judge_in(_Passing)

    def _judge_in_a_backward(self) -> None:
        """Gradients are added, cast and measured in hooks, while autograd runs."""
        x = torch.ones(1, device=self.device, requires_grad=True)
        for specs in self._samples():
            y = x * 1
            y.register_hook(lambda _, specs=specs: self._judge_specs(specs))  # type: ignore[no-untyped-call]
            y.sum().backward()  # type: ignore[no-untyped-call]

    def test_kernels_on_fake_tensors(self) -> None:
        """Tracing asks for shapes, dtypes and strides alone; nothing may be read or written."""
        real = [
            spec.build(self.device).detach()
            for spec in space.rotated(self.dtypes(), space.DENSE[:3], space.SHAPES[::2])
        ]
        with _torch.fake_tensor_mode() as mode:
            fake = [mode.from_tensor(t) for t in real]
            expected = [(t.shape, torch.empty_like(t).stride(), torch.bfloat16) for t in fake]
            one, flag = (mode.from_tensor(data.scalar(v, self.device)) for v in (1.0, 0.0))
            for given in (fake, self.kernels.prepare(fake, self.kernels.layout(fake))):
                casts, stats = self.kernels.cast(given, torch.bfloat16), self.kernels.grad_stats(given)
                self.kernels.multiply_(given, one, flag)
                self.kernels.add_(fake, given)
                self.kernels.cast(given, torch.bfloat16, fake)
                results = [*casts, *vars(stats).values()]
                assert all(isinstance(r, type(fake[0])) for r in results), "a result is not fake"
                assert [(c.shape, c.stride(), c.dtype) for c in casts] == expected
                assert [tuple(v.shape) for v in vars(stats).values()] == [(), (len(real),), (len(real),), ()]
        texts = [str(warning.message) for warning in self._caught]
        assert not any("data pointer" in text for text in texts), "a kernel read the address of a FakeTensor"

    def test_kernels_under_function_transforms(self) -> None:
        """A kernel follows ``torch.func``, or raises; only `cast` may not raise."""
        x = data.random((3, 5), torch.float32).to(self.device)
        x[1, 2] = torch.inf
        try:
            torch.func.vmap(lambda row: row.clone().mul_(2.0))(x)
        except (RuntimeError, NotImplementedError) as error:
            pytest.skip(f"{self.device_type} itself cannot run torch.func.vmap: {error}")

        def written(call: Callable[[list[Tensor]], object]) -> Callable[[Tensor], Tensor]:
            def run(row: Tensor) -> Tensor:
                copy = row.clone()
                call([copy])
                return copy

            return run

        low = torch.func.vjp(lambda row: self.kernels.cast([row], torch.bfloat16)[0], x)[0]
        wrong = self._departure(low, data.plain(x.bfloat16()))
        assert not wrong, f"cast under torch.func.vjp: {wrong}"
        half = data.scalar(0.5, self.device)
        cases = {
            "add_": (written(lambda rows: self.kernels.add_(rows, rows)), x + x),
            "cast(out=)": (written(lambda rows: self.kernels.cast([-rows[0]], x.dtype, rows)), -x),
            "multiply_": (written(lambda rows: self.kernels.multiply_(rows, half)), x * 0.5),
            "grad_stats": (
                lambda row: self.kernels.grad_stats([row]).found_inf,
                (~x.isfinite()).any(1).float(),
            ),
            "cast": (lambda row: self.kernels.cast([row], torch.bfloat16)[0], x.bfloat16()),
        }
        for name, (call, expected) in cases.items():
            try:
                result = torch.func.vmap(call)(x)
            except (RuntimeError, NotImplementedError):
                assert name != "cast", "cast raised under torch.func.vmap; custom_fwd needs it there"
            else:
                wrong = self._departure(result, data.plain(expected))
                assert not wrong, f"{name} under torch.func.vmap: {wrong}"


class MemoryConformance(Judge):
    """Kernels keep no tensor and no result, and each call reads the values of its moment."""

    AREA = "memory"

    def _gradients(self, seed: int = 0) -> list[Tensor]:
        return [spec._replace(seed=seed + i).build(self.device) for i, spec in enumerate(self._specs())]

    def _specs(self) -> list[space.Spec]:
        return space.specs(self.dtypes(), ("contiguous", "reversed"), [(17,), (6, 10), (0,)])

    def test_kernels_read_the_values_of_the_moment(self) -> None:
        """A result kept for a tensor, a list or a prepared list is stale once the tensor is written."""
        tensors, others = self._gradients(), self._gradients(seed=50)
        layout = self.kernels.layout(others)
        forms = [tensors, self.kernels.prepare(tensors), self.kernels.prepare(tensors, layout)]
        orders = [2.0, torch.inf]
        for change in ("nothing", "copy_", "data", "multiply_"):
            orders.reverse()  # so that the last one kept is the first one asked for again
            for tensor, other in zip(tensors, others, strict=True):
                # A write through `data` moves no version counter, as optimizers and DDP do.
                target = {"copy_": tensor, "data": tensor.data}.get(change)
                if target is not None:
                    target.copy_(other + len(change))
            for form in forms:
                what = f"after {change}:"
                if change == "multiply_":
                    self._judge_multiply(tensors, what=what, given=form)
                self._judge_cast(tensors, self.backend.default_dtype(), None, what, form)
                for order in orders:
                    self._judge_stats(tensors, order, what, form)
                self._judge_add([o.clone() for o in others], tensors, what, form)
            # Another list of as many tensors, whose dtypes and shapes stand in other places.
            self._judge_cast(tensors[::-1], self.backend.default_dtype())
            self._judge_stats(tensors[::-1])
            if change == "multiply_":
                self._judge_multiply(tensors[::-1])

    def test_multiply_reads_the_factor_of_the_moment(self) -> None:
        """The scaler writes the factor of each step into the same tensor."""
        grad, factor = torch.ones(3, device=self.device), data.scalar(0.5, self.device)
        for value, expected in ((0.5, 0.5), (4.0, 2.0), (0.25, 0.5)):
            factor.data.fill_(value)
            self.kernels.multiply_([grad], factor)
            assert grad.cpu().tolist() == [expected] * 3, f"times {value}"
        flag = data.scalar(0.0, self.device)
        for value in (torch.inf, 1.0):
            flag.data.zero_()
            self.kernels.multiply_([grad.fill_(value)], factor, flag)
            assert float(flag) == (0.0 if value == 1.0 else 1.0), f"found_inf of {value}"

    def test_kernels_keep_nothing_alive(self) -> None:
        """Arguments, results and layouts are the caller's: their memory is free once he drops them."""
        every = space.rotated(self.dtypes(), self._layouts())
        for name in self._kernel_calls([]):
            specs = self._specs() if name == "quantize" else every
            tensors = [spec.build(self.device) for spec in specs]
            result = self._kernel_calls(tensors)[name]()
            results = list(vars(result).values()) if isinstance(result, GradStats) else result
            tracked = [*tensors, *(results if isinstance(results, list) else ())]
            objects = [weakref.ref(t) for t in tracked]
            memory = [StorageWeakRef(t.untyped_storage()) for t in tracked if t.numel()]  # type: ignore[no-untyped-call]
            kept = result if name == "layout" else None
            del tensors, result, results, tracked
            gc.collect(0)
            alive = (
                sum(ref() is not None for ref in objects),
                sum(not m.expired() for m in memory),  # type: ignore[no-untyped-call]
            )
            assert alive == (0, 0), (
                f"{name} keeps {alive[0]} tensors and {alive[1]} storages alive ({kept!r:.60})"
            )

    def test_kernels_need_no_more_memory_with_every_call(self) -> None:
        """What is kept per call fills the memory of a long training run."""
        names = [*self._kernel_calls([])]
        gc.collect()
        gc.freeze()  # garbage of others that a collection frees in the meantime would hide growth
        try:
            # What a device in Python needs for its tensors; the first time also warms up.
            unavoidable = max(0, min(self._growth(), self._growth()))
            grown = {"together": self._growth(*names) - unavoidable}
            for _ in range(2):  # whatever else the process allocates is rarely there each time
                if max(grown.values()) >= 25:
                    grown = {name: self._growth(name) - unavoidable for name in names}
        finally:
            gc.unfreeze()
        grown = {name: blocks for name, blocks in grown.items() if blocks >= 25}
        assert not grown, f"blocks of Python's memory that 50 calls leave in use: {grown}"

    def _growth(self, *names: str) -> int:
        """Return by how many blocks of memory 50 calls grow, in the median: other changes happen once."""
        blocks = []
        for _ in range(4):
            for _ in range(50):
                calls = self._kernel_calls([torch.ones(5, device=self.device)])
                for name in names:
                    calls[name]()
                calls.clear()
            gc.collect()  # of all generations, which also empties Python's free lists
            blocks.append(sys.getallocatedblocks())
        return sorted(after - before for before, after in pairwise(blocks))[1]

    def test_layout_is_of_the_tensors_strides(self) -> None:
        """The gradients of the next step may have the same shapes, but lie otherwise."""
        for dtype in self.dtypes():
            specs = [
                space.Spec((6, 4), layout, dtype)
                for layout in ("contiguous", "reversed", "gaps", "padded rows")
            ]
            layouts = [self.kernels.layout([spec.build(self.device)]) for spec in specs]
            for spec, layout in zip(specs, layouts, strict=True):
                tensor = spec.build(self.device)
                self._judge_stats([tensor], 2.0, spec.layout, self.kernels.prepare([tensor], layout))


class _Passing(_torch.TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped in torch
    """Changes nothing, as a mode that counts or records; the tensors in it are real."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if result is None and args and isinstance(args[0], list):
            for tensor in args[0]:  # under a mode, torch itself moves no version counter of lists
                torch.autograd.graph.increment_version(tensor)
        return result


@contextmanager
def _both(*contexts: AbstractContextManager[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
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
        with _default_dtype(torch.bfloat16), torch.autograd.set_detect_anomaly(True):
            yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)
        torch.set_autocast_cache_enabled(cache)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
