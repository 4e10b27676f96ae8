"""Op rules for some modules of a model: applied and removed without editing its code."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any

import torch
from torch import nn

from amp_core._torch.modules import uncompiled
from amp_core._torch.tracing import untraced
from amp_core.common.arguments import check_module, home_of
from amp_core.common.handle import Handle
from amp_core.common.text import counted
from amp_core.dispatch.activate import RuleOverrides
from amp_core.errors import PolicyError
from amp_core.policy.changes import OpName, check_device_type, resolve, resolve_of_module
from amp_core.policy.explanations import Explanations
from amp_core.policy.op_policy import OpPolicy
from amp_core.policy.recipes import as_rule
from amp_core.policy.toml import modules_of, parsed, write_modules
from amp_core.regions.module_region import ModuleRegion
from amp_core.regions.replaced_forward import ReplacedForward
from amp_core.regions.selecting import CLASS_PATH, Modules, Selector, glob_of, listed

Rules = Any
"""A mapping from op to rule, or ``"fp32"``."""


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
            to float32, also those in lists, tuples, mappings and dataclasses. A selection is a module of
            the model, a class (with its subclasses; in a file, its path, such as
            ``"torch.nn.modules.normalization:LayerNorm"``), or a glob over the names in
            ``model.named_modules()``: ``*`` matches one part of a name, ``**`` any number of parts, ``""``
            the model itself. A module that others share is selected by each of its names. If several select
            a module, later ones take precedence. Alternatively, the path of a TOML file with such rules in
            its ``modules`` table.
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
    if isinstance(model, torch.jit.ScriptModule):
        raise PolicyError(_SCRIPTED.format(which="model"))
    if device_type is None:
        device_type = _device_type(model)
    check_device_type(device_type)
    rules, places = _with_places(rules)
    planned: dict[nn.Module, tuple[str, ModuleRegion]] = {}
    written: dict[str, Rules] = {}
    modules = Modules(model)
    for selector, what in rules.items():
        try:
            names, text = modules.select(selector)
            region = _module_region(device_type, text, what)
            for name in names:
                module = uncompiled(model.get_submodule(name))
                if isinstance(module, torch.jit.ScriptModule):
                    raise PolicyError(_SCRIPTED.format(which=f"module {name!r}"))
                known, below = planned.get(module, (name, None))
                planned[module] = known, region.on_top_of(below)
        except PolicyError as error:
            if selector not in places:
                raise
            raise PolicyError(f"{places[selector]}: {error}") from error
        written[text] = what
    regions = dict(planned.values())
    if len(written) < len(rules):  # selectors with one text, such as "0" and model[0], are all in force
        written = {glob_of(name): region.rules for name, region in regions.items()}
    return AppliedPolicy(model, device_type, regions, written)


_SCRIPTED = (
    "The {which} is compiled by TorchScript, which runs it by op rules of its own. Select only "
    "modules that torch.jit.script and torch.jit.trace have not compiled."
)


def _with_places(
    rules: Mapping[Selector, Rules] | PathLike[str],
) -> tuple[Mapping[Selector, Rules], Mapping[str, str]]:
    """Return the rules, and for those of a file the position of each glob."""
    if isinstance(rules, PathLike):
        data, file = parsed(rules)
        found, places = modules_of(data, file)
        if not found:
            raise PolicyError(f"{file.name}: has no rules for modules; add them in a table [modules].")
        return found, places
    if not isinstance(rules, Mapping):
        raise TypeError(_no_rules(rules))
    return rules, {}


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
        modules: the first names of the modules with their own rules.
    """

    def __init__(
        self,
        model: nn.Module,
        device_type: str,
        regions: Mapping[str, ModuleRegion],
        rules: Mapping[str, Rules],
    ) -> None:
        self.modules = tuple(regions)
        self._rules = rules
        self._regions = regions
        self._device_type = device_type
        self._replaced: list[ReplacedForward] = []
        try:
            for name, region in regions.items():
                # Torch copies what a compiled module consists of, not its attributes.
                module = uncompiled(model.get_submodule(name))
                self._replaced.append(ReplacedForward(module, region))
                self._replaced[-1].attach()
        except BaseException:  # an interrupt: nobody gets the handle that removes the rules
            for replaced in reversed(self._replaced):
                replaced.remove()
            raise

    @untraced
    def remove(self) -> None:
        """Remove the rules. Calling it again has no effect.

        Raises:
            PolicyError: another wrapper was applied to one of the modules later and is still there.
        """
        for replaced in self._replaced:
            replaced.check_removable()
        for replaced in self._replaced:
            replaced.remove()
        self._replaced = []

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
        if module not in self.modules:
            raise PolicyError(f"The module {module!r} has no rules of its own; {listed(self.modules)}.")
        return self._regions[module].on(OpPolicy.default(self._device_type)).explain(op)

    def __repr__(self) -> str:
        return (
            f"<AppliedPolicy on {counted(len(self.modules), 'module')}: {', '.join(map(repr, self.modules))}>"
        )


def _module_region(device_type: str, selector: str, what: Rules) -> ModuleRegion:
    rules = resolve_of_module(selector, what)
    if rules is None:
        return ModuleRegion(device_type, None)
    kind = "class" if CLASS_PATH.fullmatch(selector) else "glob"
    return ModuleRegion(device_type, RuleOverrides(device_type, rules, f"module {kind} {selector!r}"))


def _named(rules: Mapping[OpName, str]) -> dict[str, str]:
    if all(isinstance(op, str) for op in rules):
        return {op: as_rule(rule) for op, rule in rules.items()}
    return resolve(rules)


def _device_type(model: nn.Module) -> str:
    for tensor in (*model.parameters(), *model.buffers()):
        return home_of(tensor)
    raise PolicyError("The model has no parameter or buffer to infer the device from; pass device_type=.")
