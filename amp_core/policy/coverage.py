"""Which heavy ops of the installed torch no rule covers."""

from __future__ import annotations

import functools
import re

from amp_core._torch.dispatcher import is_mutable, is_view
from amp_core._torch.op_kernels import all_op_names, has_kernel
from amp_core.policy import names
from amp_core.policy import rules as r
from amp_core.policy.op_policy import OpPolicy

PRODUCT, REDUCTION, CUSTOM = "matrix product", "reduction", "custom op"

_PRODUCTS = re.compile(
    r"(^|_)(mm|bmm|addmm|addmv|addr|mv|dot|vdot|matmul|linear|trilinear|conv\d?d?|convolution|attention|rnn|lstm"
    r"|gru)(_|\d|$)"
)
_REDUCTIONS = re.compile(
    r"(^|_)(sum|nansum|mean|prod|cumsum|cumprod|logcumsumexp|logsumexp|softmax|norm|var|std|powsum|loss\d?d?"
    r"|cdist)(_|$)"
)
# Derivatives, kernels behind an op that has a rule, and ops on quantized operands.
_INTERNAL = re.compile(
    r"backward|forward|jvp|upsample|linear_combination|helper|cudnn|miopen|mkldnn|nnpack|mps|slow_|depthwise"
    r"|flatten_weight|overrideable|scaled_dot_product|triton|scaled_mm|scaled_addmm|scaled_grouped|int_mm|weight_int|quant"
    r"|sparse|nested|_copy$|foreach|fused|mixed_dtypes|fw_|masked_softmax|norm_interface|native_norm|elemt"
    r"|gather|update"
)
_OF_TORCH = re.compile(
    r"aten|prims?|_?c10d\w*|_dtensor|_native|_test|_?quantiz\w*|debug\w*|export|inductor\w*|mk\w+|onednn"
    r"|profiler|prepacked|rngprims|sparse|static_runtime|symm_mem|xnnpack|fsdp|amp_core_probe"
)


def heavy_ops() -> dict[str, str]:
    """Map each matrix product, reduction and op of another package that is defined now to its kind.

    An op that torch composes of others is left out: the rules of its parts apply.
    """
    kinds = {name: kind for name in all_op_names(_kind) if (kind := _kind(name)) and _computes(name)}
    return {names.in_full(name): kind for name, kind in kinds.items()}


def missing(policy: OpPolicy) -> dict[str, str]:
    """Return the ops of `heavy_ops` that `policy` has no rule for, sorted by kind and name."""
    unruled = {op: k for op, k in heavy_ops().items() if policy.rules.get(op, r.UNCHANGED) == r.UNCHANGED}
    return dict(sorted(unruled.items(), key=lambda item: (item[1], item[0])))


@functools.cache
def _kind(name: str) -> str | None:
    namespace, base, _ = names.split(name)
    if not _OF_TORCH.fullmatch(namespace):
        return CUSTOM
    if namespace != "aten" or _INTERNAL.search(base):
        return None
    if _PRODUCTS.search(base):
        return PRODUCT
    return REDUCTION if _REDUCTIONS.search(base) else None


@functools.cache
def _computes(name: str) -> bool:
    op = names.find(name)
    usable = op is not None and not (is_mutable(op) or is_view(op)) and names.takes_tensor(op)
    return usable and not has_kernel(name, "CompositeImplicitAutograd")
