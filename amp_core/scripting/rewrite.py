"""Rewrite a function's source so that TorchScript can compile its regions."""

from __future__ import annotations
import __future__

import ast
import functools
import inspect
import itertools
import linecache
import textwrap
import types
from collections.abc import Callable
from typing import Any

import torch

from amp_core._torch.autocast import torch_autocast
from amp_core.common.text import dtype_name
from amp_core.errors import ScriptRegionError
from amp_core.scripting.regions import REGION, RegionRewriter, region_statement
from amp_core.scripting.runtime import Region

Ambient = tuple[tuple[str, torch.dtype], ...]

_numbers = itertools.count()


def rewrite(fn: Callable[..., Any], ambient: Ambient = ()) -> Callable[..., Any]:
    """Return a function equivalent to `fn` that ``torch.jit.script`` can compile.

    Args:
        fn: a function, with or without autocast decorators.
        ambient: regions to wrap around the whole body.
    """
    regions, inner = _undecorated(fn)
    tree, file = _parse(inner)
    names = {**inner.__globals__, **inspect.getclosurevars(inner).nonlocals, REGION: Region}
    rewriter = RegionRewriter(names, file, frozenset(inner.__code__.co_varnames))
    definition = rewriter.visit(tree)
    names.update(_rewritten_callees(inner, names))
    for device, dtype, enabled in reversed([*((d, t, True) for d, t in ambient), *regions]):
        flag = ast.Constant(enabled)
        definition.body = [region_statement(ast.Constant(device), dtype_name(dtype), flag, definition.body)]
    return _compile(definition, inner, names, file)


def _undecorated(fn: Any) -> tuple[list[tuple[str, torch.dtype, bool]], types.FunctionType]:
    """Return the regions that decorators put around `fn`, outermost first, and the undecorated function."""
    regions: list[tuple[str, torch.dtype, bool]] = []
    while region := _decorating_region(fn):
        if region._enabled and getattr(region, "_policy", None) is not None:
            inner = inspect.unwrap(fn)
            raise ScriptRegionError(
                f"{_file_of(inner)}:{inner.__code__.co_firstlineno}: the decorator's region has "
                f"policy= or dtype=torch.float8_e4m3fn, which cannot be compiled; put such a region around "
                f"the call of the scripted function."
            )
        regions.append((region.device, region.fast_dtype, region._enabled))
        fn = fn.__wrapped__
    if not isinstance(fn, types.FunctionType):
        raise TypeError(f"amp_core.script takes a Python function, not {type(fn).__name__}.")
    return regions, fn


def _decorating_region(fn: Any) -> torch.autocast | None:
    cells = getattr(fn, "__closure__", None) or ()
    values = [cell.cell_contents for cell in cells] if hasattr(fn, "__wrapped__") else []
    return next((value for value in values if isinstance(value, torch_autocast)), None)


def _file_of(fn: types.FunctionType) -> str:
    return inspect.getsourcefile(fn) or fn.__code__.co_filename


def _parse(fn: types.FunctionType) -> tuple[ast.FunctionDef, str]:
    """Return the definition of `fn`, with the line numbers of its file, and the file."""
    file = _file_of(fn)
    try:
        lines, first = inspect.getsourcelines(fn)
    except OSError as error:
        raise ScriptRegionError(f"{file}: the source of {fn.__name__} cannot be read.") from error
    tree = ast.parse(textwrap.dedent("".join(lines)))
    ast.increment_lineno(tree, first - 1)
    definition = tree.body[0]
    if not isinstance(definition, ast.FunctionDef):
        raise ScriptRegionError(f"{file}:{first}: amp_core.script takes a function defined by `def`.")
    definition.decorator_list = []
    return definition, file


def _rewritten_callees(fn: types.FunctionType, names: dict[str, Any]) -> dict[str, Any]:
    """Return rewritten versions of the functions with regions that `fn` calls by name."""
    rewritten: dict[str, Any] = {}
    for name in (*fn.__code__.co_names, *fn.__code__.co_freevars):
        callee = names.get(name)
        if callee is not fn and isinstance(callee, types.FunctionType) and _has_regions(callee):
            rewritten[name] = _rewritten_once(callee)
    return rewritten


@functools.lru_cache(maxsize=256)
def _rewritten_once(fn: types.FunctionType) -> Callable[..., Any]:
    return rewrite(fn)


def _has_regions(fn: types.FunctionType) -> bool:
    if _decorating_region(fn) is not None:
        return True
    if fn.__module__.partition(".")[0] in {"torch", "amp_core", "amp_compat"}:
        return False
    values = {**fn.__globals__, **inspect.getclosurevars(fn).nonlocals}
    used = [values.get(name) for name in fn.__code__.co_names]
    return "autocast" in fn.__code__.co_names or any(
        isinstance(value, type) and issubclass(value, torch_autocast) for value in used
    )


def _compile(
    definition: ast.FunctionDef, fn: types.FunctionType, names: dict[str, Any], file: str
) -> Callable[..., Any]:
    source = ast.unparse(ast.fix_missing_locations(ast.Module([definition], []))) + "\n"
    # TorchScript reads the source back from linecache by file name.
    place = f"<amp_core.script {next(_numbers)} of {file}:{fn.__code__.co_firstlineno}>"
    linecache.cache[place] = (len(source), None, source.splitlines(keepends=True), place)
    flags = fn.__code__.co_flags & __future__.annotations.compiler_flag
    exec(compile(source, place, "exec", flags=flags, dont_inherit=True), names)
    new: Callable[..., Any] = names[definition.name]
    new.__module__, new.__qualname__, new.__doc__ = fn.__module__, fn.__qualname__, fn.__doc__
    return new
