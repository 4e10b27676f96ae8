"""What a backend author tells the kit: the device type, its capabilities and its accuracy.

Override what differs for your device; each attribute documents its default. None makes a wrong result
pass: they only exclude inputs that the device does not support.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
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


class _Found:
    """The value of a capability, found for the fixtures at hand."""

    def __init__(self, find: Callable[[Any], bool]) -> None:
        self._find = find

    def __get__(self, fixtures: BackendFixtures | None, owner: object = None) -> Any:
        return self if fixtures is None else self._find(fixtures)


def _found_by(find: Callable[[Any], bool]) -> Any:
    """Return the default of an attribute: to type checkers, a subclass cannot set what was a property."""
    return _Found(find)


def _holds(*dtypes: torch.dtype) -> Any:
    return _found_by(lambda fixtures: all(_can_hold(fixtures.device_type, each) for each in dtypes))


class BackendFixtures:
    """Attributes and properties to override; `device_type` is required."""

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

    # Supported dtypes and features: a class says `supports_float64 = False`, and so on.

    supports_float16: bool = _holds(torch.float16)
    """Whether the device supports float16. Default: detected."""

    supports_bfloat16: bool = _holds(torch.bfloat16)
    """Whether the device supports bfloat16, which stored weights need. Default: detected."""

    supports_float64: bool = _holds(torch.float64)
    """Whether the device supports float64. Default: detected."""

    supports_complex: bool = _holds(torch.complex64)
    """Whether the device supports complex64. Default: detected."""

    supports_float8: bool = _holds(torch.float8_e4m3fn, torch.float8_e5m2)
    """Whether to check casts to and from 8-bit floats. Default: detected."""

    supports_bit_views: bool = True
    """Whether ``Tensor.view(dtype)`` works on the device: formats and stored weights need it."""

    supports_lazy_signs: bool = _found_by(lambda self: self.default_dtype_is_torchs)
    """Whether the device takes lazily negated and conjugated tensors.

    Default: yes, except for PrivateUse1, where trying can crash the process.
    """

    keeps_subnormals: bool = True
    """Whether the device computes with subnormal numbers instead of flushing them."""

    supports_compile: bool = _found_by(
        lambda self: self.default_dtype_is_torchs and _graphs_work(self.device_type, "compile")
    )
    """Whether ``torch.compile(backend="aot_eager")`` works on the device.

    Default: detected without AMP; False for PrivateUse1, whose op policy is in Python.
    """

    supports_export: bool = _found_by(lambda self: _graphs_work(self.device_type, "export"))
    """Whether ``torch.export`` works on the device. Default: detected without AMP."""

    supports_forks: bool = _found_by(lambda self: self.device_type == "cpu" and sys.platform == "linux")
    """Whether a process that is forked, as a worker of a `DataLoader` is, can compute on its parent's device.

    Default: True for the CPU on Linux.
    """

    observes_rules: bool = _found_by(lambda self: has_dispatch_key(autograd_key(self.device_type)))
    """Whether ops can be replaced on the device's Autograd key, which makes all rules observable.

    Default: True if the device has its own Autograd key in torch.
    """

    default_dtype_is_torchs: bool = _found_by(lambda self: self.device_type != privateuse1_name())
    """Whether the default dtype must be torch's. Default: yes, except for PrivateUse1."""

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
        if getattr(self, capability):
            return
        if isinstance(inspect.getattr_static(type(self), capability), _Found):
            pytest.skip(f"{capability} is False by default for {self.device_type}; fixtures may set it")
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
