"""Record a model on a PrivateUse1 device in Python, whose tensors hold a CPU tensor. For test_record.py."""

from __future__ import annotations

import torch
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import amp_core

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


x, w = NpuTensor(torch.randn(4, 4)), NpuTensor(torch.randn(4, 4))
with amp_core.record() as r, amp_core.autocast("npu", dtype=torch.bfloat16):
    low = torch.mm(x, w)
    exact = torch.softmax(low, -1)
assert low.dtype is torch.bfloat16
assert exact.dtype is torch.float32

mm, softmax = r.ops
assert (mm.op, mm.given, mm.dtypes) == ("aten::mm.default", "float32", "bfloat16")
assert (mm.rule, mm.origin) == ("lower_precision_fp", "OpPolicy.uniform")
assert (softmax.op, softmax.given, softmax.result) == ("aten::softmax.int", "bfloat16", "float32")
assert softmax.widened
key, count = next(iter(r.casts.items()))
assert (key.source, key.result, key.cause, count.calls) == ("float32", "bfloat16", "aten::mm.default", 2)
