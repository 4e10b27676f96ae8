"""transformers: a `Trainer` whose mixed precision is amp-core's. Tried with transformers 5.23."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import torch
import transformers

from amp_core import GradScaler, OpPolicy
from amp_core.integrations.accelerate import Accelerator


class Trainer(transformers.Trainer):
    """``transformers.Trainer`` over `amp_core.integrations.accelerate.Accelerator`.

    Args:
        args: as for ``transformers.Trainer``; leave ``fp16`` and ``bf16`` of the arguments off.
        amp_dtype: the dtype of low-precision ops; by default the device's.
        scaler: a `GradScaler`; by default one for float16 and none for other dtypes.
        policy: the `OpPolicy` of forwards; by default the device's.
        kwargs: as for ``transformers.Trainer``.
    """

    def __init__(
        self,
        *args: Any,
        amp_dtype: torch.dtype | None = None,
        scaler: GradScaler | None = None,
        policy: OpPolicy | None = None,
        **kwargs: Any,
    ) -> None:
        self._amp: dict[str, Any] = {"amp_dtype": amp_dtype, "scaler": scaler, "policy": policy}
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator: transformers looks its class up in its own module."""
        ours = functools.partial(Accelerator, **self._amp)
        with mock.patch("transformers.trainer.Accelerator", ours):
            super().create_accelerator_and_postprocess()
