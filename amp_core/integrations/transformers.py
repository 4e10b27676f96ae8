"""transformers: a `Trainer` that uses amp-core for mixed precision. Tested with transformers 5.23."""

from __future__ import annotations

import functools
from typing import Any

from amp_core import GradScaler, OpPolicy
from amp_core.common.extras import needing
from amp_core.integrations.checks import replaced

with needing("transformers", "amp-core[transformers]"):
    import transformers.trainer

from amp_core.integrations.accelerate import Accelerator


class Trainer(transformers.Trainer):
    """``transformers.Trainer`` based on `amp_core.integrations.accelerate.Accelerator`.

    ``fp16`` and ``bf16`` of its ``TrainingArguments`` choose the dtype, also on the CPU.

    Args:
        args: as for ``transformers.Trainer``.
        scaler: a `GradScaler`; by default one for ``fp16``.
        policy: the `OpPolicy` of forward passes; by default the device's.
        kwargs: as for ``transformers.Trainer``.

    Raises:
        ValueError: as for `amp_core.integrations.accelerate.Accelerator`.
        TypeError: `scaler` is not amp-core's.
    """

    def __init__(
        self, *args: Any, scaler: GradScaler | None = None, policy: OpPolicy | None = None, **kwargs: Any
    ) -> None:
        self._amp: dict[str, Any] = {"scaler": scaler, "policy": policy}
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator. transformers looks up its class in its own module."""
        ours = functools.partial(Accelerator, **self._amp)
        with replaced(transformers.trainer, "Accelerator", ours):
            super().create_accelerator_and_postprocess()
