"""Resolve the op names that users write to the dispatcher's overloads."""

from __future__ import annotations

import difflib
import fnmatch
import functools
import re
import sys
from collections.abc import Mapping
from typing import TypeGuard

import torch

from amp_core._torch.dispatcher import (
    Overload,
    Packet,
    arguments,
    dispatcher_name,
    is_mutable,
    is_view,
    op_text,
    overloads_of,
)
from amp_core._torch.op_kernels import all_op_names
from amp_core.errors import PolicyError

# Python names of ops whose schemas have another name.
_ALIASES = {
    "cross_entropy": "cross_entropy_loss",
    "pad": "constant_pad_nd",
}


def overloads(name: object) -> list[Overload]:
    """Return the overloads that `name` selects.

    Args:
        name: ``"softmax"`` (every overload of ``aten::softmax`` that autocast can see),
            ``"aten::softmax.int"`` (that overload only), ``"mylib::myop"``, a glob such as ``"linalg_*"``,
            or an op object from ``torch.ops`` or ``torch.library.custom_op``.

    Raises:
        PolicyError: there is no such op; the message suggests similar names.
    """
    text = _text(name)
    if _is_glob(text):
        return _matching(text)
    namespace, base, overload = split(text)
    packet = _packet(namespace or "aten", base)
    if packet is None:
        raise PolicyError(_unknown(text))
    if overload:
        return [_overload(packet, overload)]
    if isinstance(name, Overload) and "default" in overloads_of(packet):
        return [packet.default]
    return _castable(packet)


_OP = re.compile(r"[!-9;-~]+::[A-Za-z_]\w*(\.\w+)?", re.ASCII)  # what torch can parse
_FUNCTION = re.compile(r"[^\s:*?\[]+:[^\W\d][\w.]*")  # importlib loads modules of any name


def full_names(name: object) -> list[str]:
    """Return the full names of all that `name` selects, including what is not imported yet.

    Args:
        name: as for `overloads`; also ``"package.module:Class"``, a subclass of ``torch.autograd.Function``,
            and an op in a namespace of which nothing is defined yet.

    Raises:
        PolicyError: as for `overloads`; or the module is there, but has no such function.
    """
    if isinstance(name, str) and is_function(name.strip()):
        _check_function(name.strip())
        return [name.strip()]
    if _is_function_class(name):
        return [_name_of_class(name)]
    text = _text(name)
    namespace, base, _ = split(text)
    # The list of all ops takes torch 10 ms, so ask for it only if the op is not there.
    known = not namespace or _is_glob(text) or _packet(namespace, base) is not None
    if not known and not any(n.startswith(f"{namespace}::") for n in all_op_names()):
        _check_form(text)
        return [in_full(text)]
    return [full_name(o) for o in overloads(name)]


def _check_form(name: str) -> None:
    if _OP.fullmatch(name) is None:
        raise PolicyError(
            f"{name!r} cannot be the name of an op, so a rule would have no effect. Write namespace::name or "
            f"namespace::name.overload for one overload; package.module:Class names an autograd function."
        )


def _name_of_class(cls: type[torch.autograd.Function]) -> str:
    if "<locals>" in cls.__qualname__:
        raise PolicyError(
            f"{cls.__module__}:{cls.__qualname__} is defined inside a function, and rules find an autograd "
            f"function by its name. Define it at the top level of a module, or in a class there."
        )
    return f"{cls.__module__}:{cls.__qualname__}"


def is_function(name: str) -> bool:
    """Return whether `name` has the form ``package.module:Class``, and so names an autograd function."""
    return _FUNCTION.fullmatch(name) is not None


def _check_function(name: str) -> None:
    path, _, qualname = name.partition(":")
    module = sys.modules.get(path)
    if module is None or path == "__main__":  # a script defines its classes as it goes
        return
    try:
        found = functools.reduce(getattr, qualname.split("."), module)
    except AttributeError:
        functions = [key for key, value in vars(module).items() if _is_function_class(value)]
        near = difflib.get_close_matches(qualname, functions, n=1)
        hint = f"Did you mean '{path}:{near[0]}'?" if near else "Name the module that defines it."
        raise PolicyError(
            f"The module {path} has no {qualname!r}, so a rule would have no effect. {hint}"
        ) from None
    if not _is_function_class(found):
        raise PolicyError(
            f"{name} is no subclass of torch.autograd.Function. Give rules to modules by "
            f"amp_core.apply_policy, and to ops by their names in torch.ops."
        )


def _is_function_class(value: object) -> TypeGuard[type[torch.autograd.Function]]:
    return isinstance(value, type) and issubclass(value, torch.autograd.Function)


def find(name: str) -> Overload | None:
    """Return the overload whose full name is `name` (``aten::mm.default``), if torch has it."""
    namespace, base, overload = split(name)
    packet = _packet(namespace, base)
    return None if packet is None else overloads_of(packet).get(overload or "default")


def without_lost(rules: Mapping[str, str]) -> dict[str, str]:
    """Return `rules`, which another torch may have written, but for ops that this one lacks."""
    return {op: rule for op, rule in rules.items() if not op.startswith("aten::") or find(op) is not None}


def full_name(overload: Overload) -> str:
    """Return ``namespace::name.overload``, as in ``torch.ops``: ``aten::mm.default``, ``aten::softmax.int``.

    The dispatcher omits ``.default``. Here it distinguishes the default overload from the op as a whole.
    """
    return in_full(dispatcher_name(overload))


def in_full(name: str) -> str:
    """Return the full name of the overload that the dispatcher calls `name`."""
    return name if split(name)[2] else f"{name}.default"


def split(name: str) -> tuple[str, str, str]:
    """Return the namespace, base name and overload in the name of an op; empty where it has none."""
    namespace, _, rest = name.rpartition("::")
    base, _, overload = rest.partition(".")
    return namespace, base, overload


def short(op: str) -> str:
    """Return a full name without ``aten::`` and ``.default``, for people."""
    return op.removeprefix("aten::").removesuffix(".default")


def _text(name: object) -> str:
    text = op_text(name)
    if text is not None:
        return text
    if isinstance(name, str) and name.strip():
        text = name.strip().removeprefix("torch.").removeprefix("nn.functional.")
        return _ALIASES.get(text, text)
    raise PolicyError(f"Name an op by a string or by an op object from torch.ops, not by {name!r}.")


def _packet(namespace: str, base: str) -> Packet | None:
    try:
        found = getattr(getattr(torch.ops, namespace), base)
    except (AttributeError, RuntimeError, TypeError):  # the last for text that is no UTF-8
        return None
    # A namespace has attributes of its own, such as `name`.
    return found if isinstance(found, Packet) else None


def _overload(packet: Packet, overload: str) -> Overload:
    known = overloads_of(packet)
    if overload not in known:
        legal = ", ".join(known)
        raise PolicyError(f"{op_text(packet)} has no overload {overload!r}; it has: {legal}.")
    return known[overload]


def _castable(packet: Packet) -> list[Overload]:
    """Return the functional overloads that take a tensor, or the mutating ones if none is functional."""
    with_tensor = [o for o in overloads_of(packet).values() if takes_tensor(o)]
    functional = [o for o in with_tensor if not is_mutable(o)]
    in_place = [o for o in with_tensor if not any(a.is_out for a in arguments(o))]
    castable = functional or in_place or with_tensor
    if not castable:
        raise PolicyError(f"{op_text(packet)} takes no tensor, so no rule can apply to it.")
    return castable


def takes_tensor(overload: Overload) -> bool:
    """Return whether an argument of the op is a tensor or holds tensors."""
    return any("Tensor" in str(a.real_type) for a in arguments(overload))


def _is_glob(text: str) -> bool:
    return any(c in text for c in "*?[")


def _matching(glob: str) -> list[Overload]:
    pattern = glob if "::" in glob else f"aten::{glob}"
    bases = {name.partition(".")[0] for name in all_op_names()}
    matches: list[Overload] = []
    for name in sorted(fnmatch.filter(bases, pattern)):
        packet = _packet(*split(name)[:2])
        usable = [] if packet is None else overloads_of(packet).values()
        matches += [o for o in usable if takes_tensor(o) and not is_mutable(o) and not is_view(o)]
    if not matches:
        hint = "" if pattern.startswith("aten::") else " First import the module that defines its ops."
        raise PolicyError(
            f"The glob {glob!r} matches no op that takes a tensor, writes to none and returns no view.{hint}"
        )
    return matches


def _unknown(text: str) -> str:
    near = near_names(text)
    hint = f" Did you mean {' or '.join(repr(n) for n in near)}?" if near else ""
    if "::" in text and not text.startswith("aten::"):
        hint += " Other ops of that namespace are defined: first import the module that defines this one."
    return f"torch {torch.__version__} has no op {text!r}.{hint}"


def near_names(text: str) -> list[str]:
    """Return up to three op names similar to `text`."""
    namespace, wanted, rest = split(text)
    known = {base for space, base, _ in map(split, all_op_names()) if space == (namespace or "aten")}
    known |= set() if namespace else {*_ALIASES}
    # torch.linalg.inv; F.gelu, or aten.mm.default, as torch prints ops
    parts = [*reversed(rest.split("."))]
    close = [name for name in (f"{wanted}_{rest}".replace(".", "_"), *parts) if name in known][:1]
    for part in (wanted, *parts):
        close = close or difflib.get_close_matches(part, sorted(known), n=3, cutoff=0.6)
    return [name if namespace in ("", "aten") else f"{namespace}::{name}" for name in close]
