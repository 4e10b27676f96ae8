"""Find the star imports of deprecated modules, and the names that they bind."""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst
from libcst.helpers import get_full_name_for_node

from amp_compat.migrate.names import OBJECTS, parse_legacy


def star_imports(body: Sequence[cst.CSTNode]) -> list[cst.ImportFrom]:
    """Return the star imports of deprecated modules among the statements `body`."""
    lines = [line for line in body if isinstance(line, cst.SimpleStatementLine)]
    froms = [small for line in lines for small in line.body if isinstance(small, cst.ImportFrom)]
    return [f for f in froms if isinstance(f.names, cst.ImportStar) and parse_legacy(module_name(f) or "")]


def star_names(module: cst.Module) -> dict[str, str]:
    """Map the names bound by star imports of deprecated modules to their full names."""
    stars = [module_name(star) for star in star_imports(module.body)]
    return {name: f"{dotted}.{name}" for dotted in stars for name in OBJECTS if name[0] != "_"}


def module_name(node: cst.ImportFrom) -> str | None:
    """Return the module of ``from module import ...``; None if it is relative."""
    return None if node.relative or node.module is None else get_full_name_for_node(node.module)
