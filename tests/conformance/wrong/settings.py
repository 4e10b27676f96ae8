"""Change what belongs to the caller; `fails` names the checks that must say so."""

from __future__ import annotations

import ctypes
import ctypes.util
import gc
import logging
import os
import platform
import signal
import sys
import threading

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from amp_core.kernels import Portable
from amp_core.testing import Loopback

STATE = ("hooks_leave_torchs_state_as_it_was",)
UNDO = []


class SetsTheLevelOfTheRootLogger(Portable):
    fails = STATE

    def grad_stats(self, grads, norm_type=2.0):
        logging.getLogger().setLevel(logging.INFO)
        return super().grad_stats(grads, norm_type)


class ConfiguresLogging(Loopback):
    fails = STATE

    def kernels(self):
        logging.basicConfig(force=True)
        return super().kernels()


class HandlesTheEndOfTheJob(Loopback):
    fails = STATE

    def availability(self):
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return super().availability()


class LetsCudnnTryAlgorithms(Portable):
    fails = STATE

    def cast(self, tensors, dtype, out=None):
        torch.backends.cudnn.set_flags(_benchmark=True)
        return super().cast(tensors, dtype, out)


class TurnsFlashAttentionOff(Loopback):
    fails = STATE

    def kernels(self):
        torch.backends.cuda.enable_flash_sdp(False)
        return super().kernels()


class RaisesWhereAnOpIsNotDeterministic(Portable):
    fails = STATE

    def cast(self, tensors, dtype, out=None):
        torch.use_deterministic_algorithms(torch.are_deterministic_algorithms_enabled(), warn_only=False)
        return super().cast(tensors, dtype, out)


class CollectsRarely(Portable):
    fails = STATE

    def update_scale_(self, state, found_inf, schedule):
        gc.set_threshold(100_000)
        super().update_scale_(state, found_inf, schedule)


class SwitchesThreadsRarely(Portable):
    fails = STATE

    def add_(self, totals, grads):
        sys.setswitchinterval(0.5)
        super().add_(totals, grads)


class LetsNumpyRaise(Portable):
    fails = STATE

    def cast(self, tensors, dtype, out=None):
        np.seterr(over="raise")
        return super().cast(tensors, dtype, out)


class ShortensWhatTorchPrints(Portable):
    fails = STATE

    def grad_stats(self, grads, norm_type=2.0):
        if not UNDO:
            UNDO.append(lambda: torch.set_printoptions(profile="default"))
            torch.set_printoptions(precision=2)
        return super().grad_stats(grads, norm_type)


class LeavesAFunctionModeOn(Portable):
    fails = STATE

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    def update_scale_(self, state, found_inf, schedule):
        if not UNDO:
            mode = self.Mode()
            UNDO.append(lambda: mode.__exit__(None, None, None))
            mode.__enter__()
        super().update_scale_(state, found_inf, schedule)


class RunsBackwardPassesInOneThread(Loopback):
    fails = STATE

    def availability(self):
        torch.autograd.set_multithreading_enabled(False)
        return super().availability()


class LeavesADispatchModeOn(Portable):
    fails = STATE

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    def grad_stats(self, grads, norm_type=2.0):
        if not UNDO:
            mode = self.Mode()
            UNDO.append(lambda: mode.__exit__(None, None, None))
            mode.__enter__()
        return super().grad_stats(grads, norm_type)


class BindsTheThreadToACpu(Portable):
    """As the start of a driver or of OpenMP does; every worker of a `DataLoader` inherits it."""

    fails = STATE

    def cast(self, tensors, dtype, out=None):
        if sys.platform == "linux":
            everywhere = os.sched_getaffinity(0)
            UNDO.append(lambda: os.sched_setaffinity(0, everywhere))
            os.sched_setaffinity(0, {min(everywhere)})
        return super().cast(tensors, dtype, out)


class RoundsUp(Portable):
    """By C's `fesetround`, for numbers of its own, and leaves it so."""

    fails = STATE
    library = ctypes.CDLL(ctypes.util.find_library("m"))

    def update_scale_(self, state, found_inf, schedule):
        UNDO.append(lambda: self.library.fesetround(0))
        self.library.fesetround(0x800 if platform.machine() == "x86_64" else 1 << 22)
        super().update_scale_(state, found_inf, schedule)


class OpensLibrariesForAll(Loopback):
    """A library whose names every later one sees can take the place of another."""

    fails = STATE

    def kernels(self):
        flags = sys.getdlopenflags()
        UNDO.append(lambda: sys.setdlopenflags(flags))
        sys.setdlopenflags(flags | ctypes.RTLD_GLOBAL)
        return super().kernels()
