"""The functions by which policies run ops: they do what the overload of the schema does."""

from __future__ import annotations

import functools
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from amp_core._torch.dispatcher import Overload, entry_of, overloads_of
from amp_core._torch.op_kernels import all_op_names, dispatch_key, install, set_excluded

KEY = dispatch_key("AutocastCPU")
FACTORIES = {"aten::empty_like", "aten::sparse_coo_tensor"}  # no policy has a rule for them


def faster_entries() -> Iterator[tuple[str, Overload, Callable[..., Any]]]:
    for name in sorted({n.partition(".")[0] for n in all_op_names() if n.startswith("aten::")} - FACTORIES):
        packet = getattr(torch.ops.aten, name.removeprefix("aten::"))
        for op in overloads_of(packet).values():
            if entry_of(op) is not op._op:
                yield op.name(), op, entry_of(op)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        if (one.dtype, one.shape, one.layout) != (other.dtype, other.shape, other.layout):
            return False
        return one.layout is not torch.strided or torch.allclose(one, other, 0, 0, equal_nan=True)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other or one != one  # NaN


@pytest.mark.slow
def test_each_gives_what_the_overload_gives() -> None:
    """Torch's binding takes another overload, or other defaults, and a policy changes the numbers."""
    from torch.testing._internal.common_methods_invocations import op_db

    calls, differ = Counter[str](), list[tuple[str, tuple[Any, ...]]]()

    def kernel(op: Overload, entry: Callable[..., Any], keyset: Any, *args: Any, **kwargs: Any) -> Any:
        set_excluded(KEY, True)
        try:
            copies = [a.clone() if isinstance(a, torch.Tensor) and op._schema.is_mutable else a for a in args]
            state = torch.get_rng_state()
            result = op._op(*args, **kwargs)
            torch.set_rng_state(state)
            calls[op.name()] += 1
            if not same(result, entry(*copies, **kwargs)):
                differ.append((op.name(), args))
            return result
        finally:
            set_excluded(KEY, False)

    with ExitStack() as installed, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, op, entry in faster_entries():
            installed.callback(install(name, "AutocastCPU", functools.partial(kernel, op, entry)))
        for info in op_db:
            if info.name.startswith("jiterator") or torch.float32 not in info.supported_dtypes("cpu"):
                continue
            for sample in list(info.sample_inputs("cpu", torch.float32))[:8]:
                with torch.autocast("cpu"):
                    info.op(sample.input, *sample.args, **sample.kwargs)
    assert not differ
    assert len(calls) > 200


def test_a_function_that_a_program_has_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy's op runs what a program has put in its place in ``torch``, an extension's kernel for one."""
    monkeypatch.setattr(torch, "exp", math.exp)
    assert entry_of(torch.ops.aten.exp.default)(torch.zeros(3)).tolist() == [1.0] * 3
