"""The result of `advise`: a policy and a loss scale, with the faults that they correct."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike

from torch import nn

from amp_core.debugging.comparison import Comparison
from amp_core.debugging.report import Report
from amp_core.errors import PolicyError
from amp_core.policy import AppliedPolicy, OpPolicy, apply_policy
from amp_core.policy.toml import ModuleRules, read_value, write, write_modules


@dataclass(frozen=True)
class Finding:
    """A fault caused by mixed precision, and its fix.

    Attributes:
        what: a description of the fault.
        module: the module; empty outside modules and for the model itself.
        op: the op.
        mend: a description of the fix; empty if no attempt helped.
        before: the error that the op adds without the fix; inf for inf and NaN.
        after: the same with the fix. For gradient underflow, both are the share of underflowing values.
        line: ``file:line`` of the program that called the op; empty in a backward pass.
    """

    what: str
    module: str
    op: str
    mend: str
    before: float
    after: float
    line: str = ""


@dataclass(frozen=True, repr=False)
class Advice(Report):
    """The proposal of `advise`. It takes effect only when you use `policy`, `apply` and `init_scale`.

    Attributes:
        policy: for ``autocast(policy=...)``.
        modules: rules for individual modules, which `apply` applies.
        init_scale: for ``GradScaler(init_scale=...)``; None if the dtype needs no loss scale.
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
        """Return the proposal as TOML, which `OpPolicy.from_toml` and `apply_policy` can also read."""
        head = "" if self.init_scale is None else f"init_scale = {self.init_scale}\n"
        modules = "\n" + write_modules(self.modules) if self.modules else ""
        return head + write(self.policy) + modules

    @classmethod
    def from_toml(cls, source: str | PathLike[str]) -> Advice:
        """Read the output of `to_toml`.

        Args:
            source: a path, or TOML text (any string that contains a line break).

        Raises:
            PolicyError: the TOML is invalid or has unknown keys, ops or rules; names the file and line.
            OSError: the file cannot be read.
        """
        modules, _ = read_value(source, "modules")
        scale, where = read_value(source, "init_scale")
        if scale is not None and (not isinstance(scale, (int, float)) or not 0 < scale < float("inf")):
            raise PolicyError(f"{where}: init_scale must be a finite number above 0, not {scale!r}.")
        return cls(OpPolicy.from_toml(source), modules or {}, None if scale is None else float(scale))

    def __repr__(self) -> str:
        return f"<Advice: {len(self.findings)} findings, init_scale={self.init_scale}>"
