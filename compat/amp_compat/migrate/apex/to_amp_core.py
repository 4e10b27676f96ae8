"""Rewrite ``apex.amp`` to `amp_compat.apex`, or report what to write for ``torch.amp``."""

from __future__ import annotations

import re
from collections.abc import Callable

import libcst as cst
from libcst.helpers import get_full_name_for_node
from libcst.metadata import ImportAssignment

from amp_compat.migrate.apex.calls import ApexFinding
from amp_compat.migrate.bindings import Resolved, Resolver
from amp_compat.migrate.names import Target
from amp_compat.migrate.stars import module_name
from amp_compat.migrate.tree import NameWalker

SUPPORTED = frozenset({"initialize", "scale_loss", "master_params", "state_dict", "load_state_dict"})

_USED = re.compile(r"(apex\.amp|amp_compat\.apex)\.(.+)")

_ADVICE = {
    "initialize": (
        "O0: remove the call. O1, O2: leave the model and optimizer unchanged, create "
        "scaler = torch.amp.GradScaler('cuda') and run forward and loss under torch.amp.autocast('cuda'). "
        "O3: model.half(), no scaler"
    ),
    "scale_loss": (
        "write scaler.scale(loss).backward(), and for optimizer.step() write scaler.step(optimizer) "
        "and scaler.update()"
    ),
    "master_params": "call scaler.unscale_(optimizer), then use model.parameters(), the float32 weights",
    "state_dict": "save scaler.state_dict()",
    "load_state_dict": "call scaler.load_state_dict(...); states saved by apex use different keys",
}
_OTHER = "amp-core has no equivalent; an op policy (autocast(..., policy=...)) changes individual ops"


class ApexRewriter(NameWalker):
    """Collects edits and findings for every use of ``apex.amp``."""

    def __init__(self, module: cst.Module, resolver: Resolver, target: Target) -> None:
        super().__init__()
        self._module = module
        self._resolver = resolver
        self._rewrites = target.module == "amp_core"
        self.edits: dict[cst.CSTNode, Callable[[cst.CSTNode], cst.CSTNode]] = {}
        self.findings: list[ApexFinding] = []
        self.needed: list[str] = []

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:
        """Edit ``from apex import amp`` and ``from apex.amp import ...``."""
        module = module_name(node)
        if not self._rewrites or isinstance(node.names, cst.ImportStar):
            return False
        names = [alias.evaluated_name for alias in node.names]
        if module == "apex.amp" and SUPPORTED.issuperset(names):
            self._edit(node, lambda new: new.with_changes(module=cst.parse_expression("amp_compat.apex")))
        elif module == "apex" and names == ["amp"]:
            self._edit(node, _from_apex)
        elif module == "apex" and "amp" in names:
            note = "import amp separately: from amp_compat import apex as amp"
            self.findings.append((node, "manual", "apex.amp", note))
        return False

    def visit_Import(self, node: cst.Import) -> bool:
        """Edit ``import apex.amp as x``; a plain ``import apex`` stays because apex has more than amp."""
        names = [get_full_name_for_node(alias.name) for alias in node.names]
        if self._rewrites and names == ["apex.amp"] and node.names[0].asname is not None:
            self._edit(node, _import_apex_amp)
        return False

    def take(self, node: cst.BaseExpression) -> bool:
        """Edit a use, or report why it cannot be edited."""
        resolved = self._resolver.resolve(node)
        found = _USED.fullmatch(resolved.dotted) if resolved is not None else None
        if resolved is None or found is None:
            return False
        module, name = found.groups()
        label = f"apex.amp.{name}"
        if module == "amp_compat.apex" and (name in SUPPORTED or not self._rewrites):
            return True
        if name not in SUPPORTED:
            self.findings.append((node, "manual", label, _OTHER))
        elif not self._rewrites:
            self.findings.append((node, "manual", label, _ADVICE[name]))
        elif self._follow(node, name, resolved):
            self.findings.append((node, "changed", label, f"now amp_compat.apex.{name}"))
        else:
            note = "its import is unchanged; import amp separately"
            self.findings.append((node, "manual", label, note))
        return True

    def _follow(self, node: cst.BaseExpression, name: str, resolved: Resolved) -> bool:
        """Redirect `node` to amp_compat: rename ``apex.amp.x``; for ``amp.x`` the import suffices."""
        if isinstance(node, cst.Attribute) and isinstance(node.value, cst.Attribute):
            self.edits[node] = lambda _: cst.parse_expression(f"amp_compat.apex.{name}")
            if "amp_compat.apex" not in self.needed:
                self.needed.append("amp_compat.apex")
            return True
        return all(isinstance(b, ImportAssignment) and b.node in self.edits for b in resolved.bindings)

    def _edit(self, node: cst.ImportFrom | cst.Import, edit: Callable[[cst.CSTNode], cst.CSTNode]) -> None:
        self.edits[node] = edit
        self.findings.append((node, "changed", "apex.amp", "imported from amp_compat"))


def _from_apex(node: cst.CSTNode) -> cst.CSTNode:
    assert isinstance(node, cst.ImportFrom)
    assert not isinstance(node.names, cst.ImportStar)
    alias = node.names[0]
    asname = alias.asname or cst.AsName(cst.Name("amp"))
    new = alias.with_changes(name=cst.Name("apex"), asname=asname)
    return node.with_changes(module=cst.Name("amp_compat"), names=[new])


def _import_apex_amp(node: cst.CSTNode) -> cst.CSTNode:
    assert isinstance(node, cst.Import)
    name = cst.parse_expression("amp_compat.apex")
    assert isinstance(name, cst.Attribute)
    return node.with_changes(names=[node.names[0].with_changes(name=name)])
