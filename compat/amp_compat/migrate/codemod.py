"""Rewrite the source of one module."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

import libcst as cst
from libcst.metadata import BaseAssignment, ClassScope, ImportAssignment

from amp_compat.migrate.apex.to_amp_core import ApexRewriter
from amp_compat.migrate.bindings import Resolver
from amp_compat.migrate.calls import CannotConvertError, convert_args, has_positional, name_positional
from amp_compat.migrate.collect import Collector
from amp_compat.migrate.expressions import Expressions
from amp_compat.migrate.imports import ImportEditor
from amp_compat.migrate.model import Finding, Level, Rewritten
from amp_compat.migrate.names import Legacy, Target, parse_legacy
from amp_compat.migrate.plan import Plan, Use
from amp_compat.migrate.prune import prune
from amp_compat.migrate.settle import (
    note_partials,
    note_reachable,
    settle_aliases,
    settle_modules,
    settle_replaced,
    settle_shared,
    settle_values,
)
from amp_compat.migrate.stars import module_name, star_imports, star_names
from amp_compat.migrate.tree import (
    Apply,
    Edit,
    args_of,
    dunder_all,
    metadata_of,
    quote_at,
    quote_of,
    root_of,
    super_init,
    type_comments,
)

_COMMENT = "this type comment has the deprecated name; change it by hand"
_QUOTED = "an annotation in a string uses it; rewrite that by hand and remove this import"
_EXPORTED = "`{}` is in __all__, in a class, in a magic or used by other files; its signature would change"


class ModuleRewriter:
    """Rewrites the deprecated names of one module.

    Args:
        text: its source.
        target: the package to migrate to.
        exported: names that other files import from it; their imports stay as they are.
    """

    def __init__(self, text: str, target: Target, exported: Collection[str]) -> None:
        self.text = text
        self.module, self.restored = prune(cst.parse_module(text), text)
        self.parents, self.positions, scopes = metadata_of(self.module)
        self.stars = star_names(self.module)
        self.resolver = Resolver(scopes, self.parents, self.stars)
        self.target = target
        self.exported = set(exported) | dunder_all(self.module, text)
        self.quote = quote_of(text)
        self.edits: dict[cst.CSTNode, Edit] = {}
        self.findings: list[Finding] = []
        self.imports = ImportEditor(self.module, target, self.parents)
        self.expressions = Expressions(
            self.module,
            self.resolver,
            scopes[self.module],
            self.imports,
            self.positions,
            target,
            self.quote,
        )

    def rewrite(self) -> Rewritten:
        """Return the new text and the findings."""
        plan = self._collect()
        self._renamed = self._rename_bindings(plan)
        for use in plan.uses:
            self._rewrite(use)
        for string in plan.strings:
            self._string(string)
        for node, name, reason in plan.others:
            self._find(node, "manual", name, reason)
        for comment in type_comments(self.module, self.text):
            self._find(
                comment, "manual", "torch.cuda.amp" if "cuda" in comment.value else "torch.cpu.amp", _COMMENT
            )
        if "apex" in self.text:
            self._apex()
        self._import_edits()
        findings = sorted(self.findings, key=lambda f: (f.line, f.column))
        if not self.edits:
            return Rewritten(self.text, findings)
        new = self.module.visit(Apply(self.edits | self.restored))
        assert isinstance(new, cst.Module)
        return Rewritten(self.imports.add_to(new).code, findings)

    def _collect(self) -> Plan:
        collector = Collector(self.resolver, self.parents)
        self.module.visit(collector)
        plan = collector.plan
        for use in plan.uses:
            if not use.manual:
                self._try_site(use)
        settle_replaced(plan, self.parents)
        settle_values(plan, self.resolver)
        settle_aliases(plan, self.resolver)
        settle_shared(plan, self.resolver)
        settle_modules(plan, self.resolver, self.exported)
        note_partials(plan, self.resolver, self.exported)
        note_reachable(plan, self.resolver, self.exported)
        return plan

    def _try_site(self, use: Use) -> None:
        """Check that the arguments of the use can be converted."""
        try:
            through_alias = use.resolved.alias and isinstance(use.node, cst.Name)
            hidden = "" if through_alias else self.expressions.hidden_name(use.node, use.kind)
            if hidden:
                raise CannotConvertError(
                    f"`{hidden}` is a local variable here; rename it, or rewrite this by hand"
                )
            self._site_edit(use)
            if use.kind in {"value", "alias", "decorator"}:
                convert_args(use.legacy, [], quote_at(use.node, self.parents, self.quote))
        except CannotConvertError as error:
            use.manual = str(error)

    # -- imports ------------------------------------------------------------------------------------

    def _rename_bindings(self, plan: Plan) -> set[BaseAssignment]:
        """Redirect imports of deprecated names to the target if all their uses can be rewritten."""
        renamed: set[BaseAssignment] = set()
        for binding in self._legacy_imports():
            uses = plan.by_binding.get(binding, [])
            if self.resolver.has_successor(binding):
                self._beside_successor(binding)
            elif reason := self._why_kept(binding):
                self._find(binding.node, "manual", binding.name, reason)
            elif any(use.manual for use in uses):
                continue
            elif any(use.resolved.shared for use in uses):
                self._share(binding)
            else:
                if self.imports.keeps_name(binding.node, binding.name):
                    renamed.add(binding)
                self.imports.rename(binding.node, binding.name)
                self._note_import(binding, uses)
        starred = [u for u in plan.uses if isinstance(u.node, cst.Name) and not u.resolved.bindings]
        kept = sorted(self.exported & self.stars.keys())
        if kept:
            self._keep_star(_EXPORTED.format("`, `".join(kept)))
        elif not starred:
            self._keep_star("this file uses none of its names; remove it")
        elif not any(use.manual for use in starred):  # such a use needs the star import
            self.imports.star_uses.update(u.node.value for u in starred if isinstance(u.node, cst.Name))
        return renamed

    def _import_edits(self) -> None:
        for line in self.imports.lines():
            self.edits[line] = partial(self.imports.edit_line, line)
        if not self.imports.star_uses:
            return
        for star in star_imports(self.module.body):
            self.edits[star] = self.imports.star_edit
            note = "star import replaced: names that only other files import from here need their own import"
            self._find(star, "review", module_name(star) or "", note)

    def _legacy_imports(self) -> list[ImportAssignment]:
        imports: dict[tuple[int, str], ImportAssignment] = {}
        for scope in self.resolver.scopes():
            for binding in scope.assignments:
                if isinstance(binding, ImportAssignment) and self.imports.concerns(
                    binding.node, binding.name
                ):
                    imports.setdefault((id(binding.node), binding.name), binding)
        return sorted(imports.values(), key=lambda b: (self.positions[b.node].start.line, b.name))

    def _why_kept(self, binding: ImportAssignment) -> str:
        """Return why code that cannot be rewritten needs the import, or ""."""
        if binding.name in self.exported or isinstance(binding.scope, ClassScope):
            return _EXPORTED.format(binding.name)
        dropped = not self.imports.keeps_name(binding.node, binding.name)
        quoted = any(isinstance(access.node, cst.BaseString) for access in binding.references)
        return _QUOTED if dropped and quoted else ""

    def _keep_star(self, reason: str) -> None:
        for star in star_imports(self.module.body):
            self._find(star, "manual", module_name(star) or "", reason)

    def _beside_successor(self, binding: ImportAssignment) -> None:
        """Report an import for old versions of torch, unless it is a fallback in an `except`."""
        if not self.resolver.in_except(binding.node):
            reason = (
                f"another branch binds `{binding.name}` to the successor; if that is always available, "
                f"remove this import and pass the device in calls"
            )
            self._find(binding.node, "manual", binding.name, reason)

    def _share(self, binding: ImportAssignment) -> None:
        """Add an alias after the import, with the deprecated signature."""
        legacy = parse_legacy(self.resolver.import_meaning(binding, binding.name) or "")
        assert legacy is not None
        alias = self.expressions.rebound(cst.Name(binding.name), legacy, binding.node)
        self.imports.rename(binding.node, binding.name, alias)
        self._find(
            binding.node, "changed", binding.name, f"a functools.partial of the name in {self.target.module}"
        )

    def _note_import(self, binding: ImportAssignment, uses: list[Use]) -> None:
        if any(use.resolved.fallback for use in uses):
            text = "remove the except branch: its substitute for torch before 1.6 takes no device"
            self._find(binding.node, "review", binding.name, text)
        else:
            self._find(binding.node, "changed", binding.name, f"imported from {self.target.module}")

    # -- uses ---------------------------------------------------------------------------------------

    def _rewrite(self, use: Use) -> None:
        if use.manual:
            self._find(use.node, "manual", use.legacy.dotted, use.manual)
            return
        if use.tested and self._keeps_import(use):  # its name may also be None, or not imported yet
            return
        through_alias = use.resolved.alias and isinstance(use.node, cst.Name)
        if not through_alias:
            self._replace(use)
        edit = self._site_edit(use)
        if edit is not None:
            self.edits[edit[0]] = edit[1]
        level: Level = "review" if use.review else "changed"
        if not through_alias or edit is not None or use.review:
            self._find(
                use.node,
                level,
                use.legacy.dotted,
                use.review or f"now {self.expressions.in_words(use.legacy)}",
            )

    def _replace(self, use: Use) -> None:
        new = self._expression(use)
        if use.kind in {"value", "alias"}:
            new = self.expressions.partial(
                use.legacy, new, use.node, quote_at(use.node, self.parents, self.quote)
            )
            if isinstance(self.resolver.scope_of(use.node), ClassScope):  # Python 3.14 binds partials
                new = cst.Call(cst.Name("staticmethod"), [cst.Arg(new)])
        elif use.kind == "decorator":
            new = cst.Call(new, convert_args(use.legacy, [], self.quote))
        parens = {"lpar": use.node.lpar, "rpar": use.node.rpar}
        replacement = new.with_changes(**parens) if use.node.lpar else new
        if not (isinstance(new, cst.Name) and isinstance(use.node, cst.Name) and new.value == use.node.value):
            self.edits[use.node] = lambda _: replacement

    def _keeps_import(self, use: Use) -> bool:
        return any(
            isinstance(b, ImportAssignment) and not self.imports.is_renamed(b.node, b.name)
            for b in use.resolved.bindings
        )

    def _site_edit(self, use: Use) -> tuple[cst.CSTNode, Edit] | None:
        """Return the call to change because of a use, and how."""
        call, edit = use.site, None
        if use.kind == "call" and isinstance(call, cst.Call):
            bare = use.resolved.alias and isinstance(use.node, cst.Name)
            edit = self._call_edit(use.legacy, call, bare=bare)
        elif use.kind == "partial" and isinstance(call, cst.Call):
            edit = self._partial_edit(use.legacy, call)
        elif use.kind == "base" and isinstance(use.site, cst.ClassDef):
            call = super_init(use.site)
            edit = self._call_edit(use.legacy, call, bare=False)
        return None if call is None or edit is None else (call, edit)

    def _call_edit(self, legacy: Legacy, call: cst.Call, *, bare: bool) -> Edit | None:
        if bare:
            if legacy.name != "autocast" or not has_positional(call.args):
                return None
            name_positional(call.args)
            return lambda new: new.with_changes(args=name_positional(args_of(new)))
        quote = quote_at(call, self.parents, self.quote)
        convert_args(legacy, call.args, quote)
        return lambda new: new.with_changes(args=convert_args(legacy, args_of(new), quote))

    def _partial_edit(self, legacy: Legacy, call: cst.Call) -> Edit:
        quote = quote_at(call, self.parents, self.quote)
        convert_args(legacy, call.args[1:], quote)

        def edit(new: cst.CSTNode) -> cst.CSTNode:
            first, *rest = args_of(new)
            space = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
            comma = first.comma if isinstance(first.comma, cst.Comma) else space
            converted = convert_args(legacy, rest, quote)
            return new.with_changes(args=[first.with_changes(comma=comma), *converted])

        return edit

    def _apex(self) -> None:
        rewriter = ApexRewriter(self.module, self.resolver, self.target)
        self.module.visit(rewriter)
        self.edits.update(rewriter.edits)
        for module in rewriter.needed:
            self.imports.need(module)
        for node, level, name, message in rewriter.findings:
            self._find(node, level, name, message)

    # -- expressions --------------------------------------------------------------------------------

    def _expression(self, use: Use) -> cst.BaseExpression:
        """Return the successor's name, written the way the file wrote the deprecated one."""
        legacy = use.legacy
        suffix = self.target.suffix(legacy.name) if legacy.name else ""
        root = root_of(use.node)
        if isinstance(use.node, cst.Name) and use.node.value in self.imports.star_uses:
            return use.node
        renamed = bool(use.resolved.bindings) and self._renamed.issuperset(use.resolved.bindings)
        if renamed and isinstance(root, cst.Name):
            if isinstance(use.node, cst.Name):
                return use.node
            return cst.parse_expression(f"{root.value}.{suffix}")
        if use.resolved.alias and not use.direct and isinstance(root, cst.Name) and legacy.name:
            return cst.parse_expression(f"{root.value}.{suffix}")
        return self.expressions.successor(legacy, root)

    def _string(self, node: cst.SimpleString) -> None:
        inner = node.raw_value
        annotated = isinstance(self.parents.get(node), (cst.Annotation, cst.Index))
        legacy = parse_legacy(inner)
        if annotated and legacy and legacy.name and self.target.module == "torch.amp":
            text = node.value.replace(inner, f"torch.amp.{self.target.suffix(legacy.name)}")
            self.edits[node] = lambda new: new.with_changes(value=text)
            self._find(node, "changed", legacy.dotted, f"now {self.expressions.in_words(legacy)}")
            return
        message = "this string contains the deprecated name; change it by hand if it is code"
        self._find(node, "manual", "torch.cuda.amp" if "cuda" in inner else "torch.cpu.amp", message)

    def _find(self, node: cst.CSTNode, level: Level, name: str, message: str) -> None:
        start = self.positions[node].start
        self.findings.append(Finding(start.line, start.column, level, name, message))
