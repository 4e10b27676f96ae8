"""The private torch names for the kernels of ops on dispatch keys: to read, to add and to remove them."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, cast

import torch

from amp_core._torch.features import Feature
from amp_core._torch.transformed_tensors import show_numbers
from amp_core.common.locks import new_lock

POLICIES = Feature(
    "policies",
    "policies, apply_policy, cached_casts, master_weights and record cannot change or watch how ops are "
    "cast, so regions run by torch's own rules",
    "torch.ops.aten.mm.default._schema",
)
_key_of_name = POLICIES.function("torch._C._dispatch_key_parse")
_keys = POLICIES.function("torch._C.DispatchKeySet")
_all_names = POLICIES.function("torch._C._dispatch_get_all_op_names")
_registrations = POLICIES.function("torch._C._dispatch_get_registrations_for_dispatch_key")
_schema = POLICIES.function("torch._C._dispatch_find_schema_or_throw")
_has_kernel = POLICIES.function("torch._C._dispatch_has_kernel_for_dispatch_key")
_library = POLICIES.function("torch._C._dispatch_library")
_has_fallback = POLICIES.function("torch._C._dispatch_has_backend_fallback")
_get_kernel = POLICIES.function("torch.library.get_kernel")
_dump = POLICIES.function("torch._C._dispatch_dump")
without_modes = POLICIES.function("torch.utils._python_dispatch._disable_current_modes")

_RULES = Feature(
    "library_rules",
    "an op with a rule by torch.library.register_autocast cannot be traced after a policy has changed it",
    "torch.ops.aten.mm.default.py_kernels",
    probed=("CustomOpDef._autocast_dtype",),
)
_key_for_device = _RULES.function("torch._C._dispatch_key_for_device")
_definition = _RULES.function("torch.library._maybe_get_opdef")

_TRACES = Feature(
    "traced_kernels",
    "torch.export of a region may fix the dynamic sizes of a resize, once a policy has changed its rule",
)
_resolve_key = _TRACES.function("torch._ops.resolve_key")
_keys_after = _TRACES.function("torch._C._dispatch_keyset_full_after")


def has_dispatch_key(name: str) -> bool:
    """Whether the dispatcher knows the key `name`."""
    POLICIES.require()
    try:
        _key_of_name(name)
    except RuntimeError:
        return False
    return True


def is_defined(op_name: str) -> bool:
    """Whether the dispatcher has the op; a few exist for TorchScript alone (``index_put_.hacked_twin``)."""
    name, _, overload = op_name.partition(".")
    try:
        _schema(name, overload)
    except RuntimeError:
        return False
    return True


def all_op_names(wanted: Callable[[str], Any] = lambda _name: True) -> list[str]:
    """Return every op that is defined now and `wanted`, as ``namespace::name.overload``.

    The dispatcher also lists what has only a kernel, such as one of `install` for an op of a later import.
    """
    POLICIES.require()
    return [name for name in _all_names() if wanted(name) and is_defined(name)]


def takes_dimension_names(overload: str) -> bool:
    """Whether the overload is one for named tensors, which torch 2.13 has given up.

    They keep the rules that torch compiled in; no policy of amp-core's covers them.
    """
    return "imname" in overload or overload.startswith("names")


def registered(key: str) -> frozenset[str]:
    """Return the ops that have a kernel on dispatch key `key`, C++ and Python alike, without `install`."""
    POLICIES.require()
    ops = (op for op in _registrations(key) if (op, key) not in _added)
    return frozenset(op for op in ops if not takes_dimension_names(op.rpartition("::")[2].partition(".")[2]))


def has_kernel(op_name: str, key: str) -> bool:
    """Whether the op is defined and has a kernel of its own on `key`."""
    POLICIES.require()
    try:
        return bool(_has_kernel(op_name, key))
    except RuntimeError:
        return False


def dispatch_key(name: str) -> Any:
    """Return the dispatch key itself, for `is_excluded` and `set_excluded`."""
    POLICIES.require()
    return _key_of_name(name)


def key_set(key: str) -> Any:
    """Return a set of one dispatch key, for `excluded`."""
    POLICIES.require()
    return _keys(_key_of_name(key))


# Runs a block with the keys of a `key_set` switched off, as torch's own autocast kernels do.
excluded: Callable[[Any], AbstractContextManager[None]] = POLICIES.function(
    "torch._C._ExcludeDispatchKeyGuard"
)
# The same in a third of the time, for what runs at each op: whether a key of `dispatch_key` is off in this
# thread; switch it off or on.
is_excluded: Callable[[Any], bool] = POLICIES.function("torch._C._dispatch_tls_is_dispatch_key_excluded")
set_excluded: Callable[[Any, bool], None] = POLICIES.function(
    "torch._C._dispatch_tls_set_dispatch_key_excluded"
)


def native_kernel(op_name: str, key: str) -> Callable[..., Any]:
    """Return the kernel that `op_name` has on `key` now; call it as ``kernel(keyset, *args, **kwargs)``."""
    POLICIES.require()
    kernel = cast("Callable[..., Any]", _get_kernel(op_name, key).call_boxed)
    if not is_python_kernel(op_name, key):
        return kernel
    rule = _rule_by_torch_library(op_name, key) if _RULES.works_or_warn() else None
    if rule is not None:
        return rule

    def call(*args: Any, **kwargs: Any) -> Any:
        with without_modes():
            return kernel(*args, **kwargs)

    return call


@_RULES.probe
def _check_definitions() -> None:
    names = torch.library.CustomOpDef.__init__.__code__.co_names
    if not {"_autocast_dtype", "_autocast_cpu_dtype"} & {*names}:
        raise RuntimeError("a definition keeps the dtypes of its rules elsewhere")


def _rule_by_torch_library(op_name: str, key: str) -> Callable[..., Any] | None:
    """Return the Python function behind a rule by ``torch.library.register_autocast``, if it can be found."""
    definition = _definition(op_name)
    dtypes = getattr(definition, "_autocast_dtype", None)
    if dtypes is None:  # torch 2.12 and before
        dtypes = {name: getattr(definition, f"_autocast_{name}_dtype", None) for name in ("cpu", "cuda")}
    for device_type, dtype in dtypes.items():
        if dtype is not None and f"Autocast{_key_for_device(device_type)}" == key:
            # Registered already, so this only returns the function.
            return cast("Callable[..., Any]", definition.register_autocast(device_type, dtype))
    namespace, _, name = op_name.partition("::")
    name, _, overload = name.partition(".")
    op = getattr(getattr(getattr(torch.ops, namespace), name), overload or "default")
    rule = op.py_kernels.get(_key_of_name(key))
    return None if rule is None else lambda _keyset, *args, **kwargs: rule(*args, **kwargs)


def traced_kernel(op: Any, keyset: Any, key: str) -> Callable[..., Any] | None:
    """Return torch's Python function for `op` in a trace, below `key`: its C++ would fix dynamic sizes."""
    if not (_TRACES.works_or_warn() and _RULES.works_or_warn()):  # which has `py_kernels`
        return None
    below = (keyset & _keys_after(_key_of_name(key))).highestPriorityTypeId()
    if not str(below).startswith("DispatchKey.Autograd"):
        return None
    return cast("Callable[..., Any] | None", op.py_kernels.get(_resolve_key(op, below)))


def is_python_kernel(op_name: str, key: str) -> bool:
    """Whether the kernel of `op_name` on `key` is a Python function, as those of ``torch.library`` are.

    Under a `TorchDispatchMode`, or for tensors with a ``__torch_dispatch__``, such as fake ones, the
    dispatcher calls the Python function that was registered last, even if it has been removed since.
    """
    found = re.search(rf"^{key}: registered at (.*):\d+ ::", _dump(op_name), re.MULTILINE)
    return found is not None and found[1].endswith(".py")


_installing = new_lock()
"""Held while `install` changes the warning filters, which all threads share."""
_warned_of_override = False
_added: set[tuple[str, str]] = set()
"""Each op that had no kernel on a dispatch key before `install` added one, with the key."""
_idle: dict[str, list[Any]] = {}
"""Namespace -> libraries without a kernel; torch keeps some memory of each that was ever made."""


def install(op_name: str, key: str, kernel: Callable[..., Any]) -> Callable[[], None]:
    """Put `kernel` on `op_name` at `key`; return a function that removes it and restores the earlier one.

    ``torch.library.Library`` does the same at a higher cost per op. The dispatcher warns once per process,
    or always after ``torch.set_warn_always(True)``, that a kernel is overridden; here that is the point, so
    that warning is swallowed.

    Raises:
        TorchFeatureError: torch no longer supports it.
    """
    POLICIES.require()
    show_numbers()
    with _installing:
        return _install(op_name, key, kernel)


def _install(op_name: str, key: str, kernel: Callable[..., Any]) -> Callable[[], None]:
    global _warned_of_override  # noqa: PLW0603  # once per process, as the dispatcher's own flag
    namespace, _, name = op_name.partition("::")
    idle = _idle.setdefault(namespace, [])
    library = idle.pop() if idle else _library("IMPL", namespace, "", __file__, 1)
    remove = functools.partial(_remove, library, idle, (op_name, key))
    overrides = has_kernel(op_name, key)
    if not overrides:
        _added.add((op_name, key))
    if not overrides or (_warned_of_override and not torch.is_warn_always_enabled()):
        library.impl(name, key, kernel, True)
        return remove
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library.impl(name, key, kernel, True)
    _warned_of_override = True
    return remove


def _remove(library: Any, idle: list[Any], op: tuple[str, str]) -> None:
    library.reset()
    _added.discard(op)
    idle.append(library)


@POLICIES.probe
def _check_policies() -> None:
    """Put a kernel on a scratch op and remove it; calls no op, which a mode of the user's could see."""
    scratch = _library("FRAGMENT", "amp_core_probe", "", __file__, 1)
    scratch.define("probe(Tensor x) -> Tensor", "")
    library = _library("IMPL", "amp_core_probe", "", __file__, 1)
    library.impl("probe", "AutocastCPU", lambda keyset, x: x, True)  # noqa: ARG005
    installed = _has_kernel("amp_core_probe::probe", "AutocastCPU")
    known = is_python_kernel("amp_core_probe::probe", "AutocastCPU")
    library.reset()
    if not installed or _has_kernel("amp_core_probe::probe", "AutocastCPU"):
        raise RuntimeError("a kernel cannot be put on an autocast key and removed again")
    if not known:
        raise RuntimeError("the dispatcher does not say which kernels are Python functions")
    key = _key_of_name("AutocastCPU")
    set_excluded(key, is_excluded(key))
    with without_modes(), excluded(_keys(key)):
        _get_kernel("aten::mm", "AutocastCPU")
    if not (_registrations("AutocastCPU") and _all_names() and _has_fallback(_key_of_name("AutocastCPU"))):
        raise RuntimeError("the dispatcher does not list its ops")
    _schema("aten::mm", "")
    if [a.name for a in torch.ops.aten.mm.default._schema.arguments] != ["self", "mat2"]:
        raise RuntimeError("the schema of aten::mm cannot be read")


def install_fallthrough(key: str) -> None:
    """Let ops without a rule fall through `key`, for good, if the key has no fallback yet.

    For PrivateUse1, hpu and xla, whose autocast keys torch leaves bare.
    """
    POLICIES.require()
    if _has_fallback(_key_of_name(key)):
        return
    library = _library("IMPL", "_", key, __file__, 1)
    library.fallback(key, torch.library.fallthrough_kernel)
    _fallthrough.append(library)


_fallthrough: list[Any] = []  # keeps them alive
