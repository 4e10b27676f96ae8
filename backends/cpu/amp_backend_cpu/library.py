"""Load the compiled library of CPU kernels and tune it for this CPU."""

from __future__ import annotations

import ctypes
import logging
import struct
import sys
from pathlib import Path

import torch

from amp_core.common import environment as _env
from amp_core.common.locks import new_lock

_ABI = 10
"""The ABI version in `native/kernels.c`; a library with another version must not be called."""

# Pack the arguments of a function; in `native/kernels.c`, a struct with its name has the same layout.
_TENSORS = "q3Pq"
pack_grad_stats = struct.Struct(_TENSORS + "4Pq").pack
pack_multiply = pack_cast = struct.Struct(_TENSORS + "2P").pack
pack_add = struct.Struct(_TENSORS + "P").pack

_LIMITS = {"NO AVX": 0, "DEFAULT": 0, "AVX2": 1}
_AVX512 = 2
_NAMES = {"avx2": "AVX2", "avx512": "AVX-512"}

_NOT_BUILT = "the compiled kernels were not built: no C compiler at install time"
_NO_FOLDER = "the compiled kernels load from a folder, and {} is none"
_SLOWER = "Clipping, overflow checks and casts on a CPU use torch's kernels, up to three times as slow."


class LibraryMissingError(Exception):
    """No usable library exists; the message says why."""


def path() -> Path:
    """Return the path of the library. It works with any Python, so its suffix names none."""
    return Path(__file__).parent / "native" / ("_kernels.dll" if sys.platform == "win32" else "_kernels.so")


def load() -> ctypes.CDLL:
    """Load the library and limit it to the instruction set that torch uses.

    Raises:
        LibraryMissingError: it is disabled, was not built, or does not load.
    """
    if not _env.compiled():
        raise LibraryMissingError(f"disabled by {_env.COMPILED}")
    file = path()
    if not file.exists():
        raise LibraryMissingError(_why_missing(file.parent))
    try:
        library = ctypes.CDLL(str(file))
        if library.amp_abi() != _ABI:
            raise AttributeError("it was built from other sources; install amp-core again")
        _declare(library)
    except (OSError, AttributeError) as error:
        raise LibraryMissingError(f"{file.name} does not load: {error}") from error
    library.amp_limit(_LIMITS.get(torch.backends.cpu.get_cpu_capability(), _AVX512))
    library.amp_start()
    return library


def _why_missing(folder: Path) -> str:
    log = logging.getLogger("amp_core")
    if not folder.is_dir():
        log.warning(
            "amp-core runs from an archive, such as a zip file. %s To use the compiled kernels, install "
            "amp-core, or unpack the archive.",
            _SLOWER,
        )
        return _NO_FOLDER.format(folder)
    log.warning(
        "amp-core was installed without a C compiler. %s To build the compiled kernels, install one and run, "
        "in a clone of amp-core: pip install --force-reinstall --no-deps .",
        _SLOWER,
    )
    return _NOT_BUILT


class Tuning:
    """Whether large casts use streaming stores, which bypass the caches.

    They make some CPUs twice as fast and others slower. ``AMP_CPU_STREAMING`` decides; otherwise, the first
    large cast runs a calibration of about 30 ms.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._pinned = _env.cpu_streaming()
        self.settled = False
        self._lock = new_lock()

    def settle(self) -> None:
        """Choose the setting, once."""
        if self.settled:  # without the lock, for which threads would wait
            return
        with self._lock:
            if self.settled:
                return
            if self._pinned is None:
                self._library.amp_calibrate()
            else:
                self._library.amp_stream(int(self._pinned))
            self.settled = True

    def __str__(self) -> str:
        self.settle()
        on = self._library.amp_stream(-1)
        why = (
            _env.CPU_STREAMING if self._pinned is not None else f"measured; {_env.CPU_STREAMING}={on} pins it"
        )
        return f"streaming {'on' if on else 'off'} ({why})"


def instruction_set(library: ctypes.CDLL) -> str:
    """Return the instruction set in use and the variable that should limit it, if it is set."""
    name: str = library.amp_instruction_set().decode()
    forced = _env.cpu_capability()
    if not forced:
        return name
    effect = ""
    if forced != torch.backends.cpu.get_cpu_capability().lower():
        effect = " has no effect"  # torch reads it once, and ignores what it does not know
    elif _NAMES.get(forced, name) != name:
        effect = ": this CPU lacks it, and torch's kernels crash"  # torch does not ask the CPU
    return f"{name} ({_env.CPU_CAPABILITY}={forced}{effect})"


def threads_for(elements: int) -> int:
    """Return how many threads process so many elements fastest: waking one takes as long as 2**17 of them."""
    return min(torch.get_num_threads(), elements // 2**17 + 1)


def _declare(library: ctypes.CDLL) -> None:
    # What takes its arguments packed is not declared: ctypes then passes bytes on without a conversion.
    pointer, count, integer = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    for function in (library.amp_join, library.amp_split):
        function.argtypes = (*[pointer] * 3, count, integer, integer)
        function.restype = None
    library.amp_round.argtypes = (*[pointer] * 3, count, ctypes.c_uint64, integer)
    library.amp_round.restype = None
    library.amp_quantize_largest.argtypes = (pointer, integer, *[pointer] * 3, integer)
    library.amp_quantize_round.argtypes = (
        *(pointer, integer, pointer, pointer, integer, integer),
        *[pointer] * 4,
        *(integer, pointer, integer),
    )
    library.amp_quantize_scales.argtypes = (*[pointer] * 2, ctypes.c_int64, *[pointer] * 4, integer, integer)
    library.amp_quantize_largest.restype = library.amp_quantize_round.restype = None
    library.amp_quantize_scales.restype = None
    library.amp_instruction_set.restype = library.amp_compiler.restype = ctypes.c_char_p
    library.amp_stream.argtypes = library.amp_limit.argtypes = (ctypes.c_int,)
    library.amp_calibrate.argtypes = library.amp_start.argtypes = ()
