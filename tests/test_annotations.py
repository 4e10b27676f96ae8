"""What tools that build objects from annotations, such as jsonargparse, can read of public callables."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, get_type_hints

import pytest

import amp_core
from amp_core.formats import Quantization, Quantized, Recipe

LATE = {
    # Their import takes a tenth of amp-core's own, and few programs have recipes.
    "Quantization": Quantization,
    "Quantized": Quantized,
    "Recipe": Recipe,
    "MixedPrecisionPolicy": Any,  # the import of FSDP takes a second
    "SummaryWriter": Any,  # of tensorboard, which may be missing
}
MODULES = ("", ".callbacks", ".debugging", ".formats", ".kernels", ".plugin", ".policy", ".testing")


def functions(made: Any) -> Iterator[Callable[..., Any]]:
    """Yield `made`, or the public methods that amp-core defines of a class, and what constructs it."""
    if not isinstance(made, type):
        yield made
        return
    for cls in made.__mro__:
        for name, value in vars(cls).items() if cls.__module__.startswith("amp_") else ():
            plain = getattr(value, "__func__", getattr(value, "fget", value))
            if inspect.isfunction(plain) and (name == "__init__" or not name.startswith("_")):
                yield plain


def public() -> Iterator[Callable[..., Any]]:
    for module in (importlib.import_module(f"amp_core{name}") for name in MODULES):
        for name in module.__all__:
            made = getattr(module, name)
            if isinstance(made, type) or inspect.isfunction(made):
                yield from functions(made)


def test_every_annotation_resolves() -> None:
    """A tool that reads annotations stops at a `NameError`, for a name that only type checkers import."""
    unresolved = {}
    found = {f"{each.__module__}.{each.__qualname__}": each for each in public()}
    for name, each in found.items():
        try:
            get_type_hints(each, localns=LATE)
        except NameError as error:
            unresolved[name] = str(error)
    assert not unresolved
    assert len(found) > 250


@pytest.mark.parametrize("made", [amp_core.GradScaler, amp_core.DelayedScales, amp_core.NonFiniteError])
def test_what_users_configure_resolves_alone(made: type) -> None:
    """A command line cannot be built from a scaler's arguments without names that its module lacks."""
    assert get_type_hints(made.__init__)  # type: ignore[misc]
