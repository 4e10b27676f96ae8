"""Write expressions for the successors in the style of the file."""

from __future__ import annotations

from collections.abc import Mapping

import libcst as cst
from libcst.metadata import CodeRange, ImportAssignment, Scope

from amp_compat.migrate.bindings import Resolver
from amp_compat.migrate.calls import convert_args
from amp_compat.migrate.imports import ImportEditor, bound_names
from amp_compat.migrate.names import Legacy, Target
from amp_compat.migrate.tree import root_of


class Expressions:
    """Writes expressions using the names a module has imported, and requests missing imports.

    Args:
        module: the module.
        resolver: resolves its names.
        scope: its global scope.
        imports: records the imports to add.
        positions: the source position of each node.
        target: the package to migrate to.
        quote: the quotation mark that the file uses.
    """

    def __init__(
        self,
        module: cst.Module,
        resolver: Resolver,
        scope: Scope | None,
        imports: ImportEditor,
        positions: Mapping[cst.CSTNode, CodeRange],
        target: Target,
        quote: str,
    ) -> None:
        self._module, self._resolver, self._scope = module, resolver, scope
        self._imports, self._positions, self._target, self._quote = imports, positions, target, quote

    def successor(self, legacy: Legacy, root: cst.BaseExpression | None = None) -> cst.BaseExpression:
        """Return the successor's full name; `root` is the first name of the deprecated expression, if any."""
        suffix = self._target.suffix(legacy.name) if legacy.name else ""
        return cst.parse_expression(".".join(filter(None, [self._module_of(root), suffix])))

    def partial(self, legacy: Legacy, successor: cst.BaseExpression, at: cst.CSTNode, quote: str) -> cst.Call:
        """Return ``functools.partial(successor, device)``, which takes the deprecated keyword arguments."""
        functools: cst.BaseExpression | None = self._name_for("functools.partial", above=at)
        if functools is None:
            module = self._name_for("functools", above=at)
            if module is None:
                self._imports.need("functools")
            functools = cst.Attribute(module or cst.Name("functools"), cst.Name("partial"))
        return _filled_in(functools, legacy, successor, quote)

    def rebound(self, name: cst.Name, legacy: Legacy, at: cst.CSTNode) -> list[cst.BaseSmallStatement]:
        """Return ``name = functools.partial(name, device)`` as statements to follow the import `at`."""
        known = self._name_for("functools", above=at)
        functools = known or cst.Name("functools")
        call = _filled_in(cst.Attribute(functools, cst.Name("partial")), legacy, name, self._quote)
        assign = cst.Assign([cst.AssignTarget(name)], call)
        if known is None and self._imports.at_top(at):  # needed imports are added below it
            return [cst.Import([cst.ImportAlias(functools)]), assign]
        if known is None:
            self._imports.need("functools")
        return [assign]

    def hidden_name(self, node: cst.BaseExpression, kind: str) -> str:
        """Return the first name that a rewrite of `node` needs and that means something else there, or ""."""
        modules = []
        if kind in {"value", "alias"}:
            imported = self._name_for("functools.partial", above=node) is not None
            modules.append("functools.partial" if imported else "functools")
        root = root_of(node)
        meaning = self._resolver.resolve(root)
        if meaning is None or meaning.dotted != self._target.root:
            modules.append(self._target.root)
        names = [(module, (self._name_for(module) or cst.Name(module)).value) for module in modules]
        return next((name for module, name in names if self._resolver.is_local(name, module, at=node)), "")

    def in_words(self, legacy: Legacy) -> str:
        """Describe the successor and its device for a report."""
        suffix = f".{self._target.suffix(legacy.name)}" if legacy.name else ""
        device = "" if legacy.name in {"", "OptState"} else f" on '{legacy.device}'"
        return f"{self._target.module}{suffix}{device}"

    def _module_of(self, root: cst.BaseExpression | None) -> str:
        if self._target.module == "torch.amp" and isinstance(root, cst.Name):
            meaning = self._resolver.resolve(root)
            if meaning and meaning.dotted == "torch":
                return f"{root.value}.amp"
        imported = self._name_for(self._target.root)
        if imported is None:
            self._import_target(root)
        name = imported.value if imported is not None else self._target.root
        return name + self._target.module[len(self._target.root) :]

    def _import_target(self, root: cst.BaseExpression | None) -> None:
        """Import the target's root where `root` is imported, if the file may be used without torch."""
        name = self._target.root
        sources = [] if root is None else self._resolver.imports_of(root)
        local = [b for b in sources if root is not None and self._resolver.reaches(root, b)]
        loaded = root is None or self._imports.loads_torch(above=root)
        if loaded or not sources or len(local) < len(sources):
            self._imports.need(name)
            return
        for source in local:
            if not self._resolver.is_imported_above(source.node, name, name):
                self._imports.follow(source.node, name)

    def _name_for(self, dotted: str, above: cst.CSTNode | None = None) -> cst.Name | None:
        """Return a module-level name imported from `dotted`, bound before the node `above` if given."""
        for name in bound_names(self._module):
            bindings = list(self._scope[name]) if self._scope is not None else []
            if {self._resolver.import_meaning(b, name) for b in bindings} != {dotted}:
                continue
            lines = [self._positions[b.node].start.line for b in bindings if isinstance(b, ImportAssignment)]
            if above is None or min(lines) < self._positions[above].start.line:
                return cst.Name(name)
        return None


def _filled_in(
    partial: cst.BaseExpression, legacy: Legacy, successor: cst.BaseExpression, quote: str
) -> cst.Call:
    first = cst.Arg(successor, comma=cst.Comma(whitespace_after=cst.SimpleWhitespace(" ")))
    return cst.Call(partial, [first, *convert_args(legacy, [], quote)])
