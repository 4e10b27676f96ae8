"""What `advise` returns: a policy and a loss scale, with the faults that they correct."""

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
    """A fault that mixed precision makes, and what mends it.

    Attributes:
        what: the fault, in words.
        module: where; empty outside modules and for the model itself.
        op: which op.
        mend: what was changed, in words; empty if nothing tried helped.
        before: the error that the op adds, without the change; inf for inf and NaN.
        after: the same with it, or the share of values lost for a gradient that underflows.
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
    """What `advise` proposes. Nothing is changed by it until `policy`, `apply` and `init_scale` are used.

    Attributes:
        policy: for ``autocast(policy=...)``.
        modules: rules for single modules of the model, which `apply` puts on.
        init_scale: for ``GradScaler(init_scale=...)``; None where the dtype needs no loss scale.
        findings: the faults, in the order in which they were mended.
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
        """Put the rules for single modules on `model`; ``remove()`` of what is returned takes them off.

        Raises:
            PolicyError: the model has no module of such a name.
        """
        return apply_policy(model, self.modules, device_type=self.policy.device_type)

    def to_toml(self) -> str:
        """Return the proposal as TOML, which `OpPolicy.from_toml` and `apply_policy` read as well."""
        head = "" if self.init_scale is None else f"init_scale = {self.init_scale}\n"
        modules = "\n" + write_modules(self.modules) if self.modules else ""
        return head + write(self.policy) + modules

    @classmethod
    def from_toml(cls, source: str | PathLike[str]) -> Advice:
        """Read what `to_toml` wrote.

        Args:
            source: a path, or the text itself (anything with a line break in it).

        Raises:
            PolicyError: with file and line, for what is not TOML, unknown keys, ops or rules.
            OSError: the file cannot be read.
        """
        modules, _ = read_value(source, "modules")
        scale, where = read_value(source, "init_scale")
        if scale is not None and (not isinstance(scale, (int, float)) or not 0 < scale < float("inf")):
            raise PolicyError(f"{where}: init_scale is a number above 0, not {scale!r}.")
        return cls(OpPolicy.from_toml(source), modules or {}, None if scale is None else float(scale))

    def __repr__(self) -> str:
        return f"<Advice: {len(self.findings)} findings, init_scale={self.init_scale}>"
