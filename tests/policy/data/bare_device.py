"""A PrivateUse1 device in Python: its tensors hold a CPU tensor and compute with it. For test_devices.py."""

from __future__ import annotations

import os

import torch
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from amp_core import OpPolicy, get_backend
from amp_core._torch.op_kernels import registered
from amp_core.dispatch.activate import activation, pop

_setup_privateuseone_for_python_backend("npu")
torch.npu.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
torch.npu.is_available = lambda: True


class NpuTensor(torch.Tensor):
    """A tensor whose device is npu; ops run on the CPU tensor inside, below autograd and autocast."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> NpuTensor:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device="npu:0")

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = pytree.tree_map_only(NpuTensor, lambda t: t.inner, (args, kwargs or {}))
        if kwargs.get("device") is not None:
            kwargs["device"] = "cpu"
        return pytree.tree_map_only(torch.Tensor, NpuTensor, func(*args, **kwargs))


def npu(*shape: int, dtype: torch.dtype = torch.float32) -> NpuTensor:
    return NpuTensor(torch.randn(shape).to(dtype))


def raises(text: str, call, *args) -> None:
    try:
        call(*args)
    except RuntimeError as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"no error with {text!r}")


def region(active):
    class Both:
        def __enter__(self):
            self.region = torch.autocast("npu", torch.bfloat16)
            self.region.__enter__()
            active.push()

        def __exit__(self, *exc):
            pop()
            self.region.__exit__(*exc)

    return Both()


LOW, HIGH = torch.bfloat16, torch.float32
backend = get_backend("npu")
assert registered("AutocastPrivateUse1") == frozenset()
assert backend.op_policy() == OpPolicy.uniform("npu")

# The default of a device without rules is in force from Python; ops without a rule fall through.
default = activation(backend, None)
assert default is not None
x, y = npu(4, 4), npu(4, 4)
with region(default):
    assert torch.mm(x, y).dtype is LOW
    assert torch.nn.functional.linear(x, y).dtype is LOW
    assert torch.softmax(x.to(LOW), -1).dtype is HIGH
    assert torch.softmax(x, -1, dtype=torch.float16).dtype is torch.float16
    assert torch.relu(x).dtype is HIGH
    assert (x.to(LOW) + y).dtype is HIGH
    assert torch.norm(x.to(LOW), 2).dtype is HIGH
    assert torch.cat([x, y.to(LOW)]).dtype is HIGH
    assert torch.cat([x.to(LOW), y.to(LOW)]).dtype is LOW
    assert torch.index_add(x.to(LOW), 0, NpuTensor(torch.tensor([0, 1])), npu(2, 4)).dtype is LOW
    assert x.clone().mul_(y.to(LOW)).dtype is HIGH
    with torch.autocast("npu", enabled=False):
        assert torch.mm(x, y).dtype is HIGH
assert registered("AutocastPrivateUse1") == frozenset()

# cuda's rules on it: promotion errors and bans with torch's text.
cuda = OpPolicy("npu", OpPolicy.default("cuda").rules)
with region(activation(get_backend("npu"), cuda)):
    raises("Unexpected floating ScalarType", torch.dot, npu(3, dtype=torch.float16), npu(3, dtype=LOW))
    raises("are unsafe to autocast", torch._C._nn.binary_cross_entropy, x, y)
    assert torch.dot(npu(3), npu(3, dtype=LOW)).dtype is HIGH

# Weights are cast once per region, and gradients come back in float32.
weight = npu(4, 4).requires_grad_()
with region(default):
    out = torch.mm(torch.mm(x, weight), weight).float().sum()
out.backward()
assert weight.grad is not None
assert weight.grad.dtype is HIGH
assert registered("AutocastPrivateUse1") == frozenset()
print("all checks passed", flush=True)
# torch's autograd thread of a device that was made in Python may still run at exit, and aborts the process.
os._exit(0)
