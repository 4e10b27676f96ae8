"""Which kernels a GPU gets, with none here: each reason is made to hold and then read."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import amp_core
from amp_core.kernels import gpu


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    gpu.kernels_of.cache_clear()
    yield
    gpu.kernels_of.cache_clear()


def reason(maker: str = "nvidia") -> str:
    kernels = gpu.kernels_of("cuda", maker)
    assert kernels.name == "portable"
    assert kernels.reason.startswith("torch's foreach operations: ")
    return kernels.reason


def test_triton_where_it_can_be_launched() -> None:
    """A GPU with Triton gets torch's kernels all the same."""
    pytest.importorskip("triton")
    kernels = gpu.kernels_of("cuda", "nvidia")
    if kernels.name == "portable":
        assert "Triton needs" in kernels.reason  # no compiler or no headers on this machine
    else:
        assert kernels.name == "triton"
        assert kernels.reason.startswith("Triton ")
    assert gpu.kernels_of("cuda", "nvidia") is kernels


def test_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Someone whose Triton is broken cannot switch it off, or does not see that it is."""
    monkeypatch.setenv("AMP_TRITON", "0")
    assert "disabled by AMP_TRITON" in reason()


def test_no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Triton is not installed the reason is a traceback, or not said."""
    monkeypatch.setattr(gpu, "_why_not", lambda: "")
    monkeypatch.delitem(sys.modules, "amp_core.kernels.triton_kernels", raising=False)
    real = builtins.__import__

    def absent(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError("No module named 'triton'", name="triton")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", absent)
    assert "triton is not installed" in reason()


def test_a_triton_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Triton built for another machine takes the whole backend down."""
    monkeypatch.setattr(gpu, "_why_not", lambda: "")
    monkeypatch.delitem(sys.modules, "amp_core.kernels.triton_kernels", raising=False)
    real = builtins.__import__

    def broken(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "triton":
            raise ImportError("libtriton.so: undefined symbol")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", broken)
    assert "triton cannot be imported: ImportError: libtriton.so: undefined symbol" in reason()


def test_no_compiler_for_the_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step of a training fails inside Triton, for want of gcc."""
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "")
    assert "Triton needs a C compiler" in reason()


def test_no_headers_for_the_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step fails for want of Python.h, which Debian packs apart."""
    monkeypatch.setenv("CC", "cc")
    monkeypatch.setattr(gpu.sysconfig, "get_path", lambda name: "/nowhere")
    assert "/nowhere/Python.h is missing" in reason()


def test_a_triton_for_other_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an Intel GPU the Triton of NVIDIA's torch is launched and fails."""
    pytest.importorskip("triton")
    monkeypatch.setattr(gpu, "_why_not", lambda: "")
    assert "has no compiler for nosuch GPUs" in reason("nosuch")


@pytest.mark.parametrize("device_type", ["cuda", "xpu"])
def test_without_a_gpu(device_type: str) -> None:
    """The listing does not say why a GPU's kernels are not those of the documentation."""
    if torch.get_device_module(device_type).is_available():
        pytest.skip("there is one")
    kernels = amp_core.get_backend(device_type).kernels()
    assert kernels.name == "portable"
    assert kernels.reason == "torch's foreach operations: no GPU is available for Triton"
    assert amp_core.get_backend(device_type).kernels() is kernels


def test_an_old_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Pascal GPU fails at the first launch of a kernel that Triton has no code for."""
    from amp_backend_cuda import backend

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: [(9, 0), (6, 1)][i])
    monkeypatch.setattr(torch.version, "hip", None)
    backend._kernels.cache_clear()
    try:
        kernels = amp_core.get_backend("cuda").kernels()
        assert "needs compute capability 7.0, and a GPU has 6.1" in kernels.reason
    finally:
        backend._kernels.cache_clear()
