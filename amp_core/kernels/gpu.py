"""Choose the kernels of a GPU, with the reason."""

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
    """Return the Triton kernels for a device type, or the portable ones with the reason.

    The first call imports Triton. It compiles nothing and does not touch the device.

    Args:
        device_type: such as ``"cuda"``.
        maker: the name of Triton's compiler for its GPUs: ``"nvidia"``, ``"amd"``, ``"intel"``, or that of
            another package with an entry point in the group ``triton.backends``.
        has_float64: whether all devices of this type support float64.
    """
    reason = _why_not()
    if not reason:
        try:
            from amp_core.kernels.triton_kernels import Triton
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] != "triton":
                raise
            reason = "triton is not installed"
        except Exception as error:  # a Triton that does not fit this machine may raise anything
            reason = f"triton cannot be imported: {type(error).__name__}: {error}".splitlines()[0]
        else:
            if _has_compiler(maker):
                return Triton(device_type, has_float64=has_float64)
            reason = f"the installed triton has no compiler for {maker} GPUs"
    return foreach_kernels(reason, has_float64=has_float64)


def _has_compiler(maker: str) -> bool:
    from triton.backends import backends

    return maker in backends


def foreach_kernels(reason: str, *, has_float64: bool = True) -> Kernels:
    """Return the portable kernels with `reason` in their description."""
    kernels = Portable(has_float64=has_float64)
    kernels.reason = f"torch's foreach operations: {reason}"
    return kernels


def _why_not() -> str:
    """Return why Triton kernels cannot be launched even if Triton can be imported; empty if they can."""
    if not _env.triton():
        return f"disabled by {_env.TRITON}"
    if os.name != "posix":
        return ""  # Triton for Windows brings a compiler with it
    # Triton compiles its launchers with the system's C compiler; without one, the first launch fails.
    if not (_env.c_compiler() or shutil.which("gcc") or shutil.which("clang")):
        return "Triton needs a C compiler, but gcc, clang and $CC are all missing"
    header = os.path.join(sysconfig.get_path("include"), "Python.h")
    return "" if os.path.exists(header) else f"Triton needs Python's headers, but {header} is missing"
