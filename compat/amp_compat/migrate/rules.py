"""Decide from context how to rewrite a use of a deprecated name."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import libcst as cst
from libcst.metadata import Assignment, BaseAssignment, ClassScope, GlobalScope

from amp_compat.migrate.bindings import Resolved, Resolver
from amp_compat.migrate.calls import AUTOCAST_ORDER, gives_dtype, has_positional, keyword_of, passes_device
from amp_compat.migrate.names import OBJECTS
from amp_compat.migrate.plan import Plan, Use
from amp_compat.migrate.tree import Parents, around


def classify(use: Use, parents: Parents, resolver: Resolver) -> None:
    """Set `kind`, `site`, `manual` and `review` of a use from its context."""
    parent = parents[use.node]
    if not use.legacy.name:
        _classify_module(use, parent, parents)
        return
    if use.legacy.name == "OptState":  # the same object
        use.kind = "type"
        return
    place = _Place(parents, resolver)
    for rule in (_call, _decorator, _argument, _attribute, _typed, _assigned):
        if rule(use, parent, place):
            return
    if isinstance(parent, (cst.Return, cst.IfExp, cst.Lambda)):
        use.kind = "value"
        use.review = _PARTIAL_NOTE
        return
    keyword = "device_type=" if use.legacy.name.startswith("custom_") else ""
    use.manual = (
        f"`{use.legacy.dotted}` is used as a value here; "
        f"pass functools.partial(..., {keyword}'{use.legacy.device}')"
    )


_PARTIAL_NOTE = (
    "became a functools.partial: check callers that pass arguments by position, subclass it or use isinstance"
)


class _Place(NamedTuple):
    parents: Parents
    resolver: Resolver


def _call(use: Use, parent: cst.CSTNode, at: _Place) -> bool:
    if not (isinstance(parent, cst.Call) and parent.func is use.node):
        return False
    use.kind, use.site = "call", parent
    if passes_device(parent.args) and use.legacy.name in {"autocast", "GradScaler"}:
        use.review = f"`{use.legacy.dotted}` takes no device: the argument is now passed as the device"
    elif use.legacy.name == "autocast" and _inside_dtype_region(parent, at.parents):
        default = "float16" if use.legacy.device == "cuda" else "bfloat16"
        use.review = f"without dtype it uses the enclosing region's; the old default was torch.{default}"
    return True


def _inside_dtype_region(call: cst.Call, parents: Parents) -> bool:
    if gives_dtype(call.args):
        return False
    regions: list[cst.BaseExpression] = []
    for node in around(call, parents):
        if isinstance(node, cst.With):
            regions += [item.item for item in node.items]
        elif isinstance(node, cst.FunctionDef):
            regions += [decorator.decorator for decorator in node.decorators]
    return any(region is not call and _sets_dtype(region) for region in regions)


def _sets_dtype(region: cst.BaseExpression) -> bool:
    if not isinstance(region, cst.Call):
        return False
    name = region.func.attr if isinstance(region.func, cst.Attribute) else region.func
    return isinstance(name, cst.Name) and name.value == "autocast" and gives_dtype(region.args)


def _decorator(use: Use, parent: cst.CSTNode, at: _Place) -> bool:
    if not isinstance(parent, cst.Decorator):
        return False
    use.kind = "decorator"
    if use.legacy.name == "autocast":
        use.manual = "`@autocast` without parentheses passes the function as `enabled`; write @autocast(...)"
    return True


def _argument(use: Use, parent: cst.CSTNode, at: _Place) -> bool:
    owner = at.parents[parent] if isinstance(parent, cst.Arg) else None
    if isinstance(owner, cst.ClassDef):
        use.kind, use.site = "base", owner
        if owner.bases[0] is not parent:
            use.review = "another base comes first: check that its constructor passes the device on"
    elif isinstance(owner, cst.Call) and owner.args[0] is parent and _is_partial(owner, at.resolver):
        use.kind, use.site = "partial", owner
    elif owner is not None and _is_type_test(owner):
        use.kind = "type"
    elif isinstance(owner, cst.Call) and use.resolved.alias and isinstance(use.node, cst.Name):
        use.kind, use.review = "value", _PARTIAL_NOTE
    else:
        return False
    return True


def _is_partial(call: cst.Call, resolver: Resolver) -> bool:
    called = resolver.resolve(call.func)
    return called is not None and called.dotted.endswith(".partial")  # functools', funcy's, toolz's


def _attribute(use: Use, parent: cst.CSTNode, at: _Place) -> bool:
    if not isinstance(parent, cst.Attribute):
        return False
    use.kind = "type"
    if parent.attr.value in {"__init__", "__new__"}:
        use.manual = (
            f"`{parent.attr.value}` of the successor takes the device first; rewrite this call by hand"
        )
    return True


def _typed(use: Use, parent: cst.CSTNode, at: _Place) -> bool:
    node = parent
    while isinstance(
        node, (cst.Index, cst.SubscriptElement, cst.Subscript, cst.BinaryOperation, cst.Element, cst.Tuple)
    ):
        node = at.parents[node]
    in_subscript = node is not parent and isinstance(parent, (cst.Index, cst.SubscriptElement))
    tested = isinstance(node, cst.Arg) and _is_type_test(at.parents[node])
    compared = isinstance(parent, (cst.Comparison, cst.ComparisonTarget, cst.Expr, cst.MatchClass))
    if isinstance(node, cst.Annotation) or in_subscript or tested or compared:
        use.kind = "type"
        return True
    return False


def _is_type_test(call: cst.CSTNode) -> bool:
    func = call.func if isinstance(call, cst.Call) else None
    return isinstance(func, cst.Name) and func.value in {"isinstance", "issubclass"}


def _assigned(use: Use, parent: cst.CSTNode, at: _Place) -> bool:
    if not isinstance(parent, (cst.Assign, cst.AnnAssign)) or parent.value is not use.node:
        return False
    use.kind = "value"
    targets = [t.target for t in parent.targets] if isinstance(parent, cst.Assign) else [parent.target]
    if len(targets) == 1 and isinstance(targets[0], cst.Name) and targets[0].value == "_":
        use.kind = "type"  # a check whether the name exists
    elif len(targets) == 1 and isinstance(targets[0], cst.Name):
        use.kind, use.site = "alias", targets[0]
    else:
        use.review = _PARTIAL_NOTE
    return True


def _classify_module(use: Use, parent: cst.CSTNode, parents: Parents) -> None:
    use.kind = "module"
    owner = parents[parent] if isinstance(parent, cst.Arg) else None
    if (
        isinstance(parent, cst.Assign)
        and len(parent.targets) == 1
        and isinstance(parent.targets[0].target, cst.Name)
    ):
        use.kind, use.site = "module alias", parent.targets[0].target
    elif isinstance(owner, cst.Call) and owner.args[0] is parent and _tests_name(owner, "hasattr"):
        return
    elif isinstance(owner, cst.Call) and owner.args[0] is parent and _tests_name(owner, "getattr"):
        if not _is_condition(owner, parents):
            use.manual = "getattr with a default: the value may have either signature; rewrite it by hand"
    elif isinstance(parent, (cst.Comparison, cst.Expr)):
        return  # a check whether the name exists
    elif isinstance(parent, cst.Attribute):
        use.manual = f"`{use.legacy.dotted}.{parent.attr.value}` has no successor of that name"
    else:
        use.manual = f"the module `{use.legacy.dotted}` is used as an object; rewrite its uses by hand"


def _is_condition(node: cst.CSTNode, parents: Parents) -> bool:
    """Return whether only the truth of `node` matters; ``or`` and ``and`` may return it."""
    outer = next(each for each in around(node, parents) if not isinstance(each, cst.BooleanOperation))
    return isinstance(outer, (cst.Comparison, cst.If, cst.UnaryOperation))


def _tests_name(call: cst.Call, name: str) -> bool:
    word = call.args[1].value if len(call.args) > 1 else None
    named = isinstance(call.func, cst.Name) and call.func.value == name
    return named and isinstance(word, cst.SimpleString) and word.evaluated_value in OBJECTS


_CLASS_KINDS = {"type", "base", "partial"}


def settle_replaced(plan: Plan, parents: Parents) -> None:
    """Leave the names that the file itself replaces: it expects its own object where it uses them."""
    replaced = {use.legacy for use in plan.uses if isinstance(parents[use.node], cst.AssignTarget)}
    for use in plan.uses:
        if use.legacy in replaced:
            use.manual = f"this file assigns to `{use.legacy.dotted}`; rewrite that and its uses by hand"


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
        use.review = _PARTIAL_NOTE
    if use.manual:
        for other in uses:
            other.manual = other.manual or use.manual
    return bool(use.manual)


def settle_modules(plan: Plan, resolver: Resolver, exported: Collection[str]) -> None:
    """Leave ``name = torch.cuda.amp`` as it is if a use through `name` must be rewritten by hand."""
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
            use.review = _PARTIAL_NOTE if _reachable(use.site, resolver, exported) else use.review


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


def _may_get_position(call: cst.Call, resolver: Resolver, exported: Collection[str]) -> bool:
    """Return whether the value of `call` may be called with positional arguments."""
    parent = resolver.parents[call]
    if isinstance(parent, cst.Call) and parent.func is call:
        return has_positional(parent.args)
    targets = [each.target for each in parent.targets] if isinstance(parent, cst.Assign) else []
    scope = resolver.scope_of(call)
    if len(targets) != 1 or not isinstance(targets[0], cst.Name) or scope is None:
        return True
    uses = [access.node for binding in scope[targets[0].value] for access in binding.references]
    calls = [(resolver.parents[use], use) for use in uses]
    return _reachable(targets[0], resolver, exported) or any(
        not isinstance(call, cst.Call) or call.func is not use or has_positional(call.args)
        for call, use in calls
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
