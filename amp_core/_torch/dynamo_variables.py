"""How Dynamo traces a context manager of ours. Importing this imports Dynamo."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch._dynamo.bytecode_transformation import is_generator
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.ctx_manager import ContextWrappingVariable
from torch._dynamo.variables.functions import UserFunctionVariable
from torch._dynamo.variables.user_defined import UserDefinedClassVariable, UserDefinedObjectVariable

from amp_core._torch.context_manager import Constants, ContextManager
from amp_core._torch.dispatcher import is_value_for_dynamo


class InstanceVariable(ContextWrappingVariable):
    _nonvar_fields = {"how", "kind", "entered", *ContextWrappingVariable._nonvar_fields}  # noqa: RUF012

    def __init__(self, how: ContextManager, kind: type, target_values: Constants, **kwargs: Any) -> None:
        super().__init__(target_values=target_values, initial_values=None, **kwargs)
        self.how = how
        self.kind = kind
        self.entered: list[Any] = []

    def python_type(self) -> type:
        return self.kind

    def enter(self, tx: Any) -> Any:
        leaves, nodes = [], []
        for step in self.how.steps(*self.target_values):
            result = step.enter(*step.args)
            node = tx.output.create_node("call_function", step.enter, step.args, {})
            args = ((result,), (node,)) if step.hands_over else (step.args, step.args)
            cleanup = _Once(functools.partial(step.leave, *args[0]))
            tx.output.add_cleanup_hook(cleanup)
            leaves.append(cleanup)
            nodes.append((step.leave, args[1]))
        self.entered.append((leaves, nodes))
        return self

    def exit(self, tx: Any, *_args: Any) -> Any:
        leaves, nodes = self.entered.pop()
        for leave, (function, arguments) in zip(reversed(leaves), reversed(nodes), strict=True):
            leave()
            tx.output.create_node("call_function", function, arguments, {})
        return ConstantVariable.create(None)

    def call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
        # torch would enter the region for the call alone, which runs nothing of a generator's body.
        around: Any = self.how.around_generator
        if around is not None and hasattr(args[0], "get_code") and is_generator(args[0].get_code()):
            return UserFunctionVariable(around).call_function(tx, [self, *args], kwargs)
        return super().call_function(tx, args, kwargs)

    def call_method(self, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        # A region entered by hand is no block that Dynamo could enter again after a graph break: there
        # it runs the function uncompiled.
        if name == "__enter__":
            tx.active_generic_context_managers.append(self)
            return self.enter(tx)
        if name == "__exit__" and self.entered:
            tx.active_generic_context_managers.pop()
            return self.exit(tx)
        return super().call_method(tx, name, args, kwargs)

    def module_name(self) -> str:
        return self.how.rebuild.__module__

    def fn_name(self) -> str:
        return self.how.rebuild.__name__


class BuilderVariable(UserDefinedClassVariable):
    _nonvar_fields = {"how", *UserDefinedClassVariable._nonvar_fields}  # noqa: RUF012

    def __init__(self, how: ContextManager, value: Any, **kwargs: Any) -> None:
        super().__init__(value, **kwargs)
        self.how = how

    def call_function(self, _tx: Any, args: Any, kwargs: Any) -> Any:
        built = self.value(*map(_value, args), **{key: _value(value) for key, value in kwargs.items()})
        return InstanceVariable(self.how, type(built), self.how.describe(built))


def _value(variable: VariableTracker) -> Any:
    variable = variable.realize()
    if variable.is_tensor():
        return variable.as_proxy().node.meta["example_value"]
    if isinstance(variable, UserDefinedObjectVariable):
        if variable.source is not None:
            by_value = is_value_for_dynamo(variable.value)
            how = GuardBuilder.EQUALS_MATCH if by_value else GuardBuilder.ID_MATCH
            install_guard(variable.source.make_guard(how))
        return variable.value
    return variable.as_python_constant()


class _Once:
    """A function without arguments that does nothing when it is called again."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._function: Callable[[], object] | None = function

    def __call__(self) -> None:
        function, self._function = self._function, None
        if function is not None:
            function()
