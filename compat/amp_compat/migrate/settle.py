"""Settle the uses of deprecated names that depend on each other or on code elsewhere."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import libcst as cst
from libcst.metadata import Assignment, BaseAssignment, ClassScope, GlobalScope

from amp_compat.migrate.bindings import Resolved, Resolver
from amp_compat.migrate.calls import AUTOCAST_ORDER, has_positional, keyword_of
from amp_compat.migrate.names import OBJECTS, Legacy, parse_legacy
from amp_compat.migrate.plan import Plan, Use
from amp_compat.migrate.rules import PARTIAL_NOTE, classify
from amp_compat.migrate.tree import Parents, around

_PARTS = (cst.Element, cst.StarredElement, cst.Tuple, cst.List)
_BY_POSITION = "its value is called with positional arguments, which the successor orders differently"
_CLASS_KINDS = {"type", "base", "partial"}


def settle_replaced(plan: Plan, parents: Parents) -> None:
    """Leave the names that the file itself replaces: it expects its own object where it uses them."""
    replaced = {legacy for use in plan.uses for legacy in _replaced_at(use, parents)}
    replaced.update(legacy for string in plan.strings if (legacy := _patched(string, parents)) is not None)
    for use in plan.uses:
        if use.legacy in replaced:
            use.manual = f"this file replaces `{use.legacy.dotted}`; rewrite that and its uses by hand"


def _replaced_at(use: Use, parents: Parents) -> list[Legacy]:
    """Return what an assignment, ``setattr(torch.cuda.amp, "name", ...)`` or ``patch.object`` replaces."""
    parent = parents[use.node]
    outer = next(each for each in around(use.node, parents) if not isinstance(each, _PARTS))
    if isinstance(outer, cst.AssignTarget):
        return [use.legacy]
    call = parents[parent] if isinstance(parent, cst.Arg) else None
    if use.legacy.name or not isinstance(call, cst.Call) or _last_name(call.func) in {"getattr", "hasattr"}:
        return []
    words = [arg.keyword.value for arg in call.args if arg.keyword is not None]
    words += [str(a.value.evaluated_value) for a in call.args[1:2] if isinstance(a.value, cst.SimpleString)]
    return [Legacy(use.legacy.device, word) for word in words if word in OBJECTS]


def _patched(string: cst.SimpleString, parents: Parents) -> Legacy | None:
    """Return what ``mock.patch("torch.cuda.amp.name")`` or ``monkeypatch.setattr`` of a path replaces."""
    parent = parents[string]
    call = parents[parent] if isinstance(parent, cst.Arg) else None
    if (
        isinstance(call, cst.Call)
        and call.args[0] is parent
        and _last_name(call.func) in {"patch", "setattr"}
    ):
        return parse_legacy(str(string.evaluated_value))
    return None


def _last_name(node: cst.BaseExpression) -> str:
    name = node.attr if isinstance(node, cst.Attribute) else node
    return name.value if isinstance(name, cst.Name) else ""


def settle_aliases(plan: Plan, resolver: Resolver) -> None:
    """Allow ``name = torch.cuda.amp.autocast`` only if a functools.partial works for all uses of `name`."""
    aliases = [use for use in plan.uses if use.kind == "alias"]
    for use in aliases:
        _stays(use, plan, resolver)
    while any([_stays(use, plan, resolver) for use in aliases if not use.manual]):
        pass  # the list settles each; an alias of an alias that stays must stay too


def _stays(use: Use, plan: Plan, resolver: Resolver) -> bool:
    """Settle one alias and its uses; return whether it must be rewritten by hand."""
    assert isinstance(use.site, cst.Name)
    unclear = _unclear_uses(use, use.site, plan, resolver)
    uses = [u for u in plan.uses if _uses_alias(u, use.site.value) and u is not use] + unclear
    calls = [
        u.site for u in uses if isinstance(u.site, cst.Call) and u.kind == "call" and not u.resolved.bindings
    ]
    passed_on = any(u.kind == "alias" for u in unclear)  # to a name whose uses are unknown
    if passed_on or any(u.kind in _CLASS_KINDS or u.manual for u in uses):
        use.manual = use.manual or f"`{use.site.value}` is used as a class or passed on; replace it by hand"
    elif not use.manual and any(has_positional(call.args) for call in calls):
        use.manual = f"`{use.site.value}(...)` may also mean something else and has positional arguments"
    elif any(u.kind == "value" for u in uses):
        use.review = PARTIAL_NOTE
    if use.manual:
        for other in uses:
            other.manual = other.manual or use.manual
    return bool(use.manual)


def settle_modules(plan: Plan, resolver: Resolver, exported: Collection[str]) -> None:
    """Leave ``name = torch.cuda.amp`` if a use through `name` is left to the user, or may be elsewhere."""
    for use in plan.uses:
        if use.kind != "module alias" or use.manual or not isinstance(use.site, cst.Name):
            continue
        through = [u for u in plan.uses if any(b.node is use.site for b in _assigned_names(u))]
        if any(u.manual for u in through):
            use.manual = f"uses of `{use.site.value}` below need it; rewrite them by hand first"
        elif _reachable(use.site, resolver, exported):
            use.manual = f"`{use.site.value}` is an attribute that code elsewhere may use; rewrite it by hand"
        for other in through if use.manual else ():
            other.direct = True


def note_reachable(plan: Plan, resolver: Resolver, exported: Collection[str]) -> None:
    """Ask for a review of each ``name = torch.cuda.amp.autocast`` that code elsewhere may call."""
    for use in plan.uses:
        if use.kind == "alias" and isinstance(use.site, cst.Name):
            use.review = PARTIAL_NOTE if _reachable(use.site, resolver, exported) else use.review


def note_partials(plan: Plan, resolver: Resolver, exported: Collection[str]) -> None:
    """Ask for a review of each ``functools.partial(torch.cuda.amp.autocast)`` that may get ``False``."""
    for use in plan.uses:
        if use.kind != "partial" or use.manual or use.legacy.name != "autocast":
            continue
        assert isinstance(use.site, cst.Call)
        _, *args = use.site.args
        enabled = has_positional(args) or keyword_of(args, "enabled") is not None
        if not enabled and _may_get_position(use.site, resolver, exported):
            use.review = (
                "check callers of this partial that pass arguments by position: the order differs now"
            )


def settle_values(plan: Plan, resolver: Resolver) -> None:
    """Leave ``torch.cuda.amp.autocast if x else y`` if the file calls its value with positional arguments."""
    for use in plan.uses:
        value: cst.CSTNode = use.node
        while isinstance(resolver.parents[value], cst.IfExp):
            value = resolver.parents[value]
        if use.kind != "value" or use.legacy.name != "autocast" or value is use.node:
            continue
        if any(has_positional(call.args) for call in _calls_of(value, resolver)):
            use.manual = use.manual or _BY_POSITION


def _calls_of(value: cst.CSTNode, resolver: Resolver) -> list[cst.Call]:
    """Return the calls of `value`, and of the variable that it is assigned to."""
    parent = resolver.parents[value]
    if isinstance(parent, cst.Call) and parent.func is value:
        return [parent]
    targets = [each.target for each in parent.targets] if isinstance(parent, cst.Assign) else []
    users = [(use, resolver.parents[use]) for target in targets for use in _references(target, resolver)]
    return [user for use, user in users if isinstance(user, cst.Call) and user.func is use]


def _references(target: cst.BaseExpression, resolver: Resolver) -> list[cst.CSTNode]:
    """Return where the variable `target` is used."""
    scope = resolver.scope_of(target)
    bindings = scope[target.value] if isinstance(target, cst.Name) and scope is not None else ()
    return [access.node for binding in bindings for access in binding.references]


def _may_get_position(call: cst.Call, resolver: Resolver, exported: Collection[str]) -> bool:
    """Return whether the value of `call` may be called with positional arguments."""
    parent = resolver.parents[call]
    if isinstance(parent, cst.Call) and parent.func is call:
        return has_positional(parent.args)
    targets = [each.target for each in parent.targets] if isinstance(parent, cst.Assign) else []
    if len(targets) != 1 or not isinstance(targets[0], cst.Name):
        return True
    uses = _references(targets[0], resolver)
    return _reachable(targets[0], resolver, exported) or any(
        not isinstance(user, cst.Call) or user.func is not use or has_positional(user.args)
        for use, user in ((use, resolver.parents[use]) for use in uses)
    )


def _reachable(target: cst.Name, resolver: Resolver, exported: Collection[str]) -> bool:
    """Return whether the variable `target` is also an attribute of a class, or of an imported module."""
    scope = resolver.scope_of(target)
    return isinstance(scope, ClassScope) or (isinstance(scope, GlobalScope) and target.value in exported)


def _assigned_names(use: Use) -> list[Assignment]:
    return [binding for binding in use.resolved.bindings if isinstance(binding, Assignment)]


def settle_shared(plan: Plan, resolver: Resolver) -> None:
    """Allow imports whose name other branches bind too only if a functools.partial works for all uses."""
    for binding, uses in plan.by_binding.items():
        shared = [use for use in uses if use.resolved.shared]
        reason = _why_not_shared(binding, shared, resolver)
        for use in shared:
            use.manual = use.manual or reason


def _why_not_shared(binding: BaseAssignment, uses: list[Use], resolver: Resolver) -> str:
    others = resolver.others(binding)
    both = f"`{binding.name}` may also mean something else"
    if any(use.kind in _CLASS_KINDS for use in uses):
        return f"{both}, and is used as a class, which a functools.partial cannot replace"
    calls = [u.site for u in uses if u.kind == "call" and u.legacy.name == "autocast"]
    by_position = [c for c in calls if isinstance(c, cst.Call) and has_positional(c.args)]
    longest = max((sum(has_positional([arg]) for arg in call.args) for call in by_position), default=0)
    if not all(_accepts(other, AUTOCAST_ORDER[:longest]) for other in others):
        return f"{both}, and is called with positional arguments, which the successor orders differently"
    return next((use.manual for use in uses if use.manual), "")


def _accepts(binding: BaseAssignment, words: Sequence[str]) -> bool:
    """Return whether `binding` defines a function or class whose first arguments are named `words`."""
    if not words:
        return True
    node = binding.node if isinstance(binding, Assignment) else None
    if isinstance(node, cst.ClassDef):
        functions = [
            s for s in node.body.body if isinstance(s, cst.FunctionDef) and s.name.value == "__init__"
        ]
        params = functions[0].params.params[1:] if functions else ()
    else:
        params = node.params.params if isinstance(node, cst.FunctionDef) else ()
    return [param.name.value for param in params[: len(words)]] == list(words)


def _uses_alias(use: Use, name: str) -> bool:
    return use.resolved.alias and isinstance(use.node, cst.Name) and use.node.value == name


def _unclear_uses(alias: Use, target: cst.Name, plan: Plan, resolver: Resolver) -> list[Use]:
    """Return the uses of `target` that may mean another of its bindings, as if they meant `alias`."""
    scope = resolver.scope_of(target)
    if scope is None or len(list(scope[target.value])) < 2:
        return []
    known = {id(use.node) for use in plan.uses}
    nodes = [a.node for binding in scope[target.value] for a in binding.references]
    meaning = Resolved(alias.legacy.dotted, alias=True)
    unclear = [Use(n, alias.legacy, meaning) for n in nodes if isinstance(n, cst.Name) and id(n) not in known]
    for use in unclear:
        classify(use, resolver.parents, resolver)
    return unclear
