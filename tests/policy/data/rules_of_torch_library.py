"""An op with a rule by ``torch.library.register_autocast``, under modes, recordings and a policy."""

from __future__ import annotations

import torch
from torch.utils.flop_counter import FlopCounterMode

from amp_core import OpPolicy, autocast, record


@torch.library.custom_op("amp_core_rules::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    """Return twice `x`."""
    return x * 2


double.register_fake(lambda x: x * 2)
torch.library.register_autocast("amp_core_rules::double", "cpu", torch.bfloat16)
X = torch.ones(4)


def check() -> None:
    """Run the op in regions: alone, under a mode, recorded."""
    for region in (torch.autocast("cpu"), autocast("cpu")):
        with region:
            assert double(X).dtype is torch.bfloat16
        with region, FlopCounterMode(display=False):
            assert double(X).dtype is torch.bfloat16
        with record(), region:
            assert double(X).dtype is torch.bfloat16


check()
override = OpPolicy.default("cpu").override({double: "fp32"})
with autocast("cpu", policy=override), FlopCounterMode(display=False):
    assert double(X.bfloat16()).dtype is torch.float32
check()
