"""`script`: ``torch.jit.script`` for functions with autocast regions, without its silent gaps."""

from amp_core.scripting.function import script

__all__ = ["script"]
