"""The private torch names for what a tensor is: its version, its memory, a shard."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from amp_core._torch.features import Feature


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is sharded over processes, without importing ``torch.distributed.tensor``."""
    return is_dtensor_type(type(tensor))


def is_dtensor_type(kind: type) -> bool:
    """Whether `kind` is the class ``DTensor``."""
    return kind.__name__ == "DTensor"  # the import takes a second


def part_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a DTensor, which shares its memory; another tensor as it is."""
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():  # otherwise it is a new view
        part: torch.Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return part


def summed(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of a DTensor of which each rank has a summand, replicated; another one as it is."""
    from torch.distributed.tensor import Partial, Replicate

    placements = tensor.placements  # type: ignore[attr-defined]
    if not any(isinstance(each, Partial) for each in placements):
        return tensor
    whole = [Replicate() if isinstance(each, Partial) else each for each in placements]
    result: torch.Tensor = tensor.redistribute(placements=whole)  # type: ignore[attr-defined]
    return result


def beside(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return `tensor`, which every rank has whole, as one that ops take together with `other`."""
    if not is_dtensor(other):
        return tensor
    from torch.distributed.tensor import DTensor, Replicate

    mesh: Any = other.device_mesh  # type: ignore[attr-defined]
    copies: torch.Tensor = DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return copies


def uncut(tensor: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """Return a DTensor whose shards hold whole blocks of `size` along `dim`; another tensor as it is."""
    if not is_dtensor(tensor):
        return tensor
    from torch.distributed.tensor import Replicate, Shard

    mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
    placements = tensor.placements  # type: ignore[attr-defined]
    cut = [getattr(each, "dim", None) == dim % tensor.dim() for each in placements]
    parts = math.prod(itertools.compress(mesh.shape, cut))
    in_order = all(type(each) is Shard for each in itertools.compress(placements, cut))
    if in_order and tensor.shape[dim] % (size * parts) == 0:
        return tensor
    whole = [Replicate() if here else each for here, each in zip(cut, placements, strict=True)]
    gathered: torch.Tensor = tensor.redistribute(placements=whole)  # type: ignore[attr-defined]
    return gathered


# Makes an instance of a subclass without memory, whose ops run by its ``__torch_dispatch__``.
make_wrapper = Feature("wrappers", "the conformance kit checks no kernel on subclasses of Tensor").function(
    "torch.Tensor._make_wrapper_subclass"
)


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether ops on `tensor` run by its own ``__torch_dispatch__``, as on quantised weights and DTensors."""
    return type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def numbers(vector: torch.Tensor) -> list[Any]:
    """Return the values of a vector; torch reads those of a wrapper one by one only."""
    return [value.item() for value in vector] if is_wrapper(vector) else vector.tolist()


_VERSIONS = Feature(
    "versions",
    "cached_casts and master_weights cast weights at every use, GradScaler(overlap=True) reads gradients "
    "twice, and recordings tell every cast apart, which is slower; clipping each micro-batch is not refused",
)
_version: Any = _VERSIONS.value("torch.Tensor._version", None)
_unlike_any = itertools.count()

# The number that every write in place moves. Bound to the C getter: a call costs no Python frame.
version_of: Callable[[torch.Tensor], int] = (
    _VERSIONS.fallback(lambda _tensor: next(_unlike_any)) if _version is None else _version.__get__
)
counts_writes: Callable[[], bool] = _VERSIONS.works  # otherwise versions differ at each look
_IDENTITY = Feature(
    "tensor_identity", "cached_casts and master_weights do not notice torch.utils.swap_tensors on weights"
)
_cdata: Any = _IDENTITY.value("torch.Tensor._cdata", None)

# The address of the C++ tensor, which swap_tensors exchanges: a weight keeps its id, and perhaps its memory.
identity_of: Callable[[torch.Tensor], int] = (
    _IDENTITY.fallback(lambda _tensor: 0) if _cdata is None else _cdata.__get__
)
is_tensor_view: Callable[[torch.Tensor], bool] = Feature(
    "tensor_views",
    "cached_casts and master_weights cast weights at every use, and AccumulationWindow copies gradients, "
    "which is slower",
).function("torch.Tensor._is_view", lambda _tensor: True, check=lambda f: f(torch.ones(1)))

_BASES = Feature("view_bases", "delayed scales of a weight that ops get as a view start anew in each call")
_base_of: Any = _BASES.value("torch.Tensor._base", None)


def base_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that `tensor` is a view of; `tensor` itself if it is none."""
    base: torch.Tensor | None = _base_of.__get__(tensor) if _BASES.works_or_warn() else None
    return tensor if base is None else base


_SHARDS = Feature(
    "fsdp_shards",
    "gradients of FullyShardedDataParallel are taken for whole ones: pass process_group=model.process_group",
    "torch.distributed.fsdp._common_utils.FSDP_FLATTENED",
    "torch.distributed.fsdp._flat_param.FlatParameter._init_metadata",
    probed=("FlatParameter._fsdp_flattened", "FlatParameter._unpadded_unsharded_size"),
)


@_SHARDS.probe
def _check_shards() -> None:
    from torch.distributed.fsdp._common_utils import FSDP_FLATTENED
    from torch.distributed.fsdp._flat_param import FlatParameter

    attributes = {FSDP_FLATTENED, *FlatParameter._init_metadata.__code__.co_names}
    if not {"_fsdp_flattened", "_unpadded_unsharded_size"} <= attributes:
        raise RuntimeError("FSDP marks its parameters in another way")


def fsdp_shards(params: Sequence[torch.Tensor]) -> set[int]:
    """Return the ``id`` of each flattened piece of a ``FullyShardedDataParallel`` (FSDP1) model.

    With ``NO_SHARD`` every rank has the whole parameters.
    """
    if "torch.distributed.fsdp" not in sys.modules:
        return set()
    # Dynamo cannot trace the probe, which takes a lock.
    if not (torch.compiler.is_dynamo_compiling() or _SHARDS.works_or_warn()):
        return set()
    flattened = [p for p in params if is_flattened(p)]
    whole = {_address(p) for p in flattened if p.dim() > 1}  # a vector beside a matrix is whole, too
    return {id(p) for p in flattened if _is_shard(p) and _address(p) not in whole}


def is_flattened(param: torch.Tensor) -> bool:
    """Whether `param` is of a ``FullyShardedDataParallel`` (FSDP1) model, and so one vector on each rank."""
    return bool(getattr(param, "_fsdp_flattened", False))


def _is_shard(param: torch.Tensor) -> bool:
    whole = getattr(param, "_unpadded_unsharded_size", None)  # of a FlatParameter
    return param.dim() < 2 if whole is None else param.numel() < whole.numel()


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


_MEMORY = Feature(
    "reused_memory",
    "cached_casts and master_weights allocate fresh memory for every cast, which is slower",
    "torch.UntypedStorage._cdata",
)
_use_count = _MEMORY.function("torch._C._storage_Use_Count")


@_MEMORY.probe
def _check_use_count() -> None:
    storage = torch.UntypedStorage(4)  # type: ignore[no-untyped-call]
    counts = [_use_count(storage._cdata)]
    tensor = torch.empty(0, dtype=torch.uint8).set_(storage)
    counts.append(_use_count(tensor.untyped_storage()._cdata))
    if counts != [1, 2]:
        raise RuntimeError(f"it counts {counts} users of memory without and with a tensor")


def is_in_use(storage: torch.UntypedStorage) -> bool:
    """Whether a tensor uses `storage`, of which the caller holds the one Python object."""
    return not _MEMORY.works_or_warn() or bool(_use_count(storage._cdata) > 1)


def users_of_memory(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return how many tensors share the memory of each; zeros where torch cannot tell."""
    if not _MEMORY.works_or_warn():
        return [0 for _ in tensors]
    return [_use_count(tensor.untyped_storage()._cdata) for tensor in tensors]


class StrongStorage:
    """Keeps memory alive, so that its address cannot come back for another tensor."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.cdata = storage


_WEAK = Feature("weak_storages", "cached_casts keeps the memory of weights alive as long as their casts")
_weak_storage = _WEAK.value("torch.multiprocessing.reductions.StorageWeakRef", None)
_is_expired = _WEAK.value("torch.UntypedStorage._expired", None)
_WEAK.attempt(lambda: _is_expired(_weak_storage(torch.UntypedStorage(0)).cdata))  # type: ignore[no-untyped-call]

# A weak reference to memory: tells that the memory of a weight was freed, though its address is in use again.
if TYPE_CHECKING:
    from torch.multiprocessing.reductions import StorageWeakRef

    WeakStorage = StorageWeakRef
else:
    WeakStorage = _weak_storage if _WEAK.complete else _WEAK.fallback(StrongStorage)
is_freed: Callable[[Any], bool] = _is_expired if _WEAK.complete else lambda _storage: False


def weak_memory(tensor: torch.Tensor) -> WeakStorage:
    """Return a weak reference to the memory of `tensor`; of a DTensor's part on this rank."""
    return WeakStorage(part_of(tensor).untyped_storage())  # type: ignore[no-untyped-call]
