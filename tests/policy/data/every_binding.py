"""Run the samples of torch's own tests, each op also by the function that policies run. For test_bindings.py.

It needs a process: under a mode, the dispatcher calls its kernels even when they are removed.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db

from amp_core._torch.dispatcher import Overload, entry_of, overloads_of
from amp_core._torch.op_kernels import all_op_names, dispatch_key, install, set_excluded

KEY = dispatch_key("AutocastCPU")
FACTORIES = {"aten::empty_like", "aten::sparse_coo_tensor"}  # no policy has a rule for them
calls, differ = Counter[str](), set[str]()


def entries() -> Iterator[tuple[Overload, Callable[..., Any]]]:
    """Yield every op that policies do not run by its overload, with what they run."""
    for name in sorted({n.partition(".")[0] for n in all_op_names() if n.startswith("aten::")} - FACTORIES):
        packet = getattr(torch.ops.aten, name.removeprefix("aten::"))
        for op in overloads_of(packet).values():
            if entry_of(op) is not op._op:
                yield op, entry_of(op)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        if (one.dtype, one.shape, one.layout) != (other.dtype, other.shape, other.layout):
            return False
        return one.layout is not torch.strided or torch.allclose(one, other, 0, 0, equal_nan=True)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other or one != one  # NaN


def kernel(op: Overload, entry: Callable[..., Any], keyset: Any, *args: Any, **kwargs: Any) -> Any:
    set_excluded(KEY, True)
    try:
        copies = [a.clone() if isinstance(a, torch.Tensor) and op._schema.is_mutable else a for a in args]
        state = torch.get_rng_state()
        result = op._op(*args, **kwargs)
        torch.set_rng_state(state)
        calls[op.name()] += 1
        if not same(result, entry(*copies, **kwargs)):
            differ.add(op.name())
        return result
    finally:
        set_excluded(KEY, False)


installed = [
    install(op.name(), "AutocastCPU", functools.partial(kernel, op, entry)) for op, entry in entries()
]
for info in op_db:
    if info.name.startswith("jiterator") or torch.float32 not in info.supported_dtypes("cpu"):
        continue
    for sample in list(info.sample_inputs("cpu", torch.float32))[:8]:
        with torch.autocast("cpu"):
            info.op(sample.input, *sample.args, **sample.kwargs)
assert not differ, differ
assert len(calls) > 200, len(calls)
