"""The deprecated names of mixed precision, over amp_core.

`amp_compat.cuda.amp` and `amp_compat.cpu.amp` mirror `torch.cuda.amp` and `torch.cpu.amp` module by module;
`amp_compat.apex` stands in for ``apex.amp``, `amp_compat.legacy` for PyTorch before 1.10. `install` makes
the old import paths mean these. Nothing is imported until it is asked for.
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
