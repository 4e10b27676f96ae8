"""Every environment variable that amp-core reads."""

from __future__ import annotations

import os

DISABLE_BACKENDS = "AMP_DISABLE_BACKENDS"
PLUGIN_AUTOLOAD = "AMP_PLUGIN_AUTOLOAD"
STRICT_PLUGINS = "AMP_STRICT_PLUGINS"
POLICY = "AMP_POLICY"
DEPRECATION = "AMP_DEPRECATION"
COMPILED = "AMP_COMPILED"
TRITON = "AMP_TRITON"
CPU_STREAMING = "AMP_CPU_STREAMING"
CPU_CAPABILITY = "ATEN_CPU_CAPABILITY"
RANK = "RANK"
C_COMPILER = "CC"
VISIBLE_GPUS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
OPENMP_BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "KMP_AFFINITY", "GOMP_CPU_AFFINITY")

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


class SettingError(ValueError):
    """A variable has a value that amp-core does not know."""


def _flag(name: str, default: bool) -> bool:
    text = os.environ.get(name, "").strip().lower()
    if not text:
        return default
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    legal = ", ".join(sorted(_TRUE | _FALSE))
    raise SettingError(f"{name}={text!r} is not a switch; use one of {legal}.")


def disabled_backends() -> frozenset[str]:
    """``AMP_DISABLE_BACKENDS=a,b``: do not load backends for these device types."""
    names = os.environ.get(DISABLE_BACKENDS, "").split(",")
    return frozenset(name.strip() for name in names if name.strip())


def plugin_autoload() -> bool:
    """``AMP_PLUGIN_AUTOLOAD=0``: ignore third-party entry points (default on)."""
    return _flag(PLUGIN_AUTOLOAD, default=True)


def strict_plugins() -> bool:
    """``AMP_STRICT_PLUGINS=1``: raise an error for a broken plugin instead of warning (default off)."""
    return _flag(STRICT_PLUGINS, default=False)


def policy_path() -> str | None:
    """``AMP_POLICY=path.toml``: the op policy of regions that pass none."""
    return os.environ.get(POLICY) or None


def deprecation_once() -> bool:
    """``AMP_DEPRECATION=once``: deprecated names warn once per site, on rank 0 only (default ``always``)."""
    text = os.environ.get(DEPRECATION, "").strip().lower() or "always"
    if text not in {"always", "once"}:
        raise SettingError(f"{DEPRECATION}={text!r} is not valid; use 'always' or 'once'.")
    return text == "once"


def compiled() -> bool:
    """``AMP_COMPILED=0``: do not load amp-core's compiled code (default on)."""
    return _flag(COMPILED, default=True)


def cpu_streaming() -> bool | None:
    """``AMP_CPU_STREAMING=0`` or ``1``: store large casts past the CPU's caches (default: what is faster)."""
    return _flag(CPU_STREAMING, default=False) if os.environ.get(CPU_STREAMING, "").strip() else None


def triton() -> bool:
    """``AMP_TRITON=0``: use torch's multi-tensor operations on GPUs, not Triton kernels (default on)."""
    return _flag(TRITON, default=True)


def c_compiler() -> str:
    """``CC``: the C compiler for Triton; empty lets Triton find one."""
    return os.environ.get(C_COMPILER, "")


def cpu_capability() -> str:
    """``ATEN_CPU_CAPABILITY``: the widest instruction set to use on a CPU; empty for what the CPU has."""
    return os.environ.get(CPU_CAPABILITY, "")


def rank() -> int:
    """``RANK``: the rank of this process, as set by launchers such as torchrun (default 0)."""
    text = os.environ.get(RANK, "").strip()
    return int(text) if text.isdecimal() else 0


def hidden_gpus() -> str:
    """Return the setting that hides all GPUs, such as ``CUDA_VISIBLE_DEVICES=-1``; empty if none does."""
    for name in VISIBLE_GPUS:
        text = os.environ.get(name)
        if text is not None and text.strip() in {"", "-1"}:
            return f"{name}={text}"
    return ""


def openmp_binds() -> bool:
    """Return whether a variable such as ``OMP_PROC_BIND`` tells OpenMP to bind threads to CPUs."""
    return any(name in os.environ for name in OPENMP_BINDING)
