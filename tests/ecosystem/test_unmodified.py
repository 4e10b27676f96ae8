"""An unmodified script that uses a trainer, under ``python -m amp_compat``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("lightning", reason="Lightning is not installed; tox -e ecosystem installs it")

SCRIPT = """
import lightning as L
import torch
from torch.cuda.amp import GradScaler, autocast

from lightning.pytorch.plugins.precision import MixedPrecision

import amp_core

assert type(MixedPrecision("16-mixed", "cpu").scaler) is amp_core.GradScaler
assert issubclass(GradScaler, amp_core.GradScaler) and issubclass(autocast, amp_core.autocast)


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch, index):
        out = self.net(batch)
        assert isinstance(self.trainer.precision_plugin.autocast_context_manager(), amp_core.autocast)
        assert out.dtype is torch.bfloat16
        return out.float().square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


trainer = L.Trainer(precision="bf16-mixed", accelerator="cpu", max_epochs=1, logger=False)
trainer.fit(Module(), torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=2))
print("trained", trainer.global_step)
"""


def test_a_script_with_lightnings_own_precision(tmp_path: Path) -> None:
    """A trainer that uses torch.amp itself breaks, or stays on torch's."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "amp_compat", str(path)], capture_output=True, text=True, cwd=tmp_path
    )
    assert "trained 4" in done.stdout, done.stderr[-2000:]
