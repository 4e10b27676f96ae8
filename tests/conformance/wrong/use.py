"""Wrong in a way that regions and scalers meet; `fails` names the checks that must say so."""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch

from amp_core.kernels import Portable
from amp_core.plugin import Refusal
from amp_core.policy import OpPolicy
from amp_core.testing import Loopback

PRODUCTS = ("mm", "bmm", "matmul", "linear", "addmm", "baddbmm")


class ProductsStayInFloat32(Loopback):
    fails = (
        "region_computes_in_the_default_dtype",
        "region_computes_in_each_supported_dtype",
        "regions_nest_and_restore",
        "region_belongs_to_its_thread",
        "region_as_a_decorator",
        "region_compiles",
        "custom_bwd_runs_as_the_forward_did",
    )

    def op_policy(self):
        return OpPolicy.default("cpu").override(dict.fromkeys(PRODUCTS, "fp32"))


class PolicyOfEachCall(Loopback):
    fails = ("policy_is_stable",)

    def __init__(self):
        super().__init__()
        self.ops = itertools.cycle(["exp", "log"])

    def op_policy(self):
        return OpPolicy.default("cpu").override({next(self.ops): "fp32"})


class PolicyOfTheFirstCall(Loopback):
    """Regions keep the first answer."""

    fails = ("region_follows_the_rules_for_common_ops",)
    asked = 0

    def op_policy(self):
        self.asked += 1
        policy = OpPolicy.default("cpu")
        return policy if self.asked == 1 else policy.override({"softmax": "fp32"})


class RefusesInOtherWordsEachTime(Loopback):
    fails = ("region_refuses_an_unsupported_dtype_as_the_backend_says",)

    def __init__(self):
        super().__init__()
        self.words = itertools.cycle(["It has no such dtype.", "Choose another one."])

    def autocast_refusal(self, dtype):
        found = super().autocast_refusal(dtype)
        return None if found is None else Refusal(next(self.words))


class DefaultDtypeIsSetWhenAsked(Loopback):
    fails = ("region_ends_with_an_exception",)

    def default_dtype(self):
        dtype = torch.get_autocast_dtype("cpu")
        torch.set_autocast_dtype("cpu", torch.float16 if dtype is torch.bfloat16 else torch.bfloat16)
        return torch.bfloat16


class MultipliesTwice(Portable):
    fails = (
        "scaler_steps_with_unscaled_gradients",
        "scaler_unscales_once",
        "scaler_clips_by_the_true_norm",
    )

    def multiply_(self, grads, factor, found_inf=None):
        super().multiply_(grads, factor, found_inf)
        super().multiply_(grads, factor, found_inf)


class FindsNothing(Portable):
    fails = ("scaler_skips_a_step_with_inf_or_nan", "scaler_follows_the_state_machine")

    def multiply_(self, grads, factor, found_inf=None):
        super().multiply_(grads, factor, None)


class LooksAtFullVectorsOnly(Portable):
    fails = ("scaler_finds_one_bad_element_in_any_place",)

    def multiply_(self, grads, factor, found_inf=None):
        super().multiply_(grads, factor, None)
        whole = [grad.flatten()[: grad.numel() // 8 * 8] for grad in grads]
        super().multiply_([part.clone() for part in whole], factor, found_inf)


class RemembersAnOverflow(Portable):
    fails = ("scaler_decides_per_optimizer",)

    def __init__(self):
        super().__init__()
        self.overflowed = torch.zeros(())

    def multiply_(self, grads, factor, found_inf=None):
        super().multiply_(grads, factor, found_inf)
        if found_inf is not None:
            found_inf.copy_(self.overflowed.copy_(torch.maximum(self.overflowed, found_inf)))


class NormIsASumOfSquares(Portable):
    fails = ("scaler_clips_by_the_true_norm",)

    def grad_stats(self, grads, norm_type=2.0):
        stats = super().grad_stats(grads, norm_type)
        return replace(stats, norm=stats.norm**2)


class NormDependsOnTheCall(Portable):
    fails = ("grad_stats_is_the_same_every_time",)
    calls = 0

    def grad_stats(self, grads, norm_type=2.0):
        self.calls += 1
        stats = super().grad_stats(grads, norm_type)
        return replace(stats, norm=stats.norm * (1 + self.calls % 2 * 2**-23))


class PrepareWrites(Portable):
    fails = ("prepare_only_reads",)

    def prepare(self, tensors, layout=None):
        for tensor in tensors:
            tensor.add_(0.0)  # minus zero becomes zero
        return tensors
