"""Run programs written for torch.amp or apex.amp on amp_core.

`install` makes ``torch.amp``, ``torch.cuda.amp`` and ``torch.cpu.amp`` resolve to amp-core.
`amp_compat.cuda.amp` and `amp_compat.cpu.amp` mirror the deprecated modules of torch; `amp_compat.apex`
replaces ``apex.amp``, and `amp_compat.legacy` the API before PyTorch 1.10. Modules load on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from amp_compat._install import install, uninstall

__all__ = ["install", "uninstall"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from amp_compat import _install

        return getattr(_install, name)
    raise AttributeError(f"module 'amp_compat' has no attribute {name!r}")
