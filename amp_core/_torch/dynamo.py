"""What amp-core tells Dynamo, the tracer behind ``torch.compile`` and ``torch.export``.

Importing Dynamo takes two seconds, so nothing here imports it before torch does.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Hashable, Sequence
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any, NamedTuple

import torch

from amp_core._torch.features import Feature
from amp_core._torch.internals import enter_autocast, exit_autocast

_GRAPHS = Feature(
    "compiled_regions",
    "torch.compile does not know the regions of amp-core: call such functions uncompiled",
    "torch._C._dynamo.eval_frame.set_code_exec_strategy",
    "torch._dynamo.guards.GlobalStateSource",
    "torch._dynamo.output_graph.OutputGraph.init_ambient_guards",
    "torch._dynamo.types.FrameExecStrategy",
    "torch._dynamo.callback.callback_handler",
    "torch._dynamo.variables.builder.VariableBuilder._type_dispatch",
    "torch._dynamo.variables.builder.VariableBuilder._id_dispatch",
    "torch._dynamo.variables.ctx_manager.ContextWrappingVariable._nonvar_fields",
    "torch._dynamo.variables.user_defined.UserDefinedClassVariable",
)


Constants = tuple[Hashable, ...]
"""What can stand in compiled bytecode: numbers, strings, dtypes, None."""


class Step(NamedTuple):
    """One change of state that a graph makes and later takes back.

    Attributes:
        enter: called with `args`, while tracing and by the graph.
        args: constants.
        leave: takes back what `enter` did; called with `enter`'s result if `hands_over`, else with `args`.
        hands_over: see `leave`.
    """

    enter: Callable[..., Any]
    args: Constants
    leave: Callable[..., Any]
    hands_over: bool = False


class ContextManager(NamedTuple):
    """How Dynamo traces the instances of one class of context managers.

    Attributes:
        describe: an instance to the constants that say what it does.
        steps: those constants to what entering does, asked each time it is entered.
        rebuild: a function of those constants that returns an equal instance; named by its module, so that
            code after a graph break can enter it again.
    """

    describe: Callable[[Any], Constants]
    steps: Callable[..., Sequence[Step]]
    rebuild: Callable[..., Any]


def autocast_step(device: str, dtype: torch.dtype, enabled: bool, keeps_casts: bool) -> Step:
    """Return what the graph of a ``torch.autocast`` does; `torch.export` and its caches know these calls.

    For: regions in graphs. If they go: no region can be compiled.
    """
    return Step(enter_autocast, (device, dtype, enabled, keeps_casts), exit_autocast, hands_over=True)


def is_loaded() -> bool:
    """Whether Dynamo has been imported, so that something may have been compiled."""
    return "torch._dynamo" in sys.modules


def when_loaded(callback: Callable[[], None]) -> None:
    """Call `callback` once Dynamo is imported: now, or when ``torch.compile`` imports it.

    A callback that fails on a changed torch turns off regions in compiled code, not the import.
    """

    def attempt() -> None:
        if not _GRAPHS.complete or not _GRAPHS.attempt(callback):
            _GRAPHS.warn()

    if "torch._dynamo" in sys.modules:
        attempt()
    else:
        sys.meta_path.insert(0, _DynamoImport(attempt))


class _DynamoImport(importlib.abc.MetaPathFinder):
    """Calls a function after the import of Dynamo, which itself has no hook for that."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback

    def find_spec(
        self, name: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find Dynamo as the other finders do, with a loader that calls back."""
        if name != "torch._dynamo":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self._callback()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def guard_on(read: Callable[[], object], name: str) -> None:
    """Let every graph hold only while `read()` returns what it returned when Dynamo traced the graph.

    For: the policy around a compiled function. If it goes: a graph keeps the policy of its first call.
    Dynamo must be loaded.
    """
    from torch._dynamo.guards import GlobalStateSource
    from torch._dynamo.output_graph import OutputGraph

    init_ambient_guards: Any = OutputGraph.init_ambient_guards

    @functools.wraps(init_ambient_guards)
    def with_ours(self: Any) -> None:
        init_ambient_guards(self)
        expected = read()

        def install(builder: Any, guard: Any) -> None:
            def holds(_frame: object) -> bool:
                return read() == expected

            add: Any = builder.guard_manager.root.add_lambda_guard
            try:
                add(holds, [f"{name} changed"], guard.user_stack)
            except TypeError:  # torch before 2.12
                add(holds, [f"{name} changed"])

        self.guards.add(GlobalStateSource().make_guard(install))

    OutputGraph.init_ambient_guards = with_ours  # type: ignore[method-assign]


def tag_caches(tag: Callable[[], str]) -> None:
    """Add `tag()`, asked when a compile starts, to the keys of torch's caches of compiled code.

    For: graphs that were traced alike and computed otherwise. If it goes: a program loads code that another
    one compiled under another policy. Dynamo must be loaded.
    """
    from torch._dynamo.callback import callback_handler
    from torch.compiler import config

    earlier: list[str] = []

    def start(_args: object) -> None:
        earlier.append(config.cache_key_tag)
        added = tag()
        if added:
            config.cache_key_tag = f"{config.cache_key_tag}{added}"

    def end(_args: object) -> None:
        if earlier:
            before = earlier.pop()
            if config.cache_key_tag != before:
                config.cache_key_tag = before

    callback_handler.register_start_callback(start)
    callback_handler.register_end_callback(end)


def run_uncompiled(functions: Sequence[Callable[..., Any]]) -> None:
    """Let Dynamo leave `functions`, and all that they call, as they are when code between graphs runs them.

    Dynamo must be loaded. For: entering regions after a graph break. If it goes: Dynamo compiles that.
    """
    from torch._dynamo.types import FrameAction, FrameExecStrategy

    for function in functions:
        strategy = FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP)
        torch._C._dynamo.eval_frame.set_code_exec_strategy(function.__code__, strategy)


_never_compiled: set[CodeType] = set()


def never_compile(function: Callable[..., Any]) -> None:
    """Do what `run_uncompiled` does, now or when Dynamo is imported.

    For: kernels, which ops between graphs call. If it goes: Dynamo compiles them, and fails at dispatch keys.
    """
    if function.__code__ not in _never_compiled:
        _never_compiled.add(function.__code__)
        when_loaded(lambda: run_uncompiled([function]))


def trace_as_context_manager(classes: Sequence[type], how: ContextManager) -> None:
    """Let Dynamo trace instances of `classes`, built in the traced function or outside of it.

    Dynamo then treats them as its own context managers: one may be entered again after a graph break. Dynamo
    must be loaded. For: regions. If it goes: a graph break inside a region runs the function uncompiled.
    """
    from torch._dynamo.guards import GuardBuilder
    from torch._dynamo.variables.builder import VariableBuilder

    from amp_core._torch.dynamo_variables import BuilderVariable, InstanceVariable

    def wrap_instance(builder: Any, value: Any) -> Any:
        try:
            constants = how.describe(value)
        except AttributeError:  # its constructor is still running
            return builder.wrap_user_defined(value)
        builder.install_guards(GuardBuilder.ID_MATCH)
        return InstanceVariable(how, constants, source=builder.source)

    def wrap_builder(builder: Any, value: Any) -> Any:
        builder.install_guards(GuardBuilder.ID_MATCH)
        return BuilderVariable(how, value, source=builder.source)

    rebuild = [how.rebuild] if hasattr(how.rebuild, "__code__") else []
    run_uncompiled([*rebuild, *(f for cls in classes for f in _methods(cls))])
    by_type, by_id = VariableBuilder._type_dispatch(), VariableBuilder._id_dispatch()
    by_id[id(how.rebuild)] = wrap_builder
    for cls in classes:
        by_type[cls] = wrap_instance
        by_id[id(cls)] = wrap_builder


def _methods(cls: type) -> list[Callable[..., Any]]:
    names = ("__init__", "__enter__", "__exit__")
    return [cls.__dict__[name] for name in names if name in cls.__dict__]
