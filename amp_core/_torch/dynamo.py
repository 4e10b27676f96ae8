"""What amp-core tells Dynamo, the tracer behind ``torch.compile`` and ``torch.export``.

Importing Dynamo takes two seconds, so nothing here imports it before torch does.
"""

from __future__ import annotations

import functools
import importlib.abc
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

import torch

from amp_core._torch.autocast import enter_autocast, exit_autocast
from amp_core._torch.context_manager import ContextManager, Step
from amp_core._torch.features import Feature

_GRAPHS = Feature(
    "compiled_regions",
    "torch.compile does not know the regions of amp-core: call such functions uncompiled",
    "torch._C._dynamo.eval_frame.set_code_exec_strategy",
    "torch._dynamo.guards.GlobalStateSource",
    "torch._dynamo.guards.GuardBuilder.get_guard_manager",
    "torch._dynamo.guards.install_guard",
    "torch._dynamo.output_graph.OutputGraph.init_ambient_guards",
    "torch._dynamo.types.FrameAction",
    "torch._dynamo.types.FrameExecStrategy",
    "torch._dynamo.output_graph.OutputGraph.call_user_compiler",
    "torch._dynamo.variables.builder.VariableBuilder._type_dispatch",
    "torch._dynamo.variables.builder.VariableBuilder._id_dispatch",
    "torch._dynamo.bytecode_transformation.is_generator",
    "torch._dynamo.variables.base.VariableTracker",
    "torch._dynamo.variables.constant.ConstantVariable",
    "torch._dynamo.variables.ctx_manager.ContextWrappingVariable._nonvar_fields",
    "torch._dynamo.variables.functions.UserFunctionVariable",
    "torch._dynamo.variables.user_defined.UserDefinedClassVariable",
    "torch._dynamo.variables.user_defined.UserDefinedObjectVariable",
)


def autocast_step(device: str, dtype: torch.dtype, enabled: bool, keeps_casts: bool) -> Step:
    """Return what the graph of a ``torch.autocast`` does; `torch.export` and its caches know these calls.

    Without them, no region can be compiled.
    """
    return Step(enter_autocast, (device, dtype, enabled, keeps_casts), exit_autocast, hands_over=True)


def when_loaded(callback: Callable[[], None]) -> None:
    """Call `callback` once Dynamo is imported: now, or when ``torch.compile`` imports it.

    A callback that fails on a changed torch turns off regions in compiled code, not the import.
    """

    def attempt() -> None:
        if not _GRAPHS.complete or not _GRAPHS.attempt(callback):
            _GRAPHS.warn()

    _after_import("torch._dynamo", attempt)


_EXPORT_TRACE = Feature(
    "export_warning",
    "torch.export of a model inside a region gives no warning",
    "torch.export._trace._export",
)


def before_export(callback: Callable[[], None]) -> None:
    """Call `callback` whenever `torch.export.export` is called.

    Otherwise nothing warns that an exported program does not keep the regions around the call.
    """

    def wrap() -> None:
        trace = sys.modules["torch.export._trace"]
        export: Any = trace._export

        @functools.wraps(export)
        def announced(*args: Any, **kwargs: Any) -> Any:
            callback()
            return export(*args, **kwargs)

        trace._export = announced  # type: ignore[attr-defined]

    _after_import("torch.export._trace", lambda: _EXPORT_TRACE.attempt(wrap))


def _after_import(name: str, callback: Callable[[], Any]) -> None:
    if name in sys.modules:
        callback()
    else:
        _after_imports.add(name, callback)


class _AfterImports(importlib.abc.MetaPathFinder):
    """Calls functions after the import of modules that have no hook for that.

    It is never removed from the finders: an import in another thread would then skip the next one.
    """

    def __init__(self) -> None:
        self._callbacks: dict[str, list[Callable[[], Any]]] = {}

    def add(self, name: str, callback: Callable[[], Any]) -> None:
        """Call `callback` after the import of the module `name`."""
        self._callbacks.setdefault(name, []).append(callback)
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find the module as the finders after this one do, with a loader that calls back."""
        if name not in self._callbacks:
            return None
        finders = iter([*sys.meta_path])
        any(each is self for each in finders)  # leaves the later ones: the earlier may ask this one in turn
        specs = (each.find_spec(name, path, target) for each in finders if hasattr(each, "find_spec"))
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                for callback in self._callbacks.pop(name, ()):
                    callback()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_after_imports = _AfterImports()


def guard_on(read: Callable[[], object], name: str) -> None:
    """Let every graph hold only while `read()` returns what it returned when Dynamo traced the graph.

    Otherwise a graph keeps the policy of its first call. Dynamo must be loaded.
    """
    from torch._dynamo.guards import GlobalStateSource
    from torch._dynamo.output_graph import OutputGraph

    init_ambient_guards: Any = OutputGraph.init_ambient_guards

    @functools.wraps(init_ambient_guards)
    def with_ours(self: Any) -> None:
        init_ambient_guards(self)
        guard = functools.partial(_add_reading_guard, read=read, name=name, expected=read())
        self.guards.add(GlobalStateSource().make_guard(guard))

    OutputGraph.init_ambient_guards = with_ours  # type: ignore[method-assign]


def _add_reading_guard(
    builder: Any, guard: Any, *, read: Callable[[], object], name: str, expected: object
) -> None:
    # No closure: torch 2.15 saves none with the guards of a compiled function.
    _add_guard(builder.guard_manager.root, lambda _frame: read() == expected, name, guard)


def _add_guard(manager: Any, holds: Callable[[Any], bool], name: str, guard: Any) -> None:
    try:
        manager.add_lambda_guard(holds, [f"{name} changed"], guard.user_stack)
    except TypeError:  # torch before 2.12
        manager.add_lambda_guard(holds, [f"{name} changed"])


_BACKWARD = Feature(
    "compiled_backward",
    "a function compiled inside a region with a policy runs its backward pass by that region's rules",
    "torch._functorch.config.backward_pass_autocast",
)


def compile_under(tag: Callable[[], str], changes_rules: Callable[..., object]) -> None:
    """Compile graphs for what `tag()` names: for it alone, and with a backward pass outside of regions.

    Graphs that call `changes_rules` have such a backward pass, too.

    The tag is added to the keys of torch's caches of compiled code. Otherwise a program would load code that
    another one, traced alike, compiled under another policy.

    By itself, torch compiles the backward pass as if it ran in the region of the forward pass. There, the
    rule of ``mm`` would change what the policy has ``linear`` compute in float32. A choice that the user made
    in torch's configuration is kept. Dynamo must be loaded.
    """
    from torch._dynamo.output_graph import OutputGraph
    from torch.compiler import config as torch_config

    config: Any = torch_config
    call_user_compiler: Any = OutputGraph.call_user_compiler

    @functools.wraps(call_user_compiler)
    def tagged(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Not a compile callback: torch._dynamo.reset() forgets those.
        added = tag()
        has_rules = bool(added) or _calls(args[0], changes_rules)
        with _backward_outside(has_rules), config.patch(cache_key_tag=f"{config.cache_key_tag}{added}"):
            return call_user_compiler(self, *args, **kwargs)

    OutputGraph.call_user_compiler = tagged  # type: ignore[method-assign]


def _calls(model: torch.fx.GraphModule, function: Callable[..., object]) -> bool:
    """Whether a graph, or one inside it as that of a checkpoint, calls `function`."""
    graphs = [module.graph for module in model.modules() if isinstance(module, torch.fx.GraphModule)]
    return any(node.target is function for graph in graphs for node in graph.nodes)


def _backward_outside(wanted: bool) -> AbstractContextManager[Any]:
    if not wanted or not _BACKWARD.works_or_warn():
        return nullcontext()
    from torch._functorch import config as functorch_config

    config: Any = functorch_config
    if config.backward_pass_autocast != "same_as_forward":
        return nullcontext()
    outside: AbstractContextManager[Any] = config.patch(backward_pass_autocast="off")
    return outside


def run_uncompiled(functions: Sequence[Callable[..., Any]]) -> None:
    """Let Dynamo leave `functions`, and all that they call, as they are when code between graphs runs them.

    For the functions that enter regions again after a graph break. Dynamo must be loaded.
    """
    from torch._dynamo.types import FrameAction, FrameExecStrategy

    for function in functions:
        strategy = FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP)
        torch._C._dynamo.eval_frame.set_code_exec_strategy(function.__code__, strategy)


_never_compiled: set[CodeType] = set()


def never_compile(function: Callable[..., Any]) -> None:
    """Do what `run_uncompiled` does, now or when Dynamo is imported.

    Otherwise Dynamo compiles the kernels that ops between graphs call, and fails at dispatch keys. Under
    compiled autograd it takes each backward pass and hook of ours apart, into a dozen graphs.
    """
    if function.__code__ not in _never_compiled:
        _never_compiled.add(function.__code__)
        when_loaded(lambda: run_uncompiled([function]))


def trace_as_context_manager(classes: Sequence[type], how: ContextManager) -> None:
    """Let Dynamo trace instances of `classes`, built in the traced function or outside of it.

    Dynamo then treats them as its own context managers: one may be entered again after a graph break. Dynamo
    must be loaded. Otherwise a graph break inside a region runs the function uncompiled.
    """
    from torch._dynamo.guards import GuardBuilder
    from torch._dynamo.variables.builder import VariableBuilder

    from amp_core._torch.dynamo_variables import BuilderVariable, InstanceVariable

    def wrap_instance(builder: Any, value: Any) -> Any:
        try:
            constants = how.describe(value)
        except AttributeError:  # its constructor is still running
            return builder.wrap_user_defined(value)
        kind = type(value)
        guard = functools.partial(_add_instance_guard, kind=kind, constants=constants)
        builder.install_guards(guard)
        return InstanceVariable(how, kind, constants, source=builder.source)

    def wrap_builder(builder: Any, value: Any) -> Any:
        builder.install_guards(GuardBuilder.ID_MATCH)
        return BuilderVariable(how, value, source=builder.source)

    _let_guards_be_reused()
    rebuild = [how.rebuild] if hasattr(how.rebuild, "__code__") else []
    run_uncompiled([*rebuild, *(f for cls in classes for f in _methods(cls))])
    by_type, by_id = VariableBuilder._type_dispatch(), VariableBuilder._id_dispatch()
    by_id[id(how.rebuild)] = wrap_builder
    for cls in classes:
        _traced[cls] = how
        by_type[cls] = wrap_instance
        by_id[id(cls)] = wrap_builder


def trace_as_own_class(cls: type, methods: Sequence[Callable[..., Any]]) -> None:
    """Let Dynamo call `methods` of instances of `cls`, uncompiled: it takes them for ``torch.autocast``.

    Dynamo must be loaded. Otherwise it ignores that a subclass overrides them, or fails at their ``super()``.
    """
    from torch._dynamo.variables.builder import VariableBuilder

    run_uncompiled([method for method in methods if hasattr(method, "__code__")])
    VariableBuilder._type_dispatch()[cls] = lambda builder, value: builder.wrap_user_defined(value)


_traced: dict[type, ContextManager] = {}


def _is_as(value: Any, kind: type, constants: object) -> bool:
    return type(value) is kind and _traced[kind].describe(value) == constants


def _add_instance_guard(guards: Any, guard: Any, *, kind: type, constants: object) -> None:
    manager = guards.get_guard_manager(guard)
    _add_guard(manager, lambda value: _is_as(value, kind, constants), kind.__name__, guard)


def _let_guards_be_reused() -> None:
    """Tell ``torch.compiler.nested_compile_region``, which reuses graphs, how to check these guards.

    It refuses functions with guards that its table does not name. Not every torch has one.
    """
    from torch._dynamo import guards

    known = getattr(guards, "GUARD_VALUE_DISPATCH", None)
    if known is not None:
        known[_add_instance_guard.__name__] = guards.GuardCheckSpec(
            lambda _guard, value: (type(value), _traced[type(value)].describe(value)),
            lambda value, expected: _is_as(value, *expected),
        )


def _methods(cls: type) -> list[Callable[..., Any]]:
    names = ("__init__", "__enter__", "__exit__")
    return [cls.__dict__[name] for name in names if name in cls.__dict__]
