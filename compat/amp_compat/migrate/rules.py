"""Decide from context how to rewrite a use of a deprecated name."""

from __future__ import annotations

from typing import NamedTuple

import libcst as cst

from amp_compat.migrate.bindings import Resolver
from amp_compat.migrate.calls import gives_dtype, passes_device
from amp_compat.migrate.names import OBJECTS, Legacy
from amp_compat.migrate.plan import Use
from amp_compat.migrate.tree import Parents, around

_MOVED = frozenset({"_refresh_per_optimizer_state", "_MultiDeviceReplicator"})


def classify(use: Use, parents: Parents, resolver: Resolver) -> None:
    """Set `kind`, `site`, `manual` and `review` of a use from its context."""
    parent = parents[use.node]
    use.tested = isinstance(use.node, cst.Name) and is_condition(use.node, parents)
    if not use.legacy.name:
        _classify_module(use, parent, parents)
        return
    if use.legacy.name == "OptState":  # the same object
        use.kind = "type"
        return
    place = _Place(parents, resolver)
    for rule in (_call, _decorator, _argument, _attribute, _tested, _typed, _assigned):
        if rule(use, parent, place):
            return
    if isinstance(parent, (cst.Return, cst.IfExp, cst.Lambda)):
        use.kind = "value"
        use.review = PARTIAL_NOTE
        return
    keyword = "device_type=" if use.legacy.name.startswith("custom_") else ""
    use.manual = (
        f"`{use.legacy.dotted}` is used as a value here; "
        f"pass functools.partial(..., {keyword}'{use.legacy.device}')"
    )


PARTIAL_NOTE = (
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
    elif isinstance(owner, cst.Call) and _is_first(parent, owner) and _is_partial(owner, at.resolver):
        use.kind, use.site = "partial", owner
    elif owner is not None and _is_type_test(owner):
        use.kind = "type"
    elif isinstance(owner, cst.Call) and use.resolved.alias and isinstance(use.node, cst.Name):
        use.kind, use.review = "value", PARTIAL_NOTE
    else:
        return False
    return True


def _is_first(arg: cst.CSTNode, call: cst.Call) -> bool:
    return call.args[0] is arg and call.args[0].keyword is None


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


def _tested(use: Use, parent: cst.CSTNode, at: _Place) -> bool:
    if not is_condition(use.node, at.parents):
        return False
    use.kind = "type"
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
        use.review = PARTIAL_NOTE
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
        if not is_condition(owner, parents):
            use.manual = "getattr with a default: the value may have either signature; rewrite it by hand"
    elif isinstance(parent, cst.Expr) or is_condition(use.node, parents):
        return  # a check whether the name exists
    elif isinstance(parent, cst.Attribute):
        use.manual = no_successor(use.legacy, parent.attr.value)
    else:
        use.manual = f"the module `{use.legacy.dotted}` is used as an object; rewrite its uses by hand"


def no_successor(module: Legacy, name: str) -> str:
    """Return what to do about `name`, which is in a deprecated module but not one of the objects above."""
    if name == "amp_definitely_not_available":
        return f"`{name}` has no successor; write `not torch.cuda.is_available()`"
    if name in _MOVED:
        return f"`{name}` is private, and in torch.amp.grad_scaler since torch 2.3"
    return f"`{module.dotted}.{name}` has no successor of that name"


def is_condition(node: cst.CSTNode, parents: Parents) -> bool:
    """Return whether only the truth or identity of `node` matters; ``or`` and ``and`` may return it."""
    inner = node
    for outer in around(node, parents):
        if isinstance(outer, (cst.Comparison, cst.ComparisonTarget, cst.UnaryOperation)):
            return True
        if not isinstance(outer, cst.BooleanOperation):
            return isinstance(outer, (cst.If, cst.IfExp, cst.While, cst.Assert)) and outer.test is inner
        inner = outer
    return False


def _tests_name(call: cst.Call, name: str) -> bool:
    word = call.args[1].value if len(call.args) > 1 else None
    named = isinstance(call.func, cst.Name) and call.func.value == name
    return named and isinstance(word, cst.SimpleString) and word.evaluated_value in OBJECTS
