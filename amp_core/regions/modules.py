"""Op rules for some modules of a model: applied and removed without editing its code."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from os import PathLike
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from amp_core._torch.autocast import autocast_off
from amp_core._torch.modules import tree_map_only
from amp_core._torch.tracing import is_exporting, untraced
from amp_core.common.arguments import check_module, home_of
from amp_core.common.handle import Handle
from amp_core.common.text import counted
from amp_core.dispatch.activate import RuleOverrides
from amp_core.dispatch.target_dtype import eligible
from amp_core.errors import PolicyError
from amp_core.policy.changes import OpName, check_device_type, resolve
from amp_core.policy.explanations import Explanations
from amp_core.policy.op_policy import OpPolicy
from amp_core.policy.recipes import as_rule
from amp_core.policy.rules import FP32
from amp_core.policy.toml import read_modules, write_modules
from amp_core.regions.selecting import CLASS_PATH, Selector, listed, select

Rules = Any
"""A mapping from op to rule, or ``"fp32"``."""

_REGION = "_amp_policy_region"
_SCRIPTED = "__prepare_scriptable__"  # torch.jit.script calls it
_REPLICATED = "_replicate_for_data_parallel"  # nn.DataParallel calls it


@untraced
def apply_policy(
    model: nn.Module,
    rules: Mapping[Selector, Rules] | PathLike[str],
    *,
    device_type: str | None = None,
) -> AppliedPolicy:
    """Give some modules of `model` their own op rules.

    While such a module runs, its rules override the policy in force: the region's, or the device's default,
    and rules that were applied to the module before. Outside autocast they have no effect.

    Args:
        model: the model; modified in place. `AppliedPolicy.remove` restores it.
        rules: a mapping from a selection of modules to either op rules, as for `OpPolicy.override`, or
            ``"fp32"``, which runs the module without autocast and casts its floating-point tensor arguments
            to float32. A selection is a module of the model, a class (with its subclasses; in a file
            ``"torch.nn.modules.normalization:LayerNorm"``), or a glob over the names in
            ``model.named_modules()``: ``*`` matches one part of a name, ``**`` any number of parts, ``""``
            the model itself. If several select a module, later ones take precedence. Alternatively, the path
            of a TOML file with such rules in its ``modules`` table.
        device_type: defaults to the device type of the model's first parameter or buffer; on the meta
            device, to that of the accelerator, or the CPU.

    Returns:
        A handle that removes the rules again; also a context manager.

    Raises:
        PolicyError: a selection contains no module, an op or rule is unknown or cannot be applied, or
            `device_type` is no device type; for a file, with its line. The model is left unchanged.
        OSError: the file cannot be read.
        TypeError: `rules` is neither a mapping nor a path.

    Example:
        >>> import torch, amp_core
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        >>> with amp_core.apply_policy(model, {"1": "fp32"}), amp_core.autocast("cpu"):
        ...     model(torch.ones(1, 2)).dtype
        torch.float32
        >>> amp_core.apply_policy(model, {torch.nn.Linear: "fp32"}).modules
        ('0', '1')
    """
    check_module(model, "apply_policy")
    if device_type is None:
        device_type = _device_type(model)
    check_device_type(device_type)
    places: Mapping[str, str] = {}
    if isinstance(rules, PathLike):
        rules, places = read_modules(rules)
    if not isinstance(rules, Mapping):
        raise TypeError(_no_rules(rules))
    planned: dict[str, _ModuleRegion] = {}
    written: dict[str, Rules] = {}
    for selector, what in rules.items():
        try:
            names, text = select(model, selector)
            region = _module_region(device_type, text, what)
            for name in names:
                planned[name] = region.on_top_of(planned.get(name))
        except PolicyError as error:
            if selector not in places:
                raise
            raise PolicyError(f"{places[selector]}: {error}") from error
        written.pop(text, None)
        written[text] = what
    return AppliedPolicy(model, device_type, planned, written)


def _no_rules(rules: object) -> str:
    hint = ""
    if isinstance(rules, str):
        hint = f" To read the file, pass pathlib.Path({rules!r})."
    elif isinstance(rules, OpPolicy):
        hint = " A whole OpPolicy belongs to a region: autocast(device, policy=...)."
    return (
        "rules must map modules to op rules, as in {'head.*': {'linear': 'fp32'}}, or be the pathlib.Path of "
        f"a TOML file, not {type(rules).__name__}.{hint}"
    )


class AppliedPolicy(Handle):
    """The rules that `apply_policy` applied to a model. As a context manager, removes them on exit.

    Attributes:
        modules: the names of the modules with their own rules.
    """

    def __init__(
        self,
        model: nn.Module,
        device_type: str,
        regions: Mapping[str, _ModuleRegion],
        rules: Mapping[str, Rules],
    ) -> None:
        self.modules = tuple(regions)
        self._rules = rules
        self._regions = regions
        self._device_type = device_type
        self._wrapped: list[_Wrapped] = []
        try:
            for name, region in regions.items():
                self._wrapped.append(_Wrapped(model.get_submodule(name), region))
                self._wrapped[-1].attach()
        except BaseException:  # an interrupt: nobody gets the handle that removes the rules
            for wrapped in reversed(self._wrapped):
                wrapped.remove()
            raise

    @untraced
    def remove(self) -> None:
        """Remove the rules. Calling it again has no effect.

        Raises:
            PolicyError: another wrapper was applied to one of the modules later and is still there.
        """
        for wrapped in self._wrapped:
            wrapped.check_removable()
        for wrapped in self._wrapped:
            wrapped.remove()
        self._wrapped = []

    def to_toml(self) -> str:
        """Return the rules as TOML that `apply_policy` can read from a file."""
        return write_modules(
            {g: what if isinstance(what, str) else _named(what) for g, what in self._rules.items()}
        )

    def explain(self, module: str, op: OpName) -> Explanations:
        """Return the rule and origin of `op` inside one module, on top of the device's default policy.

        Args:
            module: a name from `modules`.
            op: an op name or op object, as for `OpPolicy`.

        Returns:
            One `Explanation` per overload.

        Raises:
            PolicyError: the module has no rules of its own, or the op is unknown.
        """
        if module not in self._regions:
            raise PolicyError(f"The module {module!r} has no rules of its own; {listed(self.modules)}.")
        return self._regions[module].on(OpPolicy.default(self._device_type)).explain(op)

    def __repr__(self) -> str:
        return (
            f"<AppliedPolicy on {counted(len(self.modules), 'module')}: {', '.join(map(repr, self.modules))}>"
        )


class _ModuleRegion:
    """The context in which one module's forward runs: changed op rules, or no autocast."""

    def __init__(self, device_type: str, changes: RuleOverrides | None) -> None:
        self.device_type = device_type
        self.changes = changes
        self._no_change = RuleOverrides(device_type, {}, f"module rule {FP32!r}")

    def on_top_of(self, other: _ModuleRegion | None) -> _ModuleRegion:
        if other is None or other.changes is None or self.changes is None:
            return self
        origin = f"{other.changes.origin}, {self.changes.origin}"
        return _ModuleRegion(
            self.device_type,
            RuleOverrides(self.device_type, {**other.changes.rules, **self.changes.rules}, origin),
        )

    def on(self, policy: OpPolicy) -> OpPolicy:
        if self.changes is not None:
            return self.changes.on(policy)
        return policy.override(dict.fromkeys(policy.rules, "unchanged"), origin="module rule 'fp32'")

    def run(self, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.changes is not None:
            with self.changes:
                return call(*args, **kwargs)
        if not torch.is_autocast_enabled(self.device_type):
            return call(*args, **kwargs)
        args, kwargs = tree_map_only(torch.Tensor, self._float32, (args, kwargs))
        with self._shown_in_graphs(), autocast_off(self.device_type):
            return call(*args, **kwargs)

    def _shown_in_graphs(self) -> AbstractContextManager[None]:
        # Without a rule in the graph, Dynamo compiles the backward pass of the module in low precision.
        if torch.compiler.is_dynamo_compiling() and not is_exporting():
            return self._no_change
        return nullcontext()

    def _float32(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.float() if eligible(tensor, self.device_type) else tensor


def runs_in_float32(module: nn.Module) -> bool:
    """Return whether `module` has the rule ``"fp32"``."""
    region = module.__dict__.get(_REGION)
    return region is not None and region.changes is None


class _Forward(functools.partial[Any]):
    """What replaces a forward, with its signature: `torch.export` and trainers ask for argument names."""

    @property
    def __signature__(self) -> inspect.Signature:
        module, _, wrapped = self.args
        return inspect.signature(type(module).forward.__get__(module) if wrapped is None else wrapped)


_KEYS = {"forward", _REGION, _SCRIPTED, _REPLICATED}
_CONTENTS = ("_parameters", "_buffers", "_modules")


class _Wrapped:
    """A module whose forward is replaced on the instance.

    Dynamo guards on instance attributes, so a compiled model notices the change. The forward is a partial,
    not a bound method: a deep copy binds both to the copied module, but a pickle turns a bound method into
    the forward of the class. A hook refuses other copies, whose forward would use the original's weights. It
    also keeps nn.TransformerEncoderLayer off a fast path that uses weights without calling the module.
    """

    def __init__(self, module: nn.Module, region: _ModuleRegion) -> None:
        self._module = module
        self._earlier = {key: module.__dict__[key] for key in _KEYS if key in module.__dict__}
        self._hook: RemovableHandle | None = None
        wrapped = self._earlier.get("forward")
        if isinstance(wrapped, functools.partial) and wrapped.func is forward:  # rules applied earlier
            _, below, wrapped = wrapped.args
            region = region.on_top_of(below)
        self._region, self._forward = region, _Forward(forward, module, region, wrapped)

    def attach(self) -> None:
        self._hook = self._module.register_forward_pre_hook(_refuse_copy)
        refuse = functools.partial(_refuse_script, self._module)
        replicate = functools.partial(_replicate, self._module)
        replaced = {"forward": self._forward, _SCRIPTED: refuse, _REPLICATED: replicate}
        self._module.__dict__.update({_REGION: self._region, **replaced})

    def check_removable(self) -> None:
        if self._module.__dict__.get("forward") is not self._forward:
            raise PolicyError(
                f"The forward of {type(self._module).__name__} was replaced after the policy was applied; "
                f"remove that replacement first."
            )

    def remove(self) -> None:
        if self._hook is not None:
            self._hook.remove()
        self._module.__dict__.update(self._earlier)  # first: another thread may call the module
        for key in _KEYS - self._earlier.keys():
            self._module.__dict__.pop(key, None)


def forward(self: nn.Module, region: _ModuleRegion, wrapped: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Run what was the module's forward, its class's if `wrapped` is None, in the region of its rules."""
    if wrapped is None:
        return region.run(type(self).forward, (self, *args), kwargs)
    return region.run(wrapped, args, kwargs)


def _refuse_copy(module: nn.Module, _args: object) -> None:
    """Raise PolicyError if `module` has the forward of another one and weights of its own."""
    if torch.compiler.is_compiling():
        return
    call = module.__dict__.get("forward")
    owner = call.args[0] if isinstance(call, _Forward) else module
    if owner is not module and any(vars(owner)[key] is not vars(module)[key] for key in _CONTENTS):
        raise PolicyError(
            f"This {type(module).__name__} has the attributes of a module with rules, and so its forward, "
            f"which uses the weights of that one. Before it is copied, call remove() of what apply_policy "
            f"returned, and apply the rules to the copy; or copy it with copy.deepcopy."
        )


def _replicate(module: nn.Module) -> nn.Module:
    """Return the copy of `module` that nn.DataParallel gives weights on another device."""
    replica: nn.Module = type(module)._replicate_for_data_parallel(module)  # type: ignore[no-untyped-call]
    call = replica.__dict__.get("forward")
    if isinstance(call, _Forward):
        replica.__dict__["forward"] = _Forward(forward, replica, *call.args[1:])
    return replica


def _module_region(device_type: str, selector: str, what: Rules) -> _ModuleRegion:
    if isinstance(what, str):
        if what != FP32:
            raise PolicyError(f"{selector!r}: {what!r} is not a rule for a module; use 'fp32' or op rules.")
        return _ModuleRegion(device_type, None)
    try:
        rules = OpPolicy(device_type, what).rules
    except PolicyError as error:
        raise PolicyError(f"{selector!r}: {error}") from error
    kind = "class" if CLASS_PATH.fullmatch(selector) else "glob"
    return _ModuleRegion(device_type, RuleOverrides(device_type, rules, f"module {kind} {selector!r}"))


def _named(rules: Mapping[OpName, str]) -> dict[str, str]:
    if all(isinstance(op, str) for op in rules):
        return {op: as_rule(rule) for op, rule in rules.items()}
    return resolve(rules)


def _device_type(model: nn.Module) -> str:
    for tensor in (*model.parameters(), *model.buffers()):
        return home_of(tensor)
    raise PolicyError("The model has no parameter or buffer to infer the device from; pass device_type=.")


def _refuse_script(module: nn.Module) -> None:
    raise PolicyError(
        f"TorchScript cannot compile {type(module).__name__}, which has op rules of its own: "
        f"torch.jit.script would drop them. Call remove() of what apply_policy returned first, or use "
        f"torch.compile."
    )
