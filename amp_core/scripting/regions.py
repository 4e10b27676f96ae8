"""The AST side of `amp_core.script`: rewrites each autocast region, or reports why it cannot."""

from __future__ import annotations

import ast
from typing import Any, NamedTuple, NoReturn

import torch

from amp_core._torch import torchscript as _torch_script
from amp_core._torch.autocast import torch_autocast
from amp_core.common.text import dtype_name
from amp_core.errors import ScriptRegionError

# Order of the positional arguments; the deprecated classes take no device.
_ORDER = ("device_type", "dtype", "enabled", "cache_enabled", "policy")
_DEPRECATED_ORDER = ("enabled", "dtype", "cache_enabled")
_DEPRECATED_PATHS = (["cuda", "amp"], ["cpu", "amp"])
REGION = "__amp_region"
"""The name that refers to `amp_core.scripting.runtime.Region` in rewritten functions."""


class _Region(NamedTuple):
    device: ast.expr
    dtype: str
    enabled: ast.expr


class RegionRewriter(ast.NodeTransformer):
    """Rewrites the regions of one function.

    Args:
        names: the values of its global and closed-over names.
        file: the user's file, for error messages.
        local: its local names, which hide the others.
    """

    def __init__(self, names: dict[str, Any], file: str, local: frozenset[str]) -> None:
        self._names = {k: v for k, v in names.items() if k not in local}
        self._file = file
        self._bound: dict[str, _Region] = {}
        self._open = 0

    def visit_With(self, node: ast.With) -> Any:  # ast's name
        """Rewrite a ``with`` statement that opens a region; leave all others."""
        if len(node.items) > 1:
            inner = ast.copy_location(ast.With(node.items[1:], node.body), node)
            return self.visit(ast.copy_location(ast.With([node.items[0]], [inner]), node))
        region = self._region_of(node.items[0])
        if region is None:
            return self.generic_visit(node)
        self._open += 1
        body = [self.visit(statement) for statement in node.body]
        self._open -= 1
        return region_statement(region.device, region.dtype, region.enabled, body)

    def visit_Name(self, node: ast.Name) -> ast.Name:
        """Reject any use of a region bound by ``as`` other than entering it."""
        if node.id in self._bound:
            self._fail(node, f"`{node.id}` is a region; TorchScript can only enter it: `with {node.id}:`")
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Reject a call to a traced function that has lost its regions."""
        target = self._value(node.func)
        original = _torch_script.original_of(target) if _torch_script.is_scripted(target) else None
        dropped = original is not None and not _torch_script.has_regions(target)
        if self._open and original is not None and dropped and _uses_autocast(original):
            self._fail(
                node,
                f"{original.__name__} was traced: its own autocast regions are not in the trace, and this "
                "region would apply inside it; compile it with amp_core.script instead of tracing it",
            )
        return self.generic_visit(node)

    def _region_of(self, item: ast.withitem) -> _Region | None:
        expression = item.context_expr
        if isinstance(expression, ast.Name) and expression.id in self._bound:
            return self._bound[expression.id]
        if not isinstance(expression, ast.Call):
            return None
        kind = self._value(expression.func)
        if not (isinstance(kind, type) and issubclass(kind, torch_autocast)):
            return None
        region = self._parse_call(expression, kind)
        if isinstance(item.optional_vars, ast.Name):
            self._bound[item.optional_vars.id] = region
        return region

    def _parse_call(self, call: ast.Call, kind: type) -> _Region:
        paths = [base.__module__.split(".") for base in kind.__mro__]
        deprecated = next((path[-3] for path in paths if path[-3:-1] in _DEPRECATED_PATHS), None)
        order = _DEPRECATED_ORDER if deprecated else _ORDER
        given = dict(zip(order, call.args, strict=False))
        given.update({k.arg: k.value for k in call.keywords if k.arg})
        if len(call.args) > len(order) or any(k.arg is None for k in call.keywords):
            self._fail(call, "the region takes its arguments by * or **; write each one as a keyword")
        if "policy" in given:
            self._fail(call, "policy= cannot be compiled; put it around the call of the scripted function")
        device = ast.Constant(deprecated) if deprecated else given.get("device_type")
        if device is None:
            self._fail(call, "the region has no device_type")
        default = {"cuda": "float16", "cpu": "bfloat16"}[deprecated] if deprecated else ""
        dtype = self._dtype(given["dtype"]) if "dtype" in given else default
        return _Region(
            self._constant(device), dtype, self._constant(given.get("enabled", ast.Constant(True)))
        )

    def _dtype(self, node: ast.expr) -> str:
        """Return the name of a dtype known at compile time; TorchScript would only pass an integer."""
        if isinstance(node, ast.Constant) and node.value is None:
            return ""
        value = self._value(node)
        if not isinstance(value, torch.dtype):
            text = (
                f"dtype={ast.unparse(node)} is known only at run time; write one region per dtype under `if`"
            )
            self._fail(node, text)
        return dtype_name(value)

    def _constant(self, node: ast.expr) -> ast.expr:
        """Replace a global string or bool, which TorchScript cannot look up, by its value."""
        value = self._value(node)
        return ast.Constant(value) if isinstance(value, (str, bool)) else node

    def _value(self, node: ast.expr) -> Any:
        """Return the compile-time value of an expression of names and attributes, or None."""
        if isinstance(node, ast.Name):
            return self._names.get(node.id)
        if isinstance(node, ast.Attribute):
            base = self._value(node.value)
            return None if base is None else getattr(base, node.attr, None)
        return None

    def _fail(self, node: ast.AST, reason: str) -> NoReturn:
        raise ScriptRegionError(f"{self._file}:{getattr(node, 'lineno', 0)}: {reason}.")


def region_statement(device: ast.expr, dtype: str, enabled: ast.expr, body: list[ast.stmt]) -> ast.With:
    """Return a region in the form that TorchScript can compile."""
    arguments = [device, ast.Constant(dtype), enabled]
    return ast.With([ast.withitem(ast.Call(ast.Name(REGION, ast.Load()), arguments, []))], body)


def _uses_autocast(function: Any) -> bool:
    return any(name.endswith("autocast") for name in function.__code__.co_names)
