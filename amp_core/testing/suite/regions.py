"""What `autocast`, `custom_fwd` and `custom_bwd` do on the backend's device."""

from __future__ import annotations

import itertools
import threading
import warnings
from typing import Any

import pytest
import torch

from amp_core._torch.autocast import torch_autocast
from amp_core.errors import PolicyError
from amp_core.policy import OpPolicy
from amp_core.policy.native_rules import native_rules
from amp_core.policy.rules import FP32, LOWER_PRECISION_FP, NATIVE
from amp_core.regions.custom_functions import custom_bwd, custom_fwd
from amp_core.regions.region import autocast
from amp_core.testing.fixtures import BackendFixtures
from amp_core.testing.observe import consistent
from amp_core.testing.suite import data


class RegionConformance(BackendFixtures):
    """Regions: dtypes, promotion, nesting, threads, exceptions, graphs."""

    AREA = "regions"

    def _region(self, **options: Any) -> autocast:
        return autocast(self.device_type, **options)

    def _ones(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.ones(4, 4, dtype=dtype, device=self.device)

    def _policy(self) -> OpPolicy:
        return self.backend.op_policy()

    def _assert_product(self, dtype: torch.dtype, where: str) -> None:
        _assert_dtype(self._ones() @ self._ones(), dtype, f"a product {where}")

    def _assert_off(self, why: str) -> None:
        assert not torch.is_autocast_enabled(self.device_type), f"the region is still on after {why}"

    def test_region_computes_in_the_default_dtype(self) -> None:
        """A region that names no dtype takes the backend's."""
        with self._region():
            result = self._ones() @ self._ones()
        _assert_fours(result, self.backend.default_dtype(), "ones @ ones")

    def test_region_computes_in_each_supported_dtype(self) -> None:
        """Matrix products in the dtype of the region, right on small whole numbers."""
        for dtype in self.backend.supported_dtypes():
            with self._region(dtype=dtype):
                product = self._ones() @ self._ones()
                linear = torch.nn.functional.linear(self._ones(), self._ones())
            _assert_fours(product, dtype, "ones @ ones")
            _assert_fours(linear, dtype, "linear(ones, ones)")

    def test_region_of_torch_can_be_built(self) -> None:
        """``torch.utils.checkpoint`` and ``torch.compile`` build one; torch's error says what is missing."""
        torch_autocast(self.device_type, enabled=False)

    def test_region_refuses_an_unsupported_dtype_as_the_backend_says(self) -> None:
        """A warning and a disabled region, or an error; never another dtype."""
        refusal = self.backend.autocast_refusal(torch.float64)
        if refusal is None and data.torch_admits(self.device_type, torch.float64):
            with self._region(dtype=torch.float64):  # as on CUDA
                found = torch.get_autocast_dtype(self.device_type)
                assert found is torch.float64, f"the region of float64 is one of {found}"
            return
        assert refusal is not None, "float64 is not supported, yet admitted"
        if refusal.error:
            with pytest.raises(RuntimeError):
                self._region(dtype=torch.float64)
            return
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with self._region(dtype=torch.float64):
                self._assert_product(torch.float32, "in a region of a refused dtype")
        said = [data.wording(str(warning.message)) for warning in caught]
        assert any(data.wording(refusal.message) in text for text in said), f"{refusal.message!r}: {said}"

    def test_region_follows_the_rules_for_common_ops(self) -> None:
        """What the policy says of an op is what comes out."""
        calls = {
            "aten::exp.default": lambda x: x.exp(),
            "aten::log.default": lambda x: x.log(),
            "aten::mm.default": lambda x: x.mm(x),
            "aten::addmm.default": lambda x: torch.addmm(x, x, x),
            "aten::bmm.default": lambda x: x[None].bmm(x[None]),
            "aten::mse_loss.default": lambda x: torch.nn.functional.mse_loss(x, x),
            "aten::pow.Tensor_Scalar": lambda x: x.pow(2),
            "aten::softmax.int": lambda x: x.softmax(-1),
            "aten::sum.default": lambda x: x.sum(),
            "aten::relu.default": lambda x: x.relu(),
        }
        low = self.backend.default_dtype()
        expected = {"lower_precision_fp": low, "fp32": torch.float32, "fp32_set_opt_dtype": torch.float32}
        for dtype in (low, torch.float32):
            for op, call in calls.items():
                with self._region():
                    result = call(self._ones(dtype))  # type: ignore[no-untyped-call]
                rule = self._policy().rule(op)
                assert result.dtype is expected.get(rule, dtype), f"{op} ({rule}) of {dtype}"

    def test_region_follows_every_rule(self) -> None:
        """An op that the policy names runs in another dtype than it says, or not at all."""
        self.requires("observes_rules")
        low = self.backend.default_dtype()

        def make(dtype: torch.dtype) -> torch.Tensor:
            return torch.ones(2, device=self.device).to(dtype)

        with self._region():
            ruled = [(op, rule) for op, rule in self._policy() if rule != NATIVE]
            wrong = [consistent(op, rule, self.device_type, make, low) for op, rule in ruled]
            others = [op for op, rule in self._policy() if rule == NATIVE and self.backend.op_lists]
            forgotten = {
                op: rule
                for op, rule in itertools.product(others, (FP32, LOWER_PRECISION_FP))
                if not consistent(op, rule, self.device_type, make, low)
            }
        wrong = [text for text in wrong if text]
        assert not wrong, "; ".join(wrong)
        assert not forgotten, f"op_lists lacks ops that the autocast kernels in C++ cast: {forgotten}"

    def test_region_promotes_mixed_arguments(self) -> None:
        """Ops with a promotion rule take the widest of their arguments."""
        low = self.backend.default_dtype()
        for op, call in (("aten::cat.default", torch.cat), ("aten::stack.default", torch.stack)):
            if self._policy().rule(op) in ("promote", "promote_types"):
                for pair, expected in (((low, torch.float32), torch.float32), ((low, low), low)):
                    with self._region():
                        _assert_dtype(call([self._ones(d) for d in pair]), expected, f"{op} of {pair}")

    def test_region_leaves_integers_and_float64_alone(self) -> None:
        """Only 16- and 32-bit floats are cast."""
        with self._region():
            _assert_dtype(self._ones(torch.int64) + 1, torch.int64, "a sum of int64")
            if self.supports_float64:
                wide = self._ones(torch.float64)
                _assert_dtype(wide @ wide, torch.float64, "a product of float64")

    def test_regions_nest_and_restore(self) -> None:
        """An inner region, enabled or not, ends where it ends."""
        low = self.backend.default_dtype()
        with self._region():
            with self._region(enabled=False):
                self._assert_product(torch.float32, "in a disabled region")
                with self._region():
                    self._assert_product(low, "in a region inside a disabled one")
                self._assert_product(torch.float32, "in a disabled region after an inner one")
            self._assert_product(low, "after an inner region")
        self._assert_product(torch.float32, "after the region")

    def test_region_ends_with_an_exception(self) -> None:
        """What follows an error is not in the region."""
        before = self._state()
        with pytest.raises(KeyError), self._region():
            raise KeyError("on purpose")
        now = self._state()
        assert now == before, f"an exception left the region on (enabled, dtype, cache): {before} to {now}"

    def test_region_belongs_to_its_thread(self) -> None:
        """Other threads start without it, and theirs end with them."""
        seen: list[torch.dtype] = []

        def other() -> None:
            seen.append((self._ones() @ self._ones()).dtype)
            with self._region():
                seen.append((self._ones() @ self._ones()).dtype)

        with self._region():
            _run_thread(other)
        right = [torch.float32, self.backend.default_dtype()]
        assert seen == right, f"products of another thread, outside and in a region of its own: {seen}"
        _run_thread(lambda: self._region().__enter__())
        self._assert_off("another thread ended in it")

    def test_region_has_a_backward(self) -> None:
        """Gradients have the dtype of the parameters, and are right."""
        weight = self._ones().requires_grad_()
        with self._region():
            loss = (self._ones() @ weight).float().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        assert weight.grad is not None, "a product in a region has no gradient"
        _assert_fours(weight.grad, torch.float32, "the gradient of a product")

    def test_region_as_a_decorator(self) -> None:
        """The body is in the region, the caller is not."""

        @self._region()
        def product() -> torch.Tensor:
            return self._ones() @ self._ones()

        _assert_dtype(product(), self.backend.default_dtype(), "a product of a decorated function")
        self._assert_off("the decorated function returned")

    def test_region_compiles(self) -> None:
        """The traced program has the dtypes of the eager one."""
        self.requires("supports_compile")

        region = self._region()

        def run(x: torch.Tensor) -> torch.Tensor:
            with region:
                return x @ x

        torch.compiler.reset()
        compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
        _assert_dtype(compiled(self._ones()), self.backend.default_dtype(), "a product in a compiled region")

    def test_region_exports(self) -> None:
        """An exported program keeps the region, or a policy that it cannot keep is refused."""
        self.requires("supports_export")
        device_type = self.device_type

        class Product(torch.nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                with autocast(device_type):
                    return x @ x

        if OpPolicy.default(self.device_type) != self._policy() or not native_rules(self.device_type):
            before = self._state()
            with pytest.raises(PolicyError):
                torch.export.export(Product(), (self._ones(),))
            assert self._state() == before, "the refusal left the region on"
            return
        program = torch.export.export(Product(), (self._ones(),))
        exported = program.module()(self._ones())
        _assert_dtype(exported, self.backend.default_dtype(), "a product in an exported region")

    def _state(self) -> tuple[bool, torch.dtype, bool]:
        return (
            torch.is_autocast_enabled(self.device_type),
            torch.get_autocast_dtype(self.device_type),
            torch.is_autocast_cache_enabled(),
        )


class FunctionConformance(BackendFixtures):
    """Autograd functions with `custom_fwd` and `custom_bwd`."""

    AREA = "functions"

    def _product(self, cast_inputs: torch.dtype | None) -> tuple[Any, list[torch.dtype]]:
        seen: list[torch.dtype] = []

        class Product(torch.autograd.Function):
            @staticmethod
            @custom_fwd(device_type=self.device_type, cast_inputs=cast_inputs)
            def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
                ctx.save_for_backward(a, b)
                seen.append((a @ b).dtype)
                return a @ b

            @staticmethod
            @custom_bwd(device_type=self.device_type)
            def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
                a, b = ctx.saved_tensors
                seen.append((a.float() @ b.float()).dtype)
                return grad @ b.t().to(grad.dtype), a.t().to(grad.dtype) @ grad

        return Product.apply, seen

    def _run(self, cast_inputs: torch.dtype | None) -> list[torch.dtype]:
        apply, seen = self._product(cast_inputs)
        x = torch.ones(3, 3, device=self.device, requires_grad=True)
        with autocast(self.device_type):
            result = apply(x, torch.ones(3, 3, device=self.device))
        result.float().sum().backward()
        assert x.grad is not None, "an autograd function in a region has no gradient"
        found = x.grad.cpu().tolist()
        assert found == [[3.0] * 3] * 3, f"the gradient of an autograd function is {found}"
        return seen

    def test_custom_fwd_casts_its_inputs_and_ends_the_region(self) -> None:
        """``cast_inputs=float32``: forward and backward run in float32, without autocast."""
        found = self._run(torch.float32)
        assert found == [torch.float32] * 2, f"products of forward and backward are {found}"

    def test_custom_bwd_runs_as_the_forward_did(self) -> None:
        """Without ``cast_inputs`` both run under autocast."""
        low = self.backend.default_dtype()
        found = self._run(None)
        assert found == [low, low], f"products of forward and backward are {found}, not {low}"


def _assert_dtype(result: torch.Tensor, dtype: torch.dtype, what: str) -> None:
    assert result.dtype is dtype, f"{what} is {result.dtype}, not {dtype}"


def _assert_fours(result: torch.Tensor, dtype: torch.dtype, what: str) -> None:
    _assert_dtype(result, dtype, what)
    values = result.float().cpu().tolist()
    assert values == [[4.0] * 4] * 4, f"{what} in {dtype} is {values}, not 4 everywhere"


def _run_thread(target: Any) -> None:
    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
