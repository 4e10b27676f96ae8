"""Change what belongs to the caller; `fails` names the checks that must say so."""

from __future__ import annotations

import gc
import logging
import signal
import sys
import threading

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

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
