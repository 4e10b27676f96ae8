"""`script`: ``torch.jit.script`` for functions with autocast regions, with eager-mode semantics."""

from amp_core.scripting.function import script

__all__ = ["script"]
