"""Wrong in an attribute, or in a hook for some dtypes; `fails` names the checks that must say so."""

from __future__ import annotations

import torch

from amp_core.plugin import Refusal
from amp_core.testing import Loopback

NAMES, ALIKE = ("backend_names_its_device_and_contract",), ("hooks_answer_alike_in_every_context",)


class CastsADeviceThatNobodyHas(Loopback):
    fails = NAMES
    also_casts = frozenset({"xla_"})


class IsMistakenForAnotherDevice(Loopback):
    fails = NAMES
    aliases = ("cuda",)


class IsMistakenForANameThatIsNeverFound(Loopback):
    fails = NAMES
    aliases = ("Processor",)


class CollectsGradientsByMebibytes(Loopback):
    fails = NAMES
    grad_bucket_nbytes = 32


class RefusesOneDtypeWithoutGradients(Loopback):
    fails = ALIKE

    def autocast_refusal(self, dtype):
        if dtype is torch.bfloat16 and not torch.is_grad_enabled():
            return Refusal("bfloat16 is for training")
        return super().autocast_refusal(dtype)


class SupportsLessUnderAnotherDefaultDtype(Loopback):
    fails = ALIKE

    def supported_dtypes(self):
        return super().supported_dtypes()[: 2 if torch.get_default_dtype() is torch.float32 else 1]


class KnowsSomeDtypesAlone(Loopback):
    fails = ("questions_do_no_work_on_the_device",)

    def dtype_reason(self, dtype):
        reasons = {
            torch.float64: "it is too wide",
            torch.int32: "it is no float",
            torch.bool: "it is no number",
        }
        return reasons[dtype]


class ListsProductsAlone(Loopback):
    fails = ("region_follows_every_rule",)
    op_lists = {"lower_precision_fp": "mm addmm bmm linear"}  # noqa: RUF012
