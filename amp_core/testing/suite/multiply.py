"""What `Kernels.multiply_` must do."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from amp_core.kernels import PORTABLE
from amp_core.testing.fixtures import BackendFixtures
from amp_core.testing.suite import data
from amp_core.testing.suite.grad_stats import BAD

# 7, 13 and 14: the reciprocals of their reciprocals are other float32 numbers.
FACTORS = (1.0, 0.5, 1 / 65536, 1 / 3, 3.0, 0.0, -1.0, 1e-9, 7.0, 13 / 1024)


def product(values: Tensor, factor: float) -> Tensor:
    """Return the float32 product (float64 for float64), rounded once to the dtype of `values`."""
    one = torch.tensor(factor, dtype=torch.float32)
    wide = torch.promote_types(values.dtype, torch.float32)
    return (values.to(wide) * one.to(wide)).to(values.dtype)


class MultiplyConformance(BackendFixtures):
    """One multiplication in place, and the flag of what is not finite before or after it."""

    AREA = "multiply"

    def _scaled(self, values: list[Tensor], factor: float) -> tuple[list[Tensor], float]:
        grads = [v.clone().to(self.device) for v in values]
        flag = data.scalar(0.0, self.device)
        self.kernels.multiply_(grads, data.scalar(factor, self.device), flag)
        return [g.cpu() for g in grads], float(flag)

    def _assert_product(self, result: Tensor, values: Tensor, factor: float, what: str = "") -> None:
        expected = product(values, factor)
        if self.product_ulps and result.is_floating_point():
            step = torch.finfo(result.dtype).eps * self.product_ulps
            torch.testing.assert_close(result, expected, rtol=step, atol=0.0, equal_nan=True)
            return
        same = torch.equal(result, expected) or data.same_values(result, expected)
        assert same, f"{what} {values.dtype} times {factor}: {result} is not {expected}"

    def test_multiply_works_in_float32_or_wider(self) -> None:
        """A factor rounded to float16 first, or a product rounded twice, is off."""
        for dtype in self.dtypes():
            values = [data.random((n,), dtype, n) for n in data.LENGTHS]
            for factor in FACTORS:
                results, flag = self._scaled(values, factor)
                for result, value in zip(results, values, strict=True):
                    self._assert_product(result, value, factor, f"length {len(value)},")
                assert flag == 0.0

    def test_multiply_of_every_memory_layout(self) -> None:
        """Each element once, whatever the strides."""
        for dtype in self.dtypes():
            for name, tensor in data.layouts(dtype, self.device):
                before = tensor.cpu().clone()
                self.kernels.multiply_(
                    [tensor], data.scalar(0.25, self.device), data.scalar(0.0, self.device)
                )
                self._assert_product(tensor.cpu(), before, 0.25, name)

    def test_multiply_does_not_touch_what_lies_around_a_view(self) -> None:
        """The neighbours of a view, here inf, are neither written nor flagged."""
        for dtype in self.dtypes():
            for step in (1, 2):
                made = [data.guarded(data.random((n,), dtype), self.device, step) for n in data.LENGTHS]
                flag = data.scalar(0.0, self.device)
                self.kernels.multiply_([g.tensor for g in made], data.scalar(0.5, self.device), flag)
                assert all(g.surroundings_untouched() for g in made), f"wrote around a view of {dtype}"
                assert float(flag) == 0.0, f"read around a view of {dtype}"

    def test_multiply_flags_a_bad_element_at_every_position(self) -> None:
        """First, last, and every place in a vector and its tail."""
        for dtype in self.dtypes():
            for length in (1, 2, 7, 16, 17, 33):
                for position in range(length):
                    values = torch.ones(length, dtype=dtype)
                    values[position] = BAD[position % 3]
                    _, flag = self._scaled([values], 0.5)
                    assert flag == 1.0, f"{values[position]} at {position} of {length}, {dtype}"

    def test_multiply_flags_a_bad_element_in_every_memory_layout(self) -> None:
        """No dimensions, strides, odd offsets."""
        for dtype in self.dtypes():
            for name, tensor in data.layouts(dtype, self.device):
                if tensor.numel():
                    tensor[data.index(tensor, -1)] = math.nan
                    flag = data.scalar(0.0, self.device)
                    self.kernels.multiply_((tensor,), data.scalar(0.5, self.device), flag)
                    assert float(flag) == 1.0, f"{name}, {dtype}"

    def test_multiply_of_thousands_of_tensors(self) -> None:
        """Lists are cut into chunks; none may be lost, and the last one's flag counts."""
        values = [torch.ones(3) for _ in range(data.MANY)]
        results, flag = self._scaled(values, 0.5)
        wrong = [i for i, r in enumerate(results) if r.tolist() != [0.5] * 3]
        assert not wrong, f"{len(wrong)} of {data.MANY} tensors, the first is number {wrong[0]}"
        assert flag == 0.0
        values[-1][2] = math.inf
        assert self._scaled(values, 0.5)[1] == 1.0

    def test_multiply_flags_a_product_that_overflows(self) -> None:
        """Finite before, not after: at every position of a vector, and in the dtype of the gradient."""
        for dtype in self.dtypes():
            for length in (1, 8, 17):
                for position in range(length):
                    values = torch.ones(length, dtype=dtype)
                    values[position] = torch.finfo(dtype).max
                    results, flag = self._scaled([values], 4.0)
                    assert flag == 1.0, f"{dtype} at {position} of {length}"
                    assert math.isinf(float(results[0][position]))

    def test_multiply_flags_what_a_zero_or_bad_factor_makes(self) -> None:
        """Such as inf times 0, 1 times inf, 1 times NaN."""
        for value, factor in ((math.inf, 0.0), (math.nan, 0.0), (1.0, math.inf), (1.0, math.nan)):
            _, flag = self._scaled([torch.tensor([1.0, value])], factor)
            assert flag == 1.0, f"{value} times {factor}"

    def test_multiply_does_not_flag_what_is_finite(self) -> None:
        """Large, small, signed zero, underflow, empty."""
        info = torch.finfo(torch.float32)
        values = torch.tensor([info.max, info.min, info.tiny, 1e20, -0.0, 0.0, 1e-40])
        for factor in (1.0, 0.5, 1e-30, 0.0):
            assert self._scaled([values, torch.empty(0)], factor)[1] == 0.0, f"factor {factor}"
        if self.supports_float64:
            wide = torch.tensor([1e200, -1e300, 1e-300], dtype=torch.float64)
            assert self._scaled([wide], 0.5)[1] == 0.0, "float64 holds what float32 does not"

    def test_multiply_found_inf_is_zero_or_one(self) -> None:
        """Many bad elements and dtypes: the flag is no count."""
        values = [torch.full((n,), math.inf, dtype=d) for n in (1, 9) for d in self.dtypes()]
        assert self._scaled(values, 0.5)[1] == 1.0

    def test_multiply_leaves_a_set_flag_set(self) -> None:
        """An earlier call's finding must outlive a clean one, and count no further."""
        for values in ([torch.ones(3)], [], [torch.empty(0)], [torch.tensor([math.nan])]):
            flag = data.scalar(1.0, self.device)
            grads = [v.clone().to(self.device) for v in values]
            self.kernels.multiply_(grads, data.scalar(0.5, self.device), flag)
            assert float(flag) == 1.0
            for grad, value in zip(grads, values, strict=True):
                self._assert_product(grad.cpu(), value, 0.5, "with the flag set,")

    def test_multiply_keeps_the_flag_over_dtype_groups(self) -> None:
        """A clean group after a bad one must not clear the flag."""
        dtypes = self.dtypes() * 2
        for bad in range(len(dtypes)):
            values = [torch.ones(5, dtype=d) for d in dtypes]
            values[bad][4] = math.inf
            results, flag = self._scaled(values, 0.5)
            assert flag == 1.0, f"lost the inf in tensor {bad} ({dtypes[bad]})"
            for i, result in enumerate(results):
                self._assert_product(result, values[i], 0.5, f"tensor {i}")

    def test_multiply_works_although_something_is_bad(self) -> None:
        """The gradients are scaled all the same, and once."""
        values = [torch.tensor([2.0, math.inf, 4.0]), torch.tensor([8.0])]
        results, _ = self._scaled(values, 0.5)
        assert results[0].tolist() == [1.0, math.inf, 2.0]
        assert results[1].tolist() == [4.0]

    def test_multiply_keeps_what_is_not_finite(self) -> None:
        """Whoever looks at the gradients of a skipped step must find what made it so."""
        for dtype in self.dtypes():
            values = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 0.0, 1.0] * 5, dtype=dtype)
            results, _ = self._scaled([values], 0.5)
            self._assert_product(results[0], values, 0.5)
            assert data.same_values(results[0], values * 0.5), f"{dtype}: {results[0]}"

    def test_multiply_keeps_subnormals(self) -> None:
        """The smallest gradients are those that a loss scale is there for."""
        self.requires("keeps_subnormals")
        for dtype in self.dtypes():
            tiny = torch.finfo(dtype).smallest_normal
            values = torch.tensor([tiny, -tiny, tiny / 2, tiny / 4, 0.0] * 5, dtype=dtype)
            for factor in (0.5, 1.0, 2.0):
                results, _ = self._scaled([values], factor)
                self._assert_product(results[0], values, factor)

    def test_multiply_with_and_without_a_flag(self) -> None:
        """``found_inf=None`` asks for the product alone; one element may have one dimension."""
        grad = torch.full((3,), 4.0, device=self.device)
        self.kernels.multiply_([grad], data.scalar(0.5, self.device))
        assert grad.cpu().tolist() == [2.0] * 3
        flag = data.scalar(0.0, self.device, (1,))
        grad[1] = math.inf
        self.kernels.multiply_([grad], data.scalar(0.5, self.device, (1,)), flag)
        assert (grad.cpu().tolist(), flag.cpu().tolist()) == ([1.0, math.inf, 1.0], [1.0])

    def test_multiply_of_no_tensors(self) -> None:
        """Nothing happens, nothing is raised."""
        flag = data.scalar(0.0, self.device)
        self.kernels.multiply_([], data.scalar(math.inf, self.device), flag)
        assert float(flag) == 0.0

    def test_multiply_of_a_large_tensor(self) -> None:
        """One bad element among millions, and the last element's product."""
        values = torch.ones(self.large_numel)
        for position in (0, self.large_numel - 1):
            values[position] = math.nan
            results, flag = self._scaled([values], 0.5)
            values[position] = 1.0
            assert flag == 1.0, f"at {position}"
        results, flag = self._scaled([values], 0.5)
        assert flag == 0.0
        assert bool((results[0] == 0.5).all())

    def test_multiply_of_complex_gradients(self) -> None:
        """Both parts are scaled and looked at."""
        self.requires("supports_complex")
        values = data.random((17,), torch.complex64)
        results, flag = self._scaled([values], 0.5)
        assert torch.equal(results[0], values * 0.5)
        assert flag == 0.0
        values[16] = torch.tensor(complex(1.0, math.inf))
        assert self._scaled([values], 0.5)[1] == 1.0

    def test_multiply_writes_the_gradients_and_the_flag_alone(self) -> None:
        """The factor is read; versions of what is written move, so that autograd sees it."""
        grads = [torch.ones(5, dtype=d, device=self.device) for d in self.dtypes()]
        factor, flag = data.scalar(0.5, self.device), data.scalar(0.0, self.device)
        before, factor_before = data.versions(*grads), factor._version
        self.kernels.multiply_(grads, factor, flag)
        moved = [now > then for now, then in zip(data.versions(*grads), before, strict=True)]
        assert all(moved), "multiply_ wrote without moving the version counter"
        assert float(factor) == 0.5
        assert factor._version == factor_before, "multiply_ moved the version counter of the factor"

    def test_multiply_moves_the_version_of_the_flag_that_it_sets(self) -> None:
        """A flag that autograd or a cache holds must not change unseen."""
        flag = data.scalar(0.0, self.device)
        before = flag._version
        self.kernels.multiply_(
            [torch.tensor([math.inf]).to(self.device)], data.scalar(1.0, self.device), flag
        )
        assert flag._version > before

    def test_multiply_is_outside_of_autograd(self) -> None:
        """Gradients are leaves that may require a gradient themselves."""
        grad = torch.ones(3, device=self.device, requires_grad=True)
        self.kernels.multiply_([grad], data.scalar(0.5, self.device), data.scalar(0.0, self.device))
        assert grad.detach().cpu().tolist() == [0.5] * 3
        assert grad.grad_fn is None

    def test_multiply_does_not_wait_for_the_device(self) -> None:
        """The host must not read the factor, the flag, or a gradient."""
        grads = [torch.full((5,), math.inf, dtype=d).to(self.device) for d in self.dtypes()]
        factor, flag = data.scalar(0.5, self.device), data.scalar(0.0, self.device)
        self.kernels.multiply_(grads, factor, flag)
        with data.waits(self.device) as seen:
            self.kernels.multiply_(grads, factor, flag)
            self.kernels.multiply_(grads, factor)
        assert seen == []

    def test_multiply_agrees_with_the_portable_kernel(self) -> None:
        """To the tolerance of a product (`product_ulps`, at least one step of the dtype)."""
        mine = [data.random((n,), d, n).to(self.device) for n in data.LENGTHS for d in self.dtypes()]
        theirs = [t.clone() for t in mine]
        factor = data.scalar(1 / 1024, self.device)
        self.kernels.multiply_(mine, factor, data.scalar(0.0, self.device))
        PORTABLE.multiply_(theirs, factor, data.scalar(0.0, self.device))
        for one, other in zip(mine, theirs, strict=True):
            step = torch.finfo(one.dtype).eps * max(1, self.product_ulps)
            torch.testing.assert_close(one.cpu(), other.cpu(), rtol=step, atol=0.0)
