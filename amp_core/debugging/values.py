"""Read the values of tensors, of any library, without becoming part of a graph."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from amp_core._torch.tensors import is_dtensor, is_wrapper
from amp_core._torch.tracing import calls_are_captured, without_torch_functions
from amp_core.debugging.tap import measuring
from amp_core.kernels.portable import finite


def in_parts(tensor: Tensor) -> Tensor:
    """Return the real and imaginary parts of complex numbers, as torch has no largest one; others as is."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def extent(flat: Tensor) -> tuple[float, int]:
    """Return the largest finite magnitude and the non-finite count; one pass if all are finite."""
    if not flat.numel():
        return 0.0, 0
    flat = wide(flat)
    largest = _largest(flat)
    if math.isfinite(largest):
        return largest, 0
    is_finite = finite(flat)
    kept = flat[is_finite]
    return _largest(kept) if kept.numel() else 0.0, flat.numel() - int(is_finite.sum())


def wide(tensor: Tensor) -> Tensor:
    """Return float8 values in float32: float8 supports almost no ops."""
    return tensor.float() if tensor.element_size() < 2 else tensor


def _largest(flat: Tensor) -> float:
    return max(abs(float(end)) for end in torch.aminmax(flat))


@torch.no_grad()
@measuring()
def fills_memory(tensor: Tensor) -> bool:
    """Return whether all of its memory is the tensor's, so that nothing is left there from before."""
    outermost_first = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    is_dense = tensor.permute(outermost_first).is_contiguous()
    return is_dense and tensor.nbytes == tensor.untyped_storage().nbytes()


def is_readable(tensor: Tensor) -> bool:
    """Return whether a tensor is dense and has numbers to read, and no graph is being traced.

    Whatever a tool computed from the values would become part of such a graph. Quantised tensors of other
    libraries may be able to do no more than multiply.
    """
    if nn.parameter.is_lazy(tensor):
        return False
    with without_torch_functions():
        return _is_in_memory(tensor) and (not is_wrapper(tensor) or is_dtensor(tensor) or _computes(tensor))


def _is_in_memory(tensor: Tensor) -> bool:
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized or calls_are_captured():
        return False
    try:
        memory = tensor.untyped_storage()
        if type(tensor) is Tensor:  # subclasses may keep their values elsewhere
            memory.data_ptr()  # raises where there is none, as for forward-mode zeros
    except RuntimeError:  # also for a batch of gradients
        return False
    return memory.device.type != "meta"  # fake tensors have such memory too


@measuring()
@torch.no_grad()
def _computes(wrapper: Tensor) -> bool:
    try:
        extent(wrapper.detach().reshape(-1))
    except Exception:  # torchao also raises AssertionError and NotImplementedError
        return False
    return True
