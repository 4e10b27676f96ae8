"""What a backend author tells the kit: the device type, its capabilities and its accuracy.

Override what differs for your device; each property documents its default. No property makes a wrong result
pass: they only exclude inputs that the device does not support.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, ClassVar

import pytest
import torch

from amp_core._torch.autocast import privateuse1_name
from amp_core._torch.dispatcher import autograd_key
from amp_core._torch.op_kernels import has_dispatch_key
from amp_core.errors import AmpError, BackendError
from amp_core.kernels import Kernels
from amp_core.plugin import Backend, get_backend
from amp_core.plugin.default_manager import manager


class BackendFixtures:
    """Properties to override; `device_type` is required."""

    device_type: str = ""
    """The ``type`` of a ``torch.device``, such as ``"npu"``. Must be set."""

    known_failures: Mapping[str, str] = MappingProxyType({})
    """Map the name of a check to the reason why it currently fails.

    The run fails if a check listed here passes, so that fixes are noticed, or if no check has the name.
    """

    policy_departures: Mapping[str, str] = MappingProxyType({})
    """Map the full name of an op (``aten::mm.default``) to the reason why the device departs from torch.

    Default: none. Every op with a rule in torch must have the same rule unless listed here.
    """

    norm_rtol: float = 1e-5
    """Relative tolerance of `Kernels.grad_stats` against float64. The default allows float32 sums."""

    product_ulps: int = 0
    """Allowed difference between `Kernels.multiply_` and the rounded float32 product, in ulps of the dtype.

    Default: 0, because one multiplication and one rounding have exactly one correct result.
    """

    large_numel: int = 2_000_003
    """Size of the tensor in which one bad element must be found. Default: a large odd number."""

    many_tensors: int = 5000
    """Length of the list in which one bad tensor must be found.

    Default: more tensors than fit into the argument of a launch, or into a page of pointers. A device that
    takes milliseconds for each op, such as a remote one, can name fewer.
    """

    thorough: bool = False
    """Whether to check every combination instead of a sample. Set by ``--thorough``."""

    AREA: ClassVar[str] = ""

    # The objects under test.

    @property
    def backend(self) -> Backend:
        """The backend under test. Default: the installed one of `device_type`."""
        return get_backend(self.device_type)

    @property
    def device(self) -> torch.device:
        """Where tensors are created. Default: the current device of `device_type`."""
        try:
            return torch.device(self.device_type)
        except RuntimeError as error:
            reason = self.backend.availability().reason
            raise AmpError(f"torch knows no device type {self.device_type!r}: {reason}.") from error

    @property
    def kernels(self) -> Kernels:
        """The kernels under test. Default: the backend's."""
        return self.backend.kernels()

    # Supported dtypes and features.

    @property
    def supports_float16(self) -> bool:
        """Whether the device supports float16. Default: detected."""
        return _can_hold(self.device_type, torch.float16)

    @property
    def supports_bfloat16(self) -> bool:
        """Whether the device supports bfloat16, which stored weights need. Default: detected."""
        return _can_hold(self.device_type, torch.bfloat16)

    @property
    def supports_float64(self) -> bool:
        """Whether the device supports float64. Default: detected."""
        return _can_hold(self.device_type, torch.float64)

    @property
    def supports_complex(self) -> bool:
        """Whether the device supports complex64. Default: detected."""
        return _can_hold(self.device_type, torch.complex64)

    @property
    def supports_float8(self) -> bool:
        """Whether to check casts to and from 8-bit floats. Default: detected."""
        return _can_hold(self.device_type, torch.float8_e4m3fn) and _can_hold(
            self.device_type, torch.float8_e5m2
        )

    @property
    def supports_bit_views(self) -> bool:
        """Whether ``Tensor.view(dtype)`` works on the device: formats and stored weights need it.

        Default: yes.
        """
        return True

    @property
    def supports_lazy_signs(self) -> bool:
        """Whether the device takes lazily negated and conjugated tensors.

        Default: yes, except for PrivateUse1, where trying can crash the process.
        """
        return self.default_dtype_is_torchs

    @property
    def keeps_subnormals(self) -> bool:
        """Whether the device computes with subnormal numbers instead of flushing them. Default: yes."""
        return True

    @property
    def supports_compile(self) -> bool:
        """Whether ``torch.compile(backend="aot_eager")`` works on the device.

        Default: detected without AMP; False for PrivateUse1, whose op policy is in Python.
        """
        return self.default_dtype_is_torchs and _graphs_work(self.device_type, "compile")

    @property
    def supports_export(self) -> bool:
        """Whether ``torch.export`` works on the device. Default: detected without AMP."""
        return _graphs_work(self.device_type, "export")

    @property
    def observes_rules(self) -> bool:
        """Whether ops can be replaced on the device's Autograd key, which makes all rules observable.

        Default: True if the device has its own Autograd key in torch.
        """
        return has_dispatch_key(autograd_key(self.device_type))

    @property
    def default_dtype_is_torchs(self) -> bool:
        """Whether the default dtype must be torch's. Default: yes, except for PrivateUse1."""
        return self.device_type != privateuse1_name()

    # Simulated events.

    @contextmanager
    def device_taken_away(self) -> Iterator[None]:
        """Make the device look absent. Default: ``torch.<device_type>.is_available`` returns False.

        Override it if `Backend.availability` checks something else; skip if the device cannot be absent.
        """
        module = getattr(torch, self.device_type, None)
        if self.device_type == "cpu" or not hasattr(module, "is_available"):
            pytest.skip(f"{self.device_type} cannot be made to look absent; override device_taken_away")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "is_available", lambda: False)
            yield

    # Not to be overridden.

    def requires(self, capability: str) -> None:
        """Skip the check unless the property `capability` is true."""
        if not getattr(self, capability):
            pytest.skip(f"the fixtures of {self.device_type} declare {capability} = False")

    def dtypes(self) -> list[torch.dtype]:
        """Return the real gradient dtypes that the device supports."""
        supported = {
            torch.float32: True,
            torch.float16: self.supports_float16,
            torch.bfloat16: self.supports_bfloat16,
            torch.float64: self.supports_float64,
        }
        return [dtype for dtype, there in supported.items() if there]

    @pytest.fixture(autouse=True)
    def _serve_the_backend(self, request: pytest.FixtureRequest) -> Iterator[None]:
        """Put `backend` into the registry while a check runs, and mark the known failures."""
        item: Any = request.node
        reason = self.known_failures.get(item.originalname.removeprefix("test_"))
        if reason is not None:
            request.applymarker(pytest.mark.xfail(reason=reason, strict=True))
        with serving(self.backend):
            yield


@contextmanager
def serving(backend: Backend) -> Iterator[None]:
    """Serve the device type with `backend` inside the block."""
    before = None
    with contextlib.suppress(BackendError):  # loaded inside the block, it would find its place taken
        before = get_backend(backend.device_type)
    if before is backend:
        yield
        return
    with manager().registry.serving(backend):
        yield


@functools.cache
def _can_hold(device_type: str, dtype: torch.dtype) -> bool:
    try:
        ones = torch.ones(2, dtype=torch.float32, device="cpu").to(dtype).to(device_type)
        return dtype.is_complex or bool((ones.cpu().float() == 1).all())
    except (RuntimeError, TypeError, NotImplementedError):
        return False


@functools.cache
def _graphs_work(device_type: str, how: str) -> bool:
    class Product(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ x

    try:
        x = torch.ones(2, 2, device=device_type)
        if how == "compile":  # the forward alone, which is what the kit compiles
            torch.compile(Product().forward, backend="aot_eager", fullgraph=True)(x)
        else:
            torch.export.export(Product(), (x,)).module()(x)
    except Exception:  # whatever torch raises for a device that it cannot trace
        return False
    return True
