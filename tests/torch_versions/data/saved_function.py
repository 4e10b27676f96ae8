"""Save a compiled function that takes a region, or load it and call it: ``save`` or ``load``, file, op."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from amp_core import OpPolicy, autocast


def product(x: Tensor, region: Any) -> Tensor:
    with region:
        return x @ x


mode, path, op = sys.argv[1:]
given = torch.ones(2, 2), autocast("cpu", policy=OpPolicy.default("cpu").override({op: "fp32"}))
compiled: Any = torch.compile(product, backend="aot_eager", fullgraph=True)
if mode == "save":
    compiled.aot_compile((given, {})).save_compiled_function(path)
else:
    compiled(*given)  # so that this policy, too, is the first of its process
    with open(path, "rb") as file:
        loaded: Any = torch.compiler.load_compiled_function(file)
    try:
        print(loaded(*given).dtype)
    except RuntimeError as error:
        print("autocast changed" in str(error))
