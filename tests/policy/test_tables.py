"""Each backend's op lists against the installed torch's dispatcher, op by op."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.autocast_test_lists import AutocastTestLists

from amp_core import OpPolicy
from amp_core._torch.dispatcher import autocast_key
from amp_core._torch.op_kernels import registered
from amp_core.common.op_lists import op_lists
from amp_core.policy import names, rules, tables

DEVICES = ("cpu", "cuda", "maia", "mps", "mtia", "xpu")

# In CUDA builds alone: casts and flattens the weights of an RNN anew, which no rule describes.
WITHOUT_A_RULE = {"aten::_cudnn_rnn"}

# amp-core's own, and installed by a test that ran before.
ADDED = {"aten::_grouped_mm"}

# Since torch 2.15.
LATER = {"aten::linalg_matrix_sqrth.default"}


@pytest.mark.parametrize("device", DEVICES)
def test_lists_and_dispatcher_name_the_same_ops(device: str) -> None:
    """An op that torch casts but the table lacks, or the reverse, makes `explain` and overrides wrong."""
    listed = tables.flatten(op_lists(device))
    existing = {names.find(op).name() for op in listed if names.find(op) is not None}
    torchs = {op.partition("::")[0] for op in existing}  # other tests register ops of their own
    native = {op for op in registered(autocast_key(device)) if op.partition("::")[0] in torchs}
    native -= WITHOUT_A_RULE | ADDED
    if torch.__version__.startswith("2.13"):
        assert existing == native
        assert {op for op in listed if names.find(op) is None} <= LATER
    assert native <= existing


@pytest.mark.parametrize("device", ["cpu", "cuda", "mps", "xpu"])
def test_every_rule_is_what_the_kernel_does(device: str, observe: Callable[[str, str, str], str]) -> None:
    """A wrong rule in a table would make an override that names the same rule a silent no-op."""
    policy = OpPolicy.default(device)
    ruled = {op: rule for op, rule in policy if rule != rules.NATIVE}
    assert not [text for op, rule in ruled.items() if (text := observe(op, rule, device))]
    # The observation can tell: no other rule would pass for these.
    for op, rule in (("aten::mm.default", "fp32"), ("aten::exp.default", "lower_precision_fp")):
        assert observe(op, rule, device)
    assert {op.removesuffix(".default") for op, rule in policy if rule == rules.NATIVE} <= WITHOUT_A_RULE


EXPECTED = {
    rules.LOWER_PRECISION_FP: torch.float16,
    rules.FP32: torch.float32,
    rules.FP32_SET_OPT_DTYPE: torch.float32,
    rules.FP32_APPEND_DTYPE: torch.float32,
    rules.PROMOTE: torch.float32,
}


def test_rules_of_mtia_by_running_ops_on_fake_tensors() -> None:
    """Mtia's Autograd key cannot be recorded on, so its ops run: each must return what its rule says."""
    checked = set()
    with FakeTensorMode(), torch.autocast("mtia", torch.float16):
        lists = AutocastTestLists("mtia")
        for op, args in [
            *_pairs(lists.torch_fp16),
            *_pairs(lists.torch_fp32),
            *_pairs(lists.torch_need_autocast_promote),
        ]:
            policy = OpPolicy.default("mtia")
            ruled = {e.rule for e in policy.explain(op)} - {rules.UNCHANGED}
            if len(ruled) != 1:
                continue
            out = getattr(torch, op)(*args)
            out = out[0] if isinstance(out, tuple) else out
            assert out.dtype is EXPECTED[ruled.pop()], op
            checked.add(op)
    assert len(checked) > 50


def _pairs(entries):
    skipped = (
        "chain_matmul",
        "cross",
        "grid_sampler",
        "cudnn_convolution",
        "cudnn_convolution_transpose",
        "_convolution",
    )
    return [(e[0], e[1]) for e in entries if e[0] not in skipped and len(e) == 2]


def test_an_older_torch_without_an_op_drops_it() -> None:
    """A list entry that the installed torch lacks must not break the default policy."""
    lists = {**tables.SHARED, rules.FP32: tables.SHARED[rules.FP32] + " op_of_a_later_torch"}
    found = OpPolicy.from_lists("mtia", lists).rules
    assert "aten::op_of_a_later_torch.default" not in found
    assert len(found) == len(registered("AutocastMTIA") | ADDED)


def test_an_op_that_no_list_knows_is_native() -> None:
    """A later torch may cast an op that the lists do not name: it must stay as torch has it."""
    lists = {**tables.SHARED, rules.PROMOTE: "addcdiv"}
    assert OpPolicy.from_lists("mtia", lists).rules["aten::dot.default"] == rules.NATIVE


OWN_KERNEL = """
import torch
from amp_core.policy.native_rules import added_rules
library = torch.library.Library("aten", "IMPL")
library.impl("_grouped_mm", torch.library.fallthrough_kernel, "AutocastMTIA")
print(sorted(added_rules("xpu")), sorted(added_rules("mtia")))
"""


def test_a_kernel_of_the_devices_own_keeps_its_op() -> None:
    """amp-core's rule for an op that torch leaves out takes the place of one that the device has for it."""
    # In a process of its own: here, regions of other tests may have registered amp-core's kernel.
    done = subprocess.run([sys.executable, "-c", OWN_KERNEL], capture_output=True, text=True, check=True)
    assert done.stdout == f"{[f'{op}.default' for op in sorted(ADDED)]} []\n"
