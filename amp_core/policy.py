"""Which op runs in which dtype, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class OpPolicy:
    """An immutable map from op to one of torch's cast rules."""

    device_type: str
    rules: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def default(cls, device_type: str) -> OpPolicy:
        """Return the rules that torch compiled in for `device_type`."""
        return cls(device_type)
