"""What torch's ops on lists of tensors (``_foreach_*_``) leave out under a `TorchDispatchMode`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from amp_core._torch.dispatcher import Overload, arguments, dispatcher_name, is_mutable, overloads_of
from amp_core._torch.dynamo import never_compile
from amp_core._torch.features import Feature
from amp_core._torch.op_kernels import POLICIES, all_op_names, install, native_kernel
from amp_core.common.once import once

# The first key of every call while a mode is active, and of no other call.
_KEY = "PythonTLSSnapshot"

_LIST_WRITES = Feature(
    "list_writes",
    "what _foreach_ ops write under a TorchDispatchMode is not seen: call invalidate() of cached_casts and "
    "master_weights, and use no GradScaler(overlap=True) there",
    probed=("PythonTLSSnapshot",),
)


@_LIST_WRITES.probe
def _check_key() -> None:
    if POLICIES.works():  # otherwise they are what is off
        native_kernel("aten::_foreach_zero_", _KEY)


@once
def see_list_writes() -> None:
    """From now on, let writes by ``_foreach_`` ops move version counters under dispatch modes as elsewhere.

    Their kernels consist of other ops, one per tensor, which move the counters; below a mode these do not.
    Without a mode nothing is called.
    """
    if not (POLICIES.works() and _LIST_WRITES.works_or_warn()):
        return
    packets = {name.partition(".")[0] for name in all_op_names() if name.startswith("aten::_foreach_")}
    for packet in packets:
        for op in overloads_of(getattr(torch.ops.aten, packet.removeprefix("aten::"))).values():
            if is_mutable(op):
                _removers.append(install(dispatcher_name(op), _KEY, _counting(op)))


_removers: list[Callable[[], None]] = []  # a kernel lives as long as its remover


def _counting(op: Overload) -> Callable[..., Any]:
    native = native_kernel(dispatcher_name(op), _KEY)
    written = [(i, a.name) for i, a in enumerate(arguments(op)) if a.alias_info and a.alias_info.is_write]

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        result = native(keyset, *args, **kwargs)
        for place, name in written:
            tensors: Sequence[Tensor] = args[place] if place < len(args) else kwargs[name]
            increment_version([tensor for tensor in tensors if not tensor.is_inference()])
        return result

    never_compile(kernel)
    return kernel
