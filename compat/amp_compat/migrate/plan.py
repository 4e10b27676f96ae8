"""The uses of deprecated names in a module."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import libcst as cst
from libcst.metadata import BaseAssignment

from amp_compat.migrate.bindings import Resolved
from amp_compat.migrate.names import Legacy


@dataclass
class Use:
    """One use of a deprecated name.

    Attributes:
        node: the shortest expression that resolves to the deprecated name.
        legacy: the deprecated name.
        resolved: how the expression resolves to it.
        kind: the context of the use; see `classify`.
        site: the call, argument or class to rewrite.
        manual: why it must be rewritten by hand, or "".
        review: what to check after the rewrite, or "".
        tested: a name by itself, of which only the truth or identity matters.
        direct: the module alias that leads to it stays as it is, so the use must not go through it.
    """

    node: cst.BaseExpression
    legacy: Legacy
    resolved: Resolved
    kind: str = "value"
    site: cst.CSTNode | None = None
    manual: str = ""
    review: str = ""
    tested: bool = False
    direct: bool = False


@dataclass
class Plan:
    """All uses in a module, also grouped by binding.

    Attributes:
        uses: the uses of deprecated names.
        by_binding: the uses of each binding.
        strings: the strings with code that contains a deprecated name.
        others: other places to rewrite by hand: the node, the deprecated name and the reason.
    """

    uses: list[Use] = field(default_factory=list)
    by_binding: dict[BaseAssignment, list[Use]] = field(default_factory=lambda: defaultdict(list))
    strings: list[cst.SimpleString] = field(default_factory=list)
    others: list[tuple[cst.CSTNode, str, str]] = field(default_factory=list)

    def add(self, use: Use) -> None:
        """Add a use."""
        self.uses.append(use)
        for binding in use.resolved.bindings:
            self.by_binding[binding].append(use)
