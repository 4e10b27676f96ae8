"""Triton's kernels on CPU tensors, under Triton's interpreter. Needs TRITON_INTERPRET=1 from the start.

``python interpreted.py KEYWORD`` runs the conformance kit's checks of kernels on them; other scripts import
`KERNELS` from here.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from amp_core.kernels.triton_kernels import Triton
from amp_core.testing import BackendFixtures, Loopback, check

_cast, _call = interpreter.InterpreterBuilder.cast_impl, interpreter.GridExecutor.__call__
_patch = interpreter._patch_lang_tensor
_one_at_a_time = threading.Lock()


def _cast_as_gpus_do(self: Any, src: Any, to: Any) -> Any:
    """The interpreter cuts float32 off to bfloat16, and loses bfloat16's subnormals; GPUs do neither."""
    pair = (src.dtype.scalar, to.scalar)
    if pair == (tl.bfloat16, tl.float32):
        return interpreter.TensorHandle((src.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
    if pair != (tl.float32, tl.bfloat16):
        return _cast(self, src, to)
    bits = np.ascontiguousarray(src.data).view(np.uint32)
    rounded = (bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16
    data = np.where(np.isnan(src.data), 0x7FFF, rounded).astype(np.uint16)
    return interpreter.TensorHandle(data, tl.bfloat16)


def _call_alone(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The interpreter has one grid for all threads; and a GPU does not warn of a logarithm of zero."""
    with _one_at_a_time, np.errstate(all="ignore"):
        return _call(self, *args, **kwargs)


def _patch_silently(tensor: Any, scope: Any) -> None:
    """Triton 3.6 takes numbers out of arrays in a way that NumPy warns of, at each call of a kernel."""
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter.InterpreterBuilder.cast_impl = _cast_as_gpus_do
interpreter._patch_lang_tensor = _patch_silently
interpreter.GridExecutor.__call__ = _call_alone
KERNELS = Triton("cpu")


class Interpreted(BackendFixtures):
    """The interpreter takes a millisecond a program."""

    large_numel = 200_003


def main() -> int:
    """Print what the kit found; fail with it."""
    areas = ["layouts", "cast", "add", "grad_stats", "multiply", "update", "effects"]
    keyword = " ".join(sys.argv[1:])
    report = check(Loopback(kernels=KERNELS), areas=areas, keyword=keyword, fixtures=Interpreted)
    for result in report.results:
        print(result.outcome, result.check, f"{result.seconds:.1f} s", result.message)
        if result.outcome == "failed":
            print(result.details[-3000:])
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
