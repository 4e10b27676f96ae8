"""Replacement for ``apex.amp``, removed from apex in May 2025: the same functions, built on amp_core.

Write ``from amp_compat import apex as amp`` for ``from apex import amp``. The levels are those that apex
documented: O0 float32, O1 autocast with a dynamic loss scale, O2 a float16 model with
float32 batch norms and master weights, O3 float16 throughout.

Unlike apex, it works on any device with an amp_core backend. As in apex, there is one state per process.
O1 opens its autocast region in the thread that calls `initialize`.
"""

from amp_compat.apex._frontend import (
    initialize,
    load_state_dict,
    master_params,
    scale_loss,
    state_dict,
)

__all__ = ["initialize", "load_state_dict", "master_params", "scale_loss", "state_dict"]
