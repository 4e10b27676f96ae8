"""Every kernel on every memory layout: generated lists, judged against the reference."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from amp_core.testing.suite import data
from amp_core.testing.suite import tensors as space
from amp_core.testing.suite.lists import ListJudge


class LayoutConformance(ListJudge):
    """Each kernel gives the reference's values for tensors that lie in memory in any way."""

    AREA = "layouts"

    def _lists(self, dtypes: Sequence[torch.dtype], extra: Sequence[str] = ()) -> Iterator[list[space.Spec]]:
        """Yield each layout alone, all and only dense ones of each dtype, all of all dtypes, odd shapes."""
        every = [*self._layouts(), *extra]
        layouts = every if self.thorough else [layout for layout in every if layout not in space.RARE]
        for spec in space.specs(dtypes, layouts) if self.thorough else space.rotated(dtypes, layouts):
            yield [spec]
        for dtype in dtypes:
            yield space.specs([dtype], layouts)
            yield space.specs([dtype], space.DENSE, [*space.SHAPES, *((n,) for n in space.LENGTHS)])
        everything = (space.specs if self.thorough else space.rotated)(dtypes, layouts)
        yield everything
        yield [spec._replace(finite=i % 3 > 0) for i, spec in enumerate(everything[::-1])]
        yield space.rotated(dtypes, [layout for layout in every if layout in space.RARE])
        for turned in (dtypes, [*dtypes[1:], dtypes[0]]):
            yield space.rotated(turned, every, space.ODD_SHAPES)

    def _bad_lists(self) -> Iterator[list[space.Spec]]:
        """Yield the lists of tensors that are only read, with inf and NaN in some of them."""
        for specs in self._lists(self.dtypes(), space.READ_ONLY):
            yield [spec._replace(finite=spec.seed % 3 > 0) for spec in specs]

    def _cast_lists(self) -> Iterator[list[space.Spec]]:
        yield from self._bad_lists()
        if self.supports_float8:
            yield space.rotated(self._float8(), (*space.MOVED, *space.READ_ONLY))

    def _build(self, specs: Sequence[space.Spec]) -> list[Tensor]:
        return [spec.build(self.device) for spec in specs]

    def _form(self, tensors: list[Tensor], specs: Sequence[space.Spec], number: int) -> Sequence[Tensor]:
        """Return a list, a tuple, a prepared list, or one prepared with the layout of its like."""
        if number % 4 < 2:
            return tuple(tensors) if number % 4 else tensors
        like = self._build([spec._replace(seed=spec.seed + 1) for spec in specs])
        return self.kernels.prepare(tensors, self.kernels.layout(like) if number % 4 == 3 else None)

    def _bad(self, specs: list[space.Spec]) -> Iterator[tuple[str, list[Tensor]]]:
        """Yield the tensors as they are and, for a list of one, also with a bad first or last element."""
        yield "", self._build(specs)
        if len(specs) == 1 and 0 not in specs[0].shape:
            for place, value in ((0, torch.nan), (-1, torch.inf)):
                (tensor,) = self._build(specs)
                tensor.detach()[(place,) * tensor.dim()] = value
                yield f"with {value} at {place},", [tensor]

    def test_cast_of_every_memory_layout(self) -> None:
        """The cast has the values, dtype, strides, and nothing else is written."""
        targets = itertools.cycle(self._cast_dtypes())
        for number, specs in enumerate(self._cast_lists()):
            for target in self.dtypes() if _alike(specs) else (next(targets),):
                tensors = self._build(specs)
                self._judge_cast(tensors, target, None, _name(specs), self._form(tensors, specs, number))

    def test_cast_into_every_memory_layout(self) -> None:
        """Source and target lie differently; ``out`` is what is written, and all that is."""
        dtypes, layouts = self._cast_dtypes(), self._layouts()
        for number, specs in enumerate(self._cast_lists()):
            shifts = range(0, len(layouts), 2 if len(specs) == 1 else 8)
            for shift in shifts if len(specs) == 1 or _alike(specs) else (number,):
                outs = [
                    spec.moved(
                        layouts[(i + number + shift) % len(layouts)], dtypes[(i + shift) % len(dtypes)]
                    )
                    for i, spec in enumerate(specs)
                ]
                what = f"{_name(specs)} into {_name(outs)}"
                written = (list, tuple)[number % 2](self._build(outs))
                tensors = self._build(specs)
                given = (tensors, tuple(tensors), self.kernels.prepare(tensors))[number % 3]
                self._judge_cast(tensors, dtypes[shift % len(dtypes)], written, what, given)

    def test_add_of_every_memory_layout(self) -> None:
        """Totals and gradients lie differently and differ in dtype."""
        layouts, pairs = self._layouts(), itertools.cycle(self._summed_dtypes())
        for number, specs in enumerate(self._bad_lists()):
            for shift in (None, 0, number) if len(specs) == 1 or _alike(specs) else (number,):
                kinds = [(spec, *next(pairs)) for spec in specs]
                grads = [spec._replace(dtype=grad) for spec, _, grad in kinds]
                totals = [
                    spec.moved(spec.layout if shift is None else layouts[(i + shift) % len(layouts)], total)
                    for i, (spec, total, _) in enumerate(kinds)
                ]
                tensors, what = self._build(grads), f"{_name(grads)} onto {_name(totals)}"
                written = (list, tuple)[number % 2](self._build(totals))
                self._judge_add(written, tensors, what, self._form(tensors, grads, number))

    def test_multiply_of_every_memory_layout(self) -> None:
        """Each element once, and a bad one is flagged wherever it lies."""
        for number, specs in enumerate(self._lists(self._gradient_dtypes())):
            for bad, tensors in self._bad(specs):
                shape, flag = ((), (1,))[number % 2], (0.0, 0.0, 1.0, None)[number // 4 % 4]
                factor, form = (0.25, 1.0, 1 / 3)[number % 3], self._form(tensors, specs, number)
                self._judge_multiply(tensors, factor, flag, shape, _name(specs) + bad, form)

    def test_grad_stats_of_every_memory_layout(self) -> None:
        """Each element once, and a bad one is flagged wherever it lies."""
        orders = itertools.cycle((2.0, 1.0, 2.5, torch.inf))
        for number, specs in enumerate(self._lists(self._gradient_dtypes(), space.READ_ONLY)):
            for bad, tensors in self._bad(specs):
                for order in (2.0, next(orders)) if len(specs) == 1 or _alike(specs) else (next(orders),):
                    form = self._form(tensors, specs, number)
                    self._judge_stats(tensors, order, _name(specs) + bad, form)

    def test_kernels_tell_views_of_one_storage_apart(self) -> None:
        """Views with one address, one storage or one object are still tensors of their own."""
        self._judge_targets_that_are_the_sources()
        for dtype in self.dtypes():
            for view in (space.overlapping, space.bucket):
                self._judge_cast(view(dtype, self.device), self.backend.default_dtype())
                for order in (2.0, torch.inf):
                    self._judge_stats(view(dtype, self.device), order)
            grads = space.overlapping(dtype, self.device)
            self._judge_cast(grads, dtype, [torch.empty_like(t) for t in grads])
            self._judge_add([torch.ones_like(t) for t in grads], grads)
            self._judge_multiply(space.bucket(dtype, self.device))
            self._judge_add(space.bucket(dtype, self.device), space.bucket(dtype, self.device, seed=1))
            for total in self.dtypes():
                self._judge_cast(
                    space.bucket(dtype, self.device), dtype, space.bucket(total, self.device, seed=1)
                )

    def test_kernels_of_no_tensors(self) -> None:
        """A model without parameters, or without gradients."""
        for given in ([], (), self.kernels.prepare([], self.kernels.layout([]))):
            self._judge_cast([], self._low, None, given=given)
            self._judge_cast([], self._low, [], given=given)
            self._judge_stats([], given=given)
            self._judge_multiply([], given=given)
            self._judge_add([], [], given=given)
        self._judge_short_lists()

    def test_kernels_of_thousands_of_tensors(self) -> None:
        """Lists are cut into chunks; none may be lost, and each bad tensor counts."""
        self._judge_long_lists()

    def test_kernels_of_a_large_tensor(self) -> None:
        """The last elements of millions."""
        values = data.random((self.large_numel,), torch.float32).to(self.device)
        self._judge_every_method(lambda: [values.clone()])
        self._judge_last_of_many_elements()

    def test_prepare_only_reads(self) -> None:
        """Preparing a list, or taking its layout, writes nothing."""
        tensors = self._build(space.specs(self._gradient_dtypes(), self._layouts()))
        memory = space.Memory(tensors)
        self.kernels.prepare(tensors, self.kernels.layout(tensors))
        memory.check()


def _alike(specs: Sequence[space.Spec]) -> bool:
    return len(specs) > 1 and len({spec.dtype for spec in specs}) == 1


def _name(specs: Sequence[space.Spec]) -> str:
    return specs[0].layout if len(specs) == 1 else f"{len({s.layout for s in specs})} layouts,"
