"""The results of `advise`: a policy, with the faults that it corrects, or what it saves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike

from torch import nn

from amp_core.common.text import counted
from amp_core.debugging.comparison import Comparison
from amp_core.debugging.report import Report
from amp_core.errors import PolicyError
from amp_core.policy import OpPolicy
from amp_core.policy.toml import ModuleRules, checked_modules, parsed, policy_of, write
from amp_core.regions.modules import AppliedPolicy, apply_policy
from amp_core.states.loss_scale import valid_scale

ORIGIN = "amp_core.advise"  # of the rules that a search sets


@dataclass(frozen=True)
class Finding:
    """A fault caused by mixed precision, and its fix.

    Attributes:
        fault: a description of the fault.
        module: the module; empty outside modules and for the model itself.
        op: the op.
        fix: a description of the fix; empty if no attempt helped.
        before: the error that the op adds without the fix; inf for inf and NaN.
        after: the same with the fix. For gradient underflow, both are the share of underflowing values; for
            lost updates, which have no op, that of lost elements.
        line: ``file:line`` of the program that called the op, or the forward op of a backward op.
    """

    fault: str
    module: str
    op: str
    fix: str
    before: float
    after: float
    line: str = ""


@dataclass(frozen=True, repr=False)
class Advice(Report):
    """The proposal of `advise`. It takes effect only when you use `policy`, `apply` and `init_scale`.

    Attributes:
        policy: for ``autocast(policy=...)``.
        modules: rules for individual modules, which `apply` applies.
        init_scale: for ``GradScaler(init_scale=...)``; None if the dtype needs no loss scale, if `fn` ran
            the backward pass itself, or if the step has inf or NaN in float32 too.
        findings: the faults, in the order they were handled.
        before: the comparison without the proposal.
        after: the comparison with it; None for advice read from a file.
    """

    policy: OpPolicy
    modules: ModuleRules
    init_scale: float | None
    findings: tuple[Finding, ...] = ()
    before: Comparison | None = None
    after: Comparison | None = None

    def apply(self, model: nn.Module) -> AppliedPolicy:
        """Apply the module rules to `model`; ``remove()`` on the result undoes it.

        Raises:
            PolicyError: the model has no module with that name.
        """
        return apply_policy(model, self.modules, device_type=self.policy.device_type)

    def to_toml(self) -> str:
        """Return the proposal as TOML, which `OpPolicy.from_toml` and `apply_policy` can also read.

        Raises:
            PolicyError: a recipe has an element format of your own, which a file cannot hold.
        """
        head = "" if self.init_scale is None else f"init_scale = {self.init_scale}\n"
        return head + write(self.policy, self.modules)

    @classmethod
    def from_toml(cls, source: str | PathLike[str]) -> Advice:
        """Read the output of `to_toml`.

        Args:
            source: a path, or TOML text (any string that contains a line break).

        Raises:
            PolicyError: the TOML is invalid or has unknown keys, ops or rules; names the file and line.
            OSError: the file cannot be read.
        """
        data, file = parsed(source)
        modules = checked_modules(data, file)
        scale = data.get("init_scale")
        if scale is not None:
            try:
                scale = valid_scale(scale, f"{file.place('init_scale')}: init_scale")
            except (TypeError, ValueError) as error:
                raise PolicyError(str(error)) from None
        return cls(policy_of(OpPolicy, data, file, None), modules, scale)

    def __repr__(self) -> str:
        return f"<Advice: {counted(len(self.findings), 'finding')}, init_scale={self.init_scale}>"


@dataclass
class OpTime:
    """The time of one op with arguments of one shape, forward and backward, on the device alone.

    Attributes:
        op: its full name.
        shapes: the shapes of its tensors.
        work: its estimated floating-point operations.
        modules: the modules that call it.
        calls: how often the step calls it.
        float32: seconds of a call in float32.
        low: seconds in low precision, with casts of all arguments.
        chained: seconds in low precision if only the parameters have to be cast.
        rule: its rule in the proposal.
    """

    op: str
    shapes: str
    work: int
    modules: tuple[str, ...] = ()
    calls: int = 0
    float32: float = math.inf
    low: float = math.inf
    chained: float = math.inf
    rule: str = ""


@dataclass(frozen=True, repr=False)
class SpeedAdvice(Advice):
    """The proposal of ``advise(goal="speed")``: an `Advice` with the times behind it.

    Attributes:
        enabled: for ``autocast(enabled=...)``: False if float32 is the fastest; `policy` then also runs
            everything in float32, at the cost of a region.
        seconds: the time of a step in ``"float32"``, in plain ``"autocast"`` and with this ``"advice"``,
            measured in turn at the end; the fastest of many runs.
        ops: the time of each op, by shape, the most expensive first.
    """

    enabled: bool = True
    seconds: Mapping[str, float] = field(default_factory=dict)
    ops: tuple[OpTime, ...] = ()

    def __repr__(self) -> str:
        times = ", ".join(f"{name} {seconds * 1e3:.3g} ms" for name, seconds in self.seconds.items())
        return f"<SpeedAdvice: {times}>"


@dataclass(frozen=True)
class LayerInFormat:
    """One layer of a rehearsal: the calls of an op with a recipe in a module.

    Attributes:
        module: the module; None for all calls of the op, if some are in no module that has a name.
        op: its full name.
        work: its floating-point operations in the forward pass.
        kept: whether it is in the format in the proposal.
        alone: the relative error of loss and gradients with this layer alone in the format; None if all
            layers together tolerate it.
    """

    module: str | None
    op: str
    work: int
    kept: bool
    alone: float | None


@dataclass(frozen=True, repr=False)
class FormatAdvice(Advice):
    """The proposal of ``advise(format=)``: an `Advice` for the layers that tolerate a format.

    `before` is the comparison with all layers in the format, `after` the one with the proposal, run again.

    Attributes:
        share: the share of the work of matrix products, which the policy runs in low precision, that is in
            the format.
        tolerance: the relative error that was accepted in loss and gradients.
        layers: what was found about each layer, in order of computation.
    """

    share: float = 0.0
    tolerance: float = 0.0
    layers: tuple[LayerInFormat, ...] = ()

    @property
    def is_tolerable(self) -> bool:
        """Whether loss and gradients are within the tolerance with the proposal."""
        return self.after is not None and self.after.result_error <= self.tolerance

    def __repr__(self) -> str:
        return f"<FormatAdvice: {self.share:.0%} of the work in the format>"
