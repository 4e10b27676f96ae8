"""Which kernels a GPU has, and why."""

from __future__ import annotations

import functools
import os
import shutil
import sysconfig

from amp_core.common import environment as _env
from amp_core.kernels.interface import Kernels
from amp_core.kernels.portable import Portable


@functools.cache
def kernels_of(device_type: str, maker: str, *, has_float64: bool = True) -> Kernels:
    """Return Triton's kernels for a device type that is present, or the portable ones with the reason why.

    Imports Triton at the first call. Nothing is compiled and the device is not touched.

    Args:
        device_type: such as ``"cuda"``.
        maker: the name of the compiler in Triton for its GPUs: ``"nvidia"``, ``"amd"`` or ``"intel"``.
        has_float64: whether all these devices compute in float64.
    """
    reason = _why_not()
    if not reason:
        try:
            from amp_core.kernels.triton_kernels import Triton
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] != "triton":
                raise
            reason = "triton is not installed"
        except Exception as error:  # whatever a Triton that does not fit this machine raises
            reason = f"triton cannot be imported: {type(error).__name__}: {error}".splitlines()[0]
        else:
            if _has_compiler(maker):
                return Triton(device_type, has_float64=has_float64)
            reason = f"the triton that is installed has no compiler for GPUs of {maker}"
    return foreach_kernels(reason, has_float64=has_float64)


def _has_compiler(maker: str) -> bool:
    from triton.backends import backends

    return maker in backends


def foreach_kernels(reason: str, *, has_float64: bool = True) -> Kernels:
    """Return the portable kernels, which say that they are torch's operations and why."""
    kernels = Portable(has_float64=has_float64)
    kernels.reason = f"torch's foreach operations: {reason}"
    return kernels


def _why_not() -> str:
    """Say why Triton's kernels could not be launched though Triton can be imported; empty if they can."""
    if not _env.triton():
        return f"{_env.TRITON} says so"
    if os.name != "posix":
        return ""  # Triton for Windows brings a compiler with it
    # Triton compiles its launchers with the C compiler of the system, and fails at the first launch.
    if not (_env.c_compiler() or shutil.which("gcc") or shutil.which("clang")):
        return "Triton needs a C compiler, and neither gcc nor clang nor $CC is there"
    header = os.path.join(sysconfig.get_path("include"), "Python.h")
    return "" if os.path.exists(header) else f"Triton needs Python's headers, and {header} is not there"
