"""What a feature says without the package that it needs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from amp_core.common.extras import needing

FEATURES = [
    ("lightning", "import amp_core.integrations.lightning", "amp-core[lightning]"),
    ("accelerate", "import amp_core.integrations.accelerate", "amp-core[accelerate]"),
    ("transformers", "import amp_core.integrations.transformers", "amp-core[transformers]"),
    ("torchtitan", "import amp_core.integrations.torchtitan", "torchtitan==0.3.*"),
    (
        "tensorboard",
        "from amp_core.callbacks import TensorBoard; TensorBoard('.')",
        "amp-core[tensorboard]",
    ),
    ("wandb", "from amp_core.callbacks import WandB; WandB()", "amp-core[wandb]"),
    ("mlflow", "from amp_core.callbacks import MLflow; MLflow()", "amp-core[mlflow]"),
    ("matplotlib", "from amp_core.scaling.plot import new_figure; new_figure(8, 3)", "amp-core[demo]"),
    ("pytest", "from amp_core.testing import BackendConformance", "amp-core[testing]"),
    ("pytest", "import amp_core.testing; amp_core.testing.check('cpu')", "amp-core[testing]"),
]

_ABSENT = """
import sys
class Absent:
    def __init__(self, package):
        self.package = package
    def find_spec(self, name, *_):
        if name == self.package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
"""


@pytest.mark.parametrize(("package", "code", "install"), FEATURES, ids=[code for _, code, _ in FEATURES])
def test_what_to_install(package: str, code: str, install: str) -> None:
    """An import fails without a word on the extra that brings the package along."""
    program = f"{_ABSENT}sys.meta_path.insert(0, Absent({package!r}))\n{code}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    last = done.stderr.splitlines()[-1]
    said = f"this needs {package}; install it with: pip install {install!r}"
    assert last == f"ModuleNotFoundError: {said}"


def test_another_missing_package() -> None:
    """A broken install of the package is taken for a missing one."""
    with pytest.raises(ModuleNotFoundError, match="No module named 'nosuch'"), needing("pytest", "pytest"):
        import nosuch  # noqa: F401
