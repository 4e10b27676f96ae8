"""What a maker of a device tells the kit: the device type, what it can do, how exact it is.

Override what differs for your device; each property says what its default means. None of them can turn a
wrong result into a right one: they say which inputs the device cannot hold at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, ClassVar

import pytest
import torch

from amp_core._torch import internals as _torch
from amp_core._torch.dispatcher import autograd_key, has_dispatch_key
from amp_core.kernels import Kernels
from amp_core.plugin import Backend, get_backend
from amp_core.plugin.default_manager import manager, replace_backend


class BackendFixtures:
    """Properties to override; `device_type` must be."""

    device_type: str = ""
    """The ``type`` of a ``torch.device``, such as ``"npu"``. Must be set."""

    known_failures: Mapping[str, str] = MappingProxyType({})
    """Name of a check to the reason why it fails for now.

    A check that is named here and passes fails the run, so that a mended fault is noticed; a name that no
    check has fails it too.
    """

    policy_departures: Mapping[str, str] = MappingProxyType({})
    """Full name of an op (``aten::mm.default``) to the reason why the device does not follow torch.

    Default: none. An op that torch has a rule for must have a rule, and the same one, unless named here.
    """

    norm_rtol: float = 1e-5
    """Relative tolerance of `Kernels.grad_stats` against float64. Default: some float32 sums."""

    product_ulps: int = 0
    """How many steps of its dtype a product of `Kernels.multiply_` may be off the rounded float32 product.

    Default: none, because one multiplication and one rounding have one right result.
    """

    large_numel: int = 2_000_003
    """Elements of the tensor in which one bad element must be found. Default: millions, odd."""

    AREA: ClassVar[str] = ""

    # What is checked.

    @property
    def backend(self) -> Backend:
        """The backend under test. Default: the installed one of `device_type`."""
        return get_backend(self.device_type)

    @property
    def device(self) -> torch.device:
        """Where tensors are made. Default: the current device of `device_type`."""
        return torch.device(self.device_type)

    @property
    def kernels(self) -> Kernels:
        """The kernels under test. Default: the backend's."""
        return self.backend.kernels()

    # What the device can hold.

    @property
    def supports_float64(self) -> bool:
        """Whether the device has float64. Default: tried out."""
        return self._can_hold(torch.float64)

    @property
    def supports_complex(self) -> bool:
        """Whether the device has complex64. Default: tried out."""
        return self._can_hold(torch.complex64)

    @property
    def supports_float8(self) -> bool:
        """Whether casts to and from 8-bit floats are checked. Default: tried out."""
        return self._can_hold(torch.float8_e4m3fn) and self._can_hold(torch.float8_e5m2)

    @property
    def keeps_subnormals(self) -> bool:
        """Whether the device computes with subnormal numbers instead of flushing them. Default: yes."""
        return True

    @property
    def supports_compile(self) -> bool:
        """Whether ``torch.compile(backend="aot_eager")`` works on the device.

        Default: tried out, without AMP; not for PrivateUse1, whose op policy is in Python.
        """
        return self.default_dtype_is_torchs and _graphs_work(self.device_type, "compile")

    @property
    def supports_export(self) -> bool:
        """Whether ``torch.export`` works on the device. Default: tried out, without AMP."""
        return _graphs_work(self.device_type, "export")

    @property
    def observes_rules(self) -> bool:
        """Whether an op can be replaced on the device's Autograd key, where the rules of all ops are seen.

        Default: where torch gives the device an Autograd key of its own.
        """
        return has_dispatch_key(autograd_key(self.device_type))

    @property
    def default_dtype_is_torchs(self) -> bool:
        """Whether the default dtype must be torch's. Default: yes, but for PrivateUse1, where it is yours."""
        return self.device_type != _torch.privateuse1_name()

    # What can be made to happen.

    @contextmanager
    def device_taken_away(self) -> Iterator[None]:
        """Make the device look absent. Default: ``torch.<device_type>.is_available`` returns False.

        Override it if `Backend.availability` asks something else; skip where a device cannot be absent.
        """
        module = getattr(torch, self.device_type, None)
        if self.device_type == "cpu" or not hasattr(module, "is_available"):
            pytest.skip(f"{self.device_type} cannot be made to look absent")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "is_available", lambda: False)
            yield

    # Not to be overridden.

    def requires(self, capability: str) -> None:
        """Skip the check unless the property `capability` is true."""
        if not getattr(self, capability):
            pytest.skip(f"{self.device_type}: {capability} is False")

    def dtypes(self) -> list[torch.dtype]:
        """Return the real dtypes of gradients that the device holds."""
        low = [torch.float16, torch.bfloat16]
        held = [d for d in low if self._can_hold(d)]
        return [torch.float32, *held, *([torch.float64] if self.supports_float64 else [])]

    def _can_hold(self, dtype: torch.dtype) -> bool:
        return _can_hold(self.device_type, dtype)

    @pytest.fixture(autouse=True)
    def _serve_the_backend(self, request: pytest.FixtureRequest) -> Iterator[None]:
        """Put `backend` into the registry while a check runs, and mark the known failures."""
        reason = self.known_failures.get(_check_name(request.node))
        if reason is not None:
            request.applymarker(pytest.mark.xfail(reason=reason, strict=True))
        with serving(self.backend):
            yield


@contextmanager
def serving(backend: Backend) -> Iterator[None]:
    """Serve the device type with `backend` inside the block."""
    registry = manager().registry
    if registry.get(backend.device_type) is backend:
        yield
        return
    before = registry.snapshot()
    replace_backend(backend)
    try:
        yield
    finally:
        registry.restore(before)


def _check_name(item: Any) -> str:
    return str(item.originalname).removeprefix("test_")


_held: dict[tuple[str, torch.dtype], bool] = {}


def _can_hold(device_type: str, dtype: torch.dtype) -> bool:
    key = (device_type, dtype)
    if key not in _held:
        try:
            there = torch.ones(2, dtype=torch.float32).to(dtype).to(device_type)
            _held[key] = bool((there.cpu().float() == 1).all()) if not dtype.is_complex else True
        except (RuntimeError, TypeError, NotImplementedError):
            _held[key] = False
    return _held[key]


_graphs: dict[tuple[str, str], bool] = {}


def _graphs_work(device_type: str, how: str) -> bool:
    key = (device_type, how)
    if key not in _graphs:
        try:
            _graphs[key] = _try_graph(device_type, how)
        except Exception:  # whatever torch raises for a device that it cannot trace
            _graphs[key] = False
    return _graphs[key]


def _try_graph(device_type: str, how: str) -> bool:
    model = torch.nn.Linear(2, 2).to(device_type)
    x = torch.ones(1, 2, device=device_type)
    if how == "compile":
        torch.compile(model, backend="aot_eager", fullgraph=True)(x).sum().backward()
    else:
        torch.export.export(model, (x,)).module()(x)
    return True
