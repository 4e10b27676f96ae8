"""What `OpPolicy.explain` and `OpPolicy.diff` return."""

from __future__ import annotations

from dataclasses import dataclass

from amp_core.policy import rules as r


@dataclass(frozen=True)
class Explanation:
    """Why one op runs as it does.

    Attributes:
        op: full name of the overload.
        rule: a key of `amp_core.policy.RULES`, perhaps with a threshold.
        origin: where the rule was set: the device's default, an override (file and line) or a policy file.
    """

    op: str
    rule: str
    origin: str

    def __str__(self) -> str:
        return f"{self.op}: {self.rule} ({self.origin}); {r.describe(self.rule)}"


class Explanations(tuple[Explanation, ...]):
    """The result of `OpPolicy.explain`: one entry per overload. Prints one per line."""

    __slots__ = ()

    def __str__(self) -> str:
        return "\n".join(map(str, self))

    __repr__ = __str__


class PolicyDiff(dict[str, tuple[str, str]]):
    """Maps full op names to (rule in the first policy, rule in the second). Prints one per line."""

    def __str__(self) -> str:
        return "\n".join(f"{op}: {mine} -> {theirs}" for op, (mine, theirs) in self.items())

    __repr__ = __str__
