"""What is in force in one module: op rules of its own, or float32."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from amp_core._torch.autocast import autocast_off
from amp_core._torch.tracing import is_exporting
from amp_core.dispatch.activate import RuleOverrides
from amp_core.dispatch.target_dtype import eligible
from amp_core.policy.op_policy import OpPolicy
from amp_core.policy.rules import FP32
from amp_core.regions.cast_arguments import CastArguments
from amp_core.regions.decorator import autocast_decorator
from amp_core.regions.region import autocast


class ModuleRegion:
    """The context in which one module's forward runs: changed op rules, or no autocast."""

    def __init__(self, device_type: str, changes: RuleOverrides | None) -> None:
        self.device_type = device_type
        self.changes = changes
        self._no_change = RuleOverrides(device_type, {}, f"module rule {FP32!r}")

    @property
    def rules(self) -> Mapping[str, str] | str:
        """The rules, as `apply_policy` takes them for a module."""
        return FP32 if self.changes is None else self.changes.rules

    def on_top_of(self, other: ModuleRegion | None) -> ModuleRegion:
        """Return these rules with those of `other` where there is none here."""
        if other is None or other.changes is None or self.changes is None:
            return self
        origin = f"{other.changes.origin}, {self.changes.origin}"
        return ModuleRegion(
            self.device_type,
            RuleOverrides(self.device_type, {**other.changes.rules, **self.changes.rules}, origin),
        )

    def on(self, policy: OpPolicy) -> OpPolicy:
        """Return `policy` as it is in force in the module."""
        if self.changes is not None:
            return self.changes.on(policy)
        return policy.override(dict.fromkeys(policy.rules, "unchanged"), origin="module rule 'fp32'")

    def run(self, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of `call` in the region."""
        if self.changes is not None:
            with self.changes:
                return call(*args, **kwargs)
        if not torch.is_autocast_enabled(self.device_type):
            return call(*args, **kwargs)
        arguments = CastArguments(self._float32)
        args, kwargs = arguments.of(args), arguments.of(kwargs)
        with self._shown_in_graphs(), autocast_off(self.device_type):
            result = call(*args, **kwargs)
        arguments.write_back()
        return result

    def run_later(self, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the generator or awaitable that `call` returns; each part of its body runs in the region."""
        if self.changes is not None:
            return autocast_decorator(self.changes, call)(*args, **kwargs)
        if not torch.is_autocast_enabled(self.device_type):
            return call(*args, **kwargs)
        arguments = CastArguments(self._float32)
        args, kwargs = arguments.of(args), arguments.of(kwargs)
        return autocast_decorator(autocast(self.device_type, enabled=False), call)(*args, **kwargs)

    def _shown_in_graphs(self) -> AbstractContextManager[None]:
        # Without a rule in the graph, Dynamo compiles the backward pass of the module in low precision.
        if torch.compiler.is_dynamo_compiling() and not is_exporting():
            return self._no_change
        return nullcontext()

    def _float32(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.float() if eligible(tensor, self.device_type) else tensor
