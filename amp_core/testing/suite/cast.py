"""What `Kernels.cast` must do."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from amp_core.kernels import PORTABLE
from amp_core.testing.fixtures import BackendFixtures
from amp_core.testing.suite import data

_SPECIAL = (
    0.0, 1.0, 5e-324, 1e-310, 1e-45, 1e-40, 1.1754942e-38, 1.1754944e-38, 5.9e-8, 2.98e-8, 2.99e-8, 6.0e-5,
    6.1e-5, 1e-30, 448.0, 464.0, 465.0, 57344.0, 61440.0, 65504.0, 65519.0, 65520.0, 65536.0, 1e20,
    3.3895314e38, 3.3961775e38, 3.4028235e38, 1e300, float("inf"), float("nan"),
    # Halfway between neighbours, to the even below and above, and a hair beyond.
    *(1 + k * 2.0**-n for n in (3, 4, 8, 9, 11, 12, 24) for k in (1, 3, 1 + 2.0**-12, 1 - 2.0**-12)),
)  # fmt: skip


def _special(dtype: torch.dtype) -> Tensor:
    both = [sign * value for value in _SPECIAL for sign in (1.0, -1.0)]
    return torch.tensor(both, dtype=torch.float64).to(dtype)


def _patterns(dtype: torch.dtype, count: int = 1031) -> Tensor:
    """Return every kind of number: random exponents, random mantissas."""
    generator = torch.Generator().manual_seed(11)
    exponent = torch.randint(-45, 39, (count,), generator=generator).double()
    mantissa = torch.randn(count, generator=generator, dtype=torch.float64)
    return (mantissa * 10.0**exponent).to(dtype)


class CastConformance(BackendFixtures):
    """Casts: exact, of every layout and size, into what is given and nowhere else."""

    AREA = "cast"

    def _cast_dtypes(self) -> list[torch.dtype]:
        low = [torch.float8_e4m3fn, torch.float8_e5m2] if self.supports_float8 else []
        return [*self.dtypes(), *low]

    def _pairs(self) -> list[tuple[torch.dtype, torch.dtype]]:
        dtypes = self._cast_dtypes()
        return list(itertools.product(dtypes, dtypes))

    def _held_inputs(self, values: Tensor) -> Tensor:
        """Leave out subnormals where the device flushes them."""
        if self.keeps_subnormals:
            return values
        tiny = torch.finfo(values.dtype).tiny
        wide = values.double().abs()
        return values[(wide == 0) | (wide >= tiny)]

    def test_cast_rounds_every_dtype_pair_to_nearest_even(self) -> None:
        """Ties, overflow to inf, NaN, signed zeros and subnormals: each has one right result."""
        for source, target in self._pairs():
            values = self._held_inputs(_special(source))
            result = self.kernels.cast([values.to(self.device)], target)[0]
            wrong = [
                f"{v!r} -> {r!r}, not {e!r}"
                for v, r, e in zip(values, result.cpu(), data.rounded_once(values, target), strict=True)
                if not data.same_values(r, e)
            ]
            assert not wrong, f"{source} to {target}: {wrong[:5]}"

    def test_cast_is_exact_for_numbers_of_every_size(self) -> None:
        """Numbers over the whole range of exponents."""
        for source, target in self._pairs():
            values = self._held_inputs(_patterns(source))
            result = self.kernels.cast([values.to(self.device)], target)[0]
            expected = data.rounded_once(values, target)
            assert data.same_values(result, expected), f"{source} to {target} rounds wrongly"

    def test_cast_keeps_nan_inf_and_signed_zero(self) -> None:
        """A NaN must stay a NaN whatever its payload; its upper bits may all be zero."""
        payloads = torch.tensor(
            [0x7F800001, 0x7F80FFFF, -0x7FFFFF, 0x7FC00000, 0x7FFFFFFF], dtype=torch.int32
        )
        values = torch.cat([payloads.view(torch.float32), torch.tensor([-0.0, float("inf"), float("-inf")])])
        for target in self.dtypes():
            result = self.kernels.cast([values.to(self.device)], target)[0]
            assert data.same_values(result, values.to(target)), f"float32 to {target}: {result}"

    def test_cast_treats_every_element_of_every_length(self) -> None:
        """A vector tail could be cut or taken from the neighbour."""
        for source, target in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)):
            # Up and down, so that each length has a shorter and a longer one behind it.
            made = [data.random((n,), source, seed=n) for n in (*data.LENGTHS, *reversed(data.LENGTHS))]
            results = self.kernels.cast([t.to(self.device) for t in made], target)
            assert len(results) == len(made)
            for values, result in zip(made, results, strict=True):
                assert data.same_values(result, values.to(target)), f"length {len(values)}, {source}"
            alone = self.kernels.cast([made[-1].to(self.device)], target)[0]
            assert data.same_values(alone, made[-1].to(target))

    def test_cast_of_every_memory_layout(self) -> None:
        """Shape and values are those of the tensor, however it lies in memory."""
        for source, target in ((torch.float32, torch.float16), (torch.bfloat16, torch.float32)):
            for name, tensor in data.layouts(source, self.device):
                result = self.kernels.cast([tensor], target)[0]
                assert data.same_values(result, tensor.cpu().to(target)), name

    def test_cast_keeps_the_order_of_dimensions_in_memory(self) -> None:
        """A weight in channels_last whose cast is not would slow every convolution down."""
        image = data.random((2, 3, 4, 5), torch.float32).to(self.device)
        for tensor in (image, image.to(memory_format=torch.channels_last), image[0, 0].t()):
            result = self.kernels.cast([tensor], torch.bfloat16)[0]
            assert result.stride() == torch.empty_like(tensor).stride(), f"{tensor.stride()} was given"

    def test_cast_of_mixed_lists_keeps_their_order(self) -> None:
        """Grouping by dtype must not reorder or drop the results."""
        made = [data.random((3 + i,), d, i) for i, d in enumerate(self.dtypes() * 2)]
        made.insert(2, torch.empty(0))
        for target in self.dtypes():
            results = self.kernels.cast([t.to(self.device) for t in made], target)
            assert len(results) == len(made)
            for values, result in zip(made, results, strict=True):
                assert data.same_values(result, values.to(target)), f"{values.dtype} to {target}"

    def test_cast_of_no_tensors_is_an_empty_list(self) -> None:
        """A model without parameters."""
        assert self.kernels.cast([], torch.bfloat16) == []
        assert self.kernels.cast([], torch.bfloat16, out=[]) == []

    def test_cast_of_a_large_tensor(self) -> None:
        """The last elements of millions."""
        values = data.random((self.large_numel,), torch.float32)
        result = self.kernels.cast([values.to(self.device)], torch.bfloat16)[0]
        assert data.same_values(result, values.bfloat16())

    def test_cast_writes_into_out_and_nowhere_else(self) -> None:
        """`out` is returned, filled, keeps its dtype, and what lies around it stays."""
        for step in (1, 3):
            for target in self.dtypes():
                values = [data.random((n,), torch.float32, n) for n in (5, 16, 33)]
                outs = [data.guarded(torch.zeros_like(v, dtype=target), self.device, step) for v in values]
                given = [o.tensor for o in outs]
                results = self.kernels.cast([v.to(self.device) for v in values], torch.float32, out=given)
                for result, out, value in zip(results, outs, values, strict=True):
                    assert result is out.tensor, "the tensors of out= must be what is returned"
                    assert data.same_values(out.tensor, value.to(target))
                    assert out.surroundings_untouched(), f"wrote outside of out= ({target}, step {step})"

    def test_cast_into_out_ignores_the_dtype_argument(self) -> None:
        """Where `out` is given its dtypes count; a detour over `dtype` rounds twice."""
        values = data.random((33,), torch.float32)
        for named in (torch.bfloat16, torch.float16):
            out = torch.zeros(33, device=self.device)
            self.kernels.cast([values.to(self.device)], named, out=[out])
            assert data.same_values(out, values), f"float32 into float32 was rounded to {named}"

    def test_cast_of_thousands_of_tensors(self) -> None:
        """Lists are cut into chunks; none may be lost. A tuple is a sequence too."""
        made = [torch.full((3,), float(i % 100)) for i in range(data.MANY)]
        results = self.kernels.cast(tuple(t.to(self.device) for t in made), torch.bfloat16)
        assert len(results) == len(made)
        wrong = [
            i for i, (r, v) in enumerate(zip(results, made, strict=True)) if r.cpu().tolist() != v.tolist()
        ]
        assert not wrong, f"{len(wrong)} of {data.MANY} tensors, the first is number {wrong[0]}"

    def test_cast_into_out_moves_its_version_counter(self) -> None:
        """Autograd and the weight cache would not see the write."""
        out = torch.zeros(5, dtype=torch.bfloat16, device=self.device)
        before = out._version
        self.kernels.cast([torch.ones(5, device=self.device)], torch.bfloat16, out=[out])
        assert out._version > before

    def test_cast_only_reads_its_inputs(self) -> None:
        """Contents, surroundings and version counters of the inputs stay."""
        made = [
            data.guarded(data.random((17,), d), self.device, step) for d in self.dtypes() for step in (1, 2)
        ]
        tensors = [g.tensor for g in made]
        before = data.versions(*tensors)
        for target in self.dtypes():
            self.kernels.cast(tensors, target)
        assert all(g.untouched() for g in made), "cast wrote to what it should only read"
        assert data.versions(*tensors) == before

    def test_cast_returns_new_memory(self) -> None:
        """A result that shares memory with its input, or with a later one, changes under its owner."""
        for target in (torch.float32, torch.bfloat16):
            source = torch.ones(9, device=self.device)
            first = self.kernels.cast([source], target)[0]
            second = self.kernels.cast([source * 3], target)[0]
            source.fill_(7.0)
            assert first.float().cpu().tolist() == [1.0] * 9, (
                "the result changed with its input or a later call"
            )
            assert second.float().cpu().tolist() == [3.0] * 9

    def test_cast_is_outside_of_autograd(self) -> None:
        """Casting parameters needs no graph, and writing into leaf tensors no permission."""
        leaf = torch.ones(3, device=self.device, requires_grad=True)
        out = torch.zeros(3, dtype=torch.bfloat16, device=self.device, requires_grad=True)
        result = self.kernels.cast([leaf], torch.bfloat16)[0]
        assert result.grad_fn is None
        assert not result.requires_grad, "the cast of a parameter is no parameter"
        written = self.kernels.cast([leaf], torch.bfloat16, out=[out])[0]
        assert written is out
        assert out.grad_fn is None

    def test_cast_serves_inference_mode(self) -> None:
        """Weights that were made or are cast in it have no version counter."""
        with torch.inference_mode():
            values = data.random((17,), torch.float32)
            made = values.to(self.device)
            out = torch.zeros(17, dtype=torch.bfloat16, device=self.device)
            assert data.same_values(self.kernels.cast([made], torch.bfloat16)[0], values.bfloat16())
            self.kernels.cast([made], torch.bfloat16, out=[out])
            assert data.same_values(out, values.bfloat16())
        assert data.same_values(self.kernels.cast([made], torch.bfloat16)[0], values.bfloat16())

    def test_cast_refuses_lists_of_different_lengths(self) -> None:
        """A missing target must not pass silently."""
        with pytest.raises((ValueError, RuntimeError)):
            self.kernels.cast([torch.ones(2, device=self.device)] * 2, torch.bfloat16, out=[])

    def test_cast_does_not_wait_for_the_device(self) -> None:
        """The host must not read a value."""
        tensors = [torch.ones(5, device=self.device), torch.ones((), device=self.device)]
        self.kernels.cast(tensors, torch.bfloat16)
        with data.waits(self.device) as seen:
            self.kernels.cast(tensors, torch.bfloat16)
        assert seen == []

    def test_cast_agrees_with_the_portable_kernel(self) -> None:
        """Bit for bit: a cast has one right result."""
        tensors = [data.random((n,), torch.float32, n).to(self.device) for n in data.LENGTHS]
        for target in self.dtypes():
            mine, theirs = self.kernels.cast(tensors, target), PORTABLE.cast(tensors, target)
            assert all(data.same_values(a, b) for a, b in zip(mine, theirs, strict=True)), str(target)
