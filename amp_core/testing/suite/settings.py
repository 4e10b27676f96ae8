"""What belongs to the caller of a hook or kernel: all settings, among them those of torch."""

from __future__ import annotations

from typing import Any, cast

import torch

from amp_core._torch.tracing import dispatch_modes
from amp_core.testing.fixtures import BackendFixtures
from amp_core.testing.suite.settings_of_python import (
    BOTH,
    OF_PYTHON,
    Setting,
    of_numpy,
    only_read,
    seeded,
    tried,
)

PROCESS_WIDE = frozenset(
    {
        "the default dtype", "the precision of float32 products", "deterministic algorithms",
        "the number of threads", "cuDNN's TF32",
        "oneDNN", "torch's generator", "Python's generator", "NumPy's generator", "the environment",
        "the warnings filters", "logging", "the working directory", "the search path of modules",
        "the flags of torch's backends", "torch's print options", "the filling of empty tensors",
        "the locale", "the display of warnings", "the standard streams",
    }
)  # fmt: skip
"""Settings that other threads see, too, so they must not change even for a moment."""


def change(setting: Setting, before: Any, now: Any) -> str:
    """Say what changed."""
    if isinstance(before, dict):
        before, now = (dict(set(a.items()) - set(b.items())) for a, b in ((before, now), (now, before)))
    return f"{setting.name}: {before!r:.80} to {now!r:.80}"


def settings(subject: BackendFixtures) -> list[Setting]:
    """Return all settings, for the device of `subject`."""
    found = [*_OF_TORCH, *_of_autocast(subject), *OF_PYTHON, *of_numpy(), *_of_device(subject.device)]
    flushing = tried("the flushing of subnormals", (False,))
    if flushing.write(flushing.read()):  # which says whether the host can
        found.append(flushing)
    return found


def _of_autocast(subject: BackendFixtures) -> list[Setting]:
    kind = subject.device_type
    # Where torch has no autocast of its own, only a region makes its key passable.
    regions = BOTH if subject.default_dtype_is_torchs else (False,)
    return [
        Setting(
            "autocast",
            lambda: torch.is_autocast_enabled(kind),
            lambda value: torch.set_autocast_enabled(kind, value),
            regions,
        ),
        Setting(
            "autocast's dtype",
            lambda: torch.get_autocast_dtype(kind),
            lambda value: torch.set_autocast_dtype(kind, value),
            subject.backend.supported_dtypes(),
        ),
        Setting("autocast's cache", torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled, BOTH),
    ]


def _of_device(device: torch.device) -> list[Setting]:
    module, found = torch.get_device_module(device), []
    if hasattr(module, "current_stream"):
        streams = only_read("the current stream", module.current_stream)
        write = getattr(module, "set_stream", streams.write)
        found.append(streams._replace(write=write, values=(module.current_stream(),)))
    if device.type == "cpu":
        return found
    if hasattr(module, "get_rng_state") and hasattr(module, "manual_seed_all"):

        def generator() -> list[int]:
            try:
                state = module.get_rng_state()
            except TypeError:  # some devices have no default for the device
                state = module.get_rng_state(torch.empty(0, device=device).device)
            return cast("list[int]", state.tolist())

        found.append(Setting("the device's generator", generator, seeded(module.manual_seed_all), (1, 2)))
    if hasattr(module, "set_device"):
        devices = range(module.device_count())
        found.append(Setting("the current device", module.current_device, module.set_device, devices))
    return found


_KERNELS: Any = torch.backends.cuda
_ATTENTION = ("flash", "mem_efficient", "math", "cudnn")


def _flags() -> dict[str, bool]:
    """Return which of several implementations torch's ops may take."""
    cudnn, matmul = torch.backends.cudnn, _KERNELS.matmul
    return {
        "cudnn.enabled": cudnn.enabled,
        "cudnn.benchmark": cudnn.benchmark,
        "cudnn.deterministic": cudnn.deterministic,
        "cuda.matmul.bf16": matmul.allow_bf16_reduced_precision_reduction,
        **{name: getattr(_KERNELS, f"{name}_sdp_enabled")() for name in _ATTENTION},
    }


def _set_flags(value: Any) -> None:
    wanted = value if isinstance(value, dict) else dict.fromkeys(_flags(), value)
    names = ("enabled", "benchmark", "deterministic")
    torch.backends.cudnn.set_flags(**{f"_{name}": wanted[f"cudnn.{name}"] for name in names})  # type: ignore[no-untyped-call]
    _KERNELS.matmul.allow_bf16_reduced_precision_reduction = wanted["cuda.matmul.bf16"]
    for name in _ATTENTION:
        getattr(_KERNELS, f"enable_{name}_sdp")(wanted[name])


def _determinism() -> tuple[bool, bool]:
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    return torch.are_deterministic_algorithms_enabled(), warns


def _set_determinism(value: Any) -> None:
    enabled, warns = value if isinstance(value, tuple) else (value, True)
    torch.use_deterministic_algorithms(enabled, warn_only=warns)


_FILL: Any = torch.utils.deterministic


def _set_filling(value: bool) -> None:
    _FILL.fill_uninitialized_memory = value


_CONV: Any = torch.backends.cudnn.conv  # type: ignore[attr-defined]


def _set_cudnn_precision(value: Any) -> None:
    """Switch TF32 on or off, or restore a precision that only the newer setting knows."""
    if value in (True, False, "tf32", "none"):
        # Unlike the attribute, this also works where `torch.testing` has frozen the flags.
        torch.backends.cudnn.set_flags(_allow_tf32=value in (True, "tf32"), _fp32_precision=None)  # type: ignore[no-untyped-call]
    else:
        _CONV.fp32_precision = value


def _multithreading() -> bool:
    before: bool = torch.autograd.set_multithreading_enabled(True).prev  # the one way to read it
    torch.autograd.set_multithreading_enabled(before)
    return before


_NONE = torch.empty(0, device="cpu")
# What is above the threshold is cut; a large, a small and a long number show the others.
_PRINTED = (torch.tensor([1e-5, 1 / 3, 1e4], device="cpu"), torch.ones(1001, device="cpu"))

_OF_TORCH = (
    tried("grad mode", BOTH),
    only_read("inference mode", torch.is_inference_mode_enabled),
    only_read("torch's print options", lambda: str(_PRINTED)),
    # Any mode makes plain tensors overridable.
    only_read("the modes for torch's functions", lambda: torch.overrides.has_torch_function((_NONE,))),
    only_read("the modes for torch's ops", dispatch_modes),
    Setting("anomaly mode", torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly, BOTH),
    tried("the default dtype", (torch.float16, torch.float32)),
    tried("the default device", (torch.device("meta"), torch.device("cpu"))),
    tried("the number of threads", (1, 2, 3)),
    tried("the precision of float32 products", ("high", "highest")),
    Setting(
        "the sums of float16 products",
        lambda: torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
        lambda value: setattr(torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", value),
        BOTH,
    ),
    Setting("cuDNN's TF32", lambda: _CONV.fp32_precision, _set_cudnn_precision, BOTH),
    Setting("oneDNN", lambda: torch.backends.mkldnn.enabled, torch.backends.mkldnn.set_flags, (True,)),
    Setting("the flags of torch's backends", _flags, _set_flags, BOTH),
    Setting("deterministic algorithms", _determinism, _set_determinism, BOTH),
    # Not the state alone: a call that seeds would find the state that the one before it left.
    tried("torch's generator", (1, 2), torch.manual_seed),
    Setting("the threads of autograd", _multithreading, torch.autograd.set_multithreading_enabled, BOTH),
    Setting("the filling of empty tensors", lambda: _FILL.fill_uninitialized_memory, _set_filling, BOTH),
    Setting("the repetition of warnings", torch.is_warn_always_enabled, torch.set_warn_always, BOTH),
)
