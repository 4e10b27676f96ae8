"""Stands in for ``apex.amp``, which NVIDIA deleted from apex in May 2025: the same functions, over amp_core.

``from amp_compat import apex as amp`` in place of ``from apex import amp``. The numerics of the levels are
those that apex documented: O0 float32, O1 autocast with a dynamic loss scale, O2 a float16 model with
float32 batch norms and master weights, O3 float16 throughout.

Unlike apex it works on any device that amp_core has a backend for. As in apex, the state is one per
process; the region that O1 opens is for the thread that calls `initialize`.
"""

from amp_compat.apex._frontend import (
    initialize,
    load_state_dict,
    master_params,
    scale_loss,
    state_dict,
)

__all__ = ["initialize", "load_state_dict", "master_params", "scale_loss", "state_dict"]
