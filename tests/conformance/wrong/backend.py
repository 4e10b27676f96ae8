"""Wrong in what they say, or in what their hooks leave behind; `fails` names the checks that must say so."""

from __future__ import annotations

import os
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from amp_core.kernels import Portable
from amp_core.plugin import Availability, Refusal
from amp_core.policy import OpPolicy
from amp_core.testing import BackendFixtures, Loopback

UNDO = []


class DefaultIsNotSupported(Loopback):
    fails = ("default_dtype_is_supported",)

    def supported_dtypes(self):
        return (torch.float16,)


class DefaultIsFloat32(Loopback):
    fails = ("default_dtype_is_a_lower_precision",)

    def default_dtype(self):
        return torch.float32


class DefaultIsAnotherThanTorchs(Loopback):
    fails = ("default_dtype_is_torchs_where_torch_has_one",)

    def default_dtype(self):
        return torch.float16


class DefaultIsFixed(Loopback):
    fails = ("default_dtype_follows_torchs_setting",)

    def default_dtype(self):
        return torch.bfloat16


class AdmitsEverything(Loopback):
    fails = ("supported_dtypes_are_admitted_and_others_refused_in_words",)

    def autocast_refusal(self, dtype):
        return None


class SupportsIntegers(Loopback):
    fails = ("supported_dtypes_are_floating_and_distinct",)

    def supported_dtypes(self):
        return (torch.bfloat16, torch.float16, torch.int8)


class AnswersNoInWords(Loopback):
    fails = ("backend_names_its_device_and_contract",)

    @property
    def has_float64(self):
        return "no"


class MisspellsAHook(Loopback):
    fails = ("backend_names_its_device_and_contract",)

    def op_polcy(self):
        return OpPolicy.default("cuda")


class NamesAHookByHalf(Loopback):
    """So the device has the rules of every device, and the maker's are asked by nobody."""

    fails = ("backend_names_its_device_and_contract",)

    def policy(self):
        return self.op_policy().override({"softmax": "lower_precision_fp"})


class MisspellsAnAttribute(Loopback):
    fails = ("backend_names_its_device_and_contract",)
    grad_bucket_bytes = 1 << 20


class MisspellsAKernel(Portable):
    fails = ("backend_names_its_device_and_contract",)

    def grad_stat(self, grads, norm_type=2.0):
        return super().grad_stats(grads, norm_type)


class _MisspelledFixtures(BackendFixtures):
    norm_rtoll = 1e-4


class MisspellsAFixture(Loopback):
    fails = ("backend_names_its_device_and_contract",)
    fixtures = _MisspelledFixtures


class _WithoutFloat64(BackendFixtures):
    supports_float64 = False


class HasFloat64ItDoesNotHave(Loopback):
    fails = ("backend_names_its_device_and_contract",)
    fixtures = _WithoutFloat64


class BuildsKernelsForFloat64ItDoesNotHave(HasFloat64ItDoesNotHave):
    has_float64 = False


class HasNoReason(Loopback):
    fails = ("availability_gives_a_reason_in_words",)

    def availability(self):
        return Availability(True, "")


class AnswersWithABool(Loopback):
    fails = ("availability_gives_a_reason_in_words",)

    def availability(self):
        return True


class SaysThatItIsAbsent(Loopback):
    fails = ("availability_is_true_of_the_device",)

    def availability(self):
        return Availability(False, "no driver is loaded")


class AllocatesToAnswer(Loopback):
    fails = ("questions_do_no_work_on_the_device",)

    def availability(self):
        return Availability(torch.ones(1, device=self.device_type).sum() == 1 or True, "tried an addition")


class PolicyLacksARule(Loopback):
    fails = ("policy_has_torchs_rules_but_for_stated_departures",)

    def op_policy(self):
        rules = dict(OpPolicy.default("cpu").rules)
        del rules["aten::mse_loss.default"]
        return OpPolicy("cpu", rules)


class PolicyRunsProductsInFloat32(Loopback):
    fails = ("policy_runs_products_in_low_precision",)

    def op_policy(self):
        return OpPolicy.float32("cpu")


class PolicyIsForAnotherDevice(Loopback):
    fails = ("policy_is_for_the_device",)

    def op_policy(self):
        return OpPolicy.default("cuda")


class HasAnAutocastKernelThatDoesNotCast(Loopback):
    fails = ("region_follows_every_rule",)

    def op_policy(self):
        if not UNDO:
            library = torch.library.Library("aten", "IMPL")
            UNDO.append(library._destroy)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that it takes the place of another
                library.impl("smooth_l1_loss", torch.library.fallthrough_kernel, "AutocastCPU")
        return super().op_policy()


UNDO = []  # what takes back what would outlive a backend


class TurnsGradientsOff(Portable):
    fails = ("hooks_leave_torchs_state_as_it_was",)

    def grad_stats(self, grads, norm_type=2.0):
        torch.set_grad_enabled(False)
        return super().grad_stats(grads, norm_type)


class EntersInferenceMode(Portable):
    fails = ("hooks_leave_torchs_state_as_it_was",)

    def update_scale_(self, state, found_inf, schedule):
        super().update_scale_(state, found_inf, schedule)
        if not UNDO:
            mode = torch.inference_mode()
            UNDO.append(lambda: mode.__exit__(None, None, None))
            mode.__enter__()


class LeavesAutocastOn(Portable):
    fails = ("hooks_leave_torchs_state_as_it_was",)

    def cast(self, tensors, dtype, out=None):
        torch.set_autocast_enabled("cpu", True)
        return super().cast(tensors, dtype, out)


class StartsAThreadPerCall(Portable):
    fails = ("hooks_leave_no_thread_behind",)

    def grad_stats(self, grads, norm_type=2.0):
        threading.Thread(target=time.sleep, args=(0.5,), daemon=True).start()
        return super().grad_stats(grads, norm_type)


class AllocatesToSayWhy(Portable):
    fails = ("questions_do_no_work_on_the_device",)

    @property
    def reason(self):
        return f"one launch adds {float(torch.ones(3).sum())}"


class SaysWhyOnce(Portable):
    """`amp backends` shows the reason: this one of a driver that answers once."""

    fails = ("hooks_answer_many_threads_at_once",)

    def __init__(self):
        super().__init__()
        self.answers = ["driver 2.1"]

    @property
    def reason(self):
        return self.answers.pop()


class OpensAFilePerCall(Portable):
    """As of a driver's control file."""

    fails = ("hooks_leave_no_file_open",)

    def grad_stats(self, grads, norm_type=2.0):
        UNDO.append(partial(os.close, os.open(os.devnull, os.O_RDONLY)))
        return super().grad_stats(grads, norm_type)


class WaitsForThreadsOfItsParent(Portable):
    """The threads of a pool do not follow a fork."""

    fails = ("hooks_work_in_a_forked_process",)

    def __init__(self):
        super().__init__()
        self.pool = ThreadPoolExecutor(1)

    def grad_stats(self, grads, norm_type=2.0):
        return self.pool.submit(super().grad_stats, grads, norm_type).result(timeout=1.0)


class RefusesAForkedProcess(Loopback):
    fails = ("hooks_work_in_a_forked_process",)

    def __init__(self):
        super().__init__()
        self.process = os.getpid()

    def supported_dtypes(self):
        if os.getpid() != self.process:
            raise RuntimeError("the driver cannot start again in a forked process")
        return super().supported_dtypes()


class SharesABuffer(Portable):
    fails = ("kernels_serve_many_threads_at_once",)

    shared = None

    def grad_stats(self, grads, norm_type=2.0):
        SharesABuffer.shared = grads
        time.sleep(0.001)
        return super().grad_stats(list(SharesABuffer.shared), norm_type)


class RefusesTheScaler(Loopback):
    fails = ("scaler_is_admitted",)

    def scaler_refusal(self):
        return Refusal("no loss scaling here")


class HasNoName(Portable):
    fails = ("kernels_are_named",)

    name = ""


class RefusesFloat32(Loopback):
    fails = ("float32_is_admitted",)

    def autocast_refusal(self, dtype):
        return Refusal("no float32 here") if dtype is torch.float32 else super().autocast_refusal(dtype)


class MakesKernelsAnew(Loopback):
    fails = ("kernels_are_made_once",)

    def kernels(self):
        return Portable()


class TakesTheThreads(Portable):
    fails = ("hooks_leave_torchs_state_as_it_was",)

    def cast(self, tensors, dtype, out=None):
        torch.set_num_threads(1)
        return super().cast(tensors, dtype, out)


class FlushesSubnormals(Portable):
    fails = ("hooks_leave_torchs_state_as_it_was",)

    def update_scale_(self, state, found_inf, schedule):
        torch.set_flush_denormal(True)
        super().update_scale_(state, found_inf, schedule)


class WarnsEachTime(Portable):
    fails = ("hooks_say_nothing_once_they_have_run",)

    def cast(self, tensors, dtype, out=None):
        warnings.warn("the slow kernels are in use", stacklevel=2)
        return super().cast(tensors, dtype, out)


class PrintsEachTime(Portable):
    fails = ("hooks_say_nothing_once_they_have_run",)

    def add_(self, totals, grads):
        sys.stdout.write(f"adding {len(grads)} tensors\n")
        super().add_(totals, grads)


class DrawsRandomNumbers(Portable):
    fails = ("hooks_leave_torchs_state_as_it_was",)

    def grad_stats(self, grads, norm_type=2.0):
        torch.rand(1)
        return super().grad_stats(grads, norm_type)


class AnswersOneThreadAtATime(Loopback):
    fails = ("hooks_answer_many_threads_at_once",)

    asked = False

    def availability(self):
        if AnswersOneThreadAtATime.asked:
            return Availability(False, "the driver is busy")
        AnswersOneThreadAtATime.asked = True
        time.sleep(0.001)
        AnswersOneThreadAtATime.asked = False
        return super().availability()


class RefusesWithAWord(Loopback):
    fails = ("supported_dtypes_are_admitted_and_others_refused_in_words",)

    def autocast_refusal(self, dtype):
        found = super().autocast_refusal(dtype)
        return found and Refusal(found.message, error="yes")
