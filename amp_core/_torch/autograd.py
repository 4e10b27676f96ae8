"""The private torch names for the backward pass: hooks, order, and what runs now."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from amp_core._torch.features import Feature
from amp_core.errors import TorchFeatureError

_HOOKS = Feature(
    "gradient_hooks", "cached_casts and master_weights cast each weight by itself, which is slower"
)
_HOOKS.value("torch.Tensor._backward_hooks", None)
_HOOKS.value("torch.Tensor._post_accumulate_grad_hooks", None)


def _has_gradient_hooks(tensor: torch.Tensor) -> bool:
    hooks: Any = tensor
    return bool(hooks._backward_hooks) or bool(hooks._post_accumulate_grad_hooks)


# Whether a hook waits for the gradient of a leaf. Each weight that has one is cast by itself.
has_gradient_hooks = _has_gradient_hooks if _HOOKS.complete else _HOOKS.fallback(lambda _tensor: True)

_ORDER = Feature(
    "backward_order",
    "cached_casts casts gradients back after the whole backward pass, which is slower",
    "torch._C._FunctionBase._set_sequence_nr",
)


@_ORDER.probe
def _check_set_sequence_number() -> None:
    torch.ones(1, requires_grad=True).clone().grad_fn._set_sequence_nr(2**63)  # type: ignore[union-attr]


def run_as_soon_as_ready(output: torch.Tensor) -> None:
    """Let a backward pass run the node that made `output` before all others that are ready.

    Autograd goes by age, and casts are older than the forward pass that uses them.
    """
    node: Any = output.grad_fn
    if _ORDER.works_or_warn():
        node._set_sequence_nr(2**63)


_LEAVES = Feature(
    "leaf_gradients", "master_weights cannot tell which gradients a backward pass adds to .grad"
)
_will_run = _LEAVES.function("torch._C._will_engine_execute_node")


def gradient_is_accumulated(node: Any) -> bool:
    """Whether the backward pass that runs now will add a gradient to ``.grad`` through the leaf's `node`.

    It does not where ``autograd.grad`` only returns the gradient.

    Raises:
        TorchFeatureError: torch no longer says so.
    """
    _LEAVES.require()
    try:
        return bool(_will_run(node))
    except RuntimeError:  # how torch says that the gradient is only returned
        return False
    except Exception:
        _LEAVES.attempt(_will_run, node)
        raise TorchFeatureError(_LEAVES.reason) from None


def is_compiled(node: Any) -> bool:
    """Whether compiled autograd runs the backward pass of `node`: it passes a stand-in and sets ``.grad``."""
    return not isinstance(node, torch.autograd.function.BackwardCFunction)


_DDP = Feature(
    "ddp_forward", "master_weights treats every model as part of a DistributedDataParallel, which is slower"
)
_DDP.value("torch.nn.parallel.DistributedDataParallel._active_ddp_module", None)


def inside_ddp() -> bool:
    """Whether the forward of a DistributedDataParallel is running, whose reducer waits for the gradients."""
    if not _DDP.complete:
        return _in_process_group()
    return torch.nn.parallel.DistributedDataParallel._active_ddp_module is not None


def _in_process_group() -> bool:
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        _DDP.warn()
        return True
    return False


_BACKWARD = Feature(
    "backward_places",
    "amp_core.record counts ops of the backward pass as forward, outside modules",
    "torch._C._FunctionBase._sequence_nr",
)
_current_node = _BACKWARD.function("torch._C._current_autograd_node", check=lambda f: f())

# The number that the next autograd node gets.
next_sequence_number: Callable[[], int] = _BACKWARD.function(
    "torch._C._autograd._get_sequence_nr", lambda: 0, check=lambda f: f() + 0
)


def current_autograd_node() -> Any:
    """Return the autograd node that runs now; None outside a backward pass."""
    return _current_node() if _BACKWARD.works_or_warn() else None


_graph_task = _BACKWARD.function("torch._C._current_graph_task_id", lambda: -1, check=lambda f: f() + 0)
_AFTER_GRADIENTS = ("torch::autograd::AccumulateGrad", "RegisterPostBackwardFunctionBackward")


def backward_pass() -> int:
    """Return the number of the backward pass that this thread runs, also between its nodes; -1 if none."""
    return int(_graph_task())


def in_backward() -> bool:
    """Whether this thread runs a backward pass, including callbacks between or after its nodes."""
    return backward_pass() != -1


def at_weight_gradients() -> bool:
    """Whether the backward pass is where DDP and FSDP2 handle gradients of weights, in no op's node."""
    node = current_autograd_node()
    return node is None or node.name() in _AFTER_GRADIENTS


def sequence_number(node: Any) -> int:
    """Return the number of an autograd node: nodes count up, per thread, as they are created."""
    return int(node._sequence_nr())
