"""One training step, run as often as need be under different precisions, from the same state each time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from amp_core.common.device_types import device_type_of
from amp_core.debugging.capture import Capture, Key
from amp_core.debugging.places import Place, Places
from amp_core.debugging.state_keeper import StateKeeper, seeded
from amp_core.dispatch.activate import activation, default_policy
from amp_core.errors import AmpError
from amp_core.plugin import get_backend
from amp_core.policy import OpPolicy
from amp_core.regions.region import autocast


class Step:
    """A step that can be run under a policy, and what there is to know of it.

    Args:
        fn: does the forward pass and returns the loss; or does the backward pass too.
        device: the device type, as for `autocast`.
        dtype: the low one; by default the device's.
        policy: of the mixed-precision runs; by default the device's.
        model: names the modules; by default, the outermost module that `fn` calls does.
        seed: of the random generators, before each run.
        limit: elements kept of each tensor.

    Attributes:
        roots: the outermost modules that `fn` has called.
        leaves_backward: whether `fn` left the backward pass, and so the loss scale, to the step.
    """

    def __init__(
        self,
        fn: Callable[[], Any],
        device: str | torch.device | Tensor,
        dtype: torch.dtype | None,
        policy: OpPolicy | None,
        model: nn.Module | None,
        seed: int,
        limit: int,
    ) -> None:
        if not callable(fn):
            raise TypeError(f"fn is the step: a function without arguments, not {type(fn).__name__}.")
        Places.check(model)
        if limit < 1:
            raise ValueError(f"limit= is how many elements of a tensor are kept, at least 1; not {limit}.")
        self.device_type = device_type_of(device)
        backend = get_backend(self.device_type)
        self.dtype = backend.default_dtype() if dtype is None else dtype
        self.policy = policy or default_policy(backend)
        self.roots: list[nn.Module] = []
        self.leaves_backward = False
        self._fn, self._model, self._seed, self._limit = fn, model, seed, limit

    def reference(self, dtype: torch.dtype, scale: float) -> Run:
        """Run the step in `dtype`: in float32, all ops with a rule are put into it."""
        if dtype is torch.float32:
            return self._run(self.dtype, OpPolicy.float32(self.device_type), scale)
        if dtype is torch.float64:
            raise AmpError(
                "reference=torch.float64: autocast has no float64; convert the model in fn itself."
            )
        return self._run(dtype, self.policy, scale)

    def mixed(self, policy: OpPolicy, scale: float) -> Run:
        """Run the step in mixed precision."""
        return self._run(self.dtype, policy, scale)

    @contextlib.contextmanager
    def _in_force(self, policy: OpPolicy) -> Iterator[None]:
        """Hold the policy through the backward pass too, where checkpoints run their forward pass again."""
        active = activation(get_backend(self.device_type), policy)
        assert active is not None, "only a policy that is not named needs no activation"
        active.push()
        try:
            yield
        finally:
            active.pop()

    def _run(self, dtype: torch.dtype, policy: OpPolicy, scale: float) -> Run:
        ops = {*OpPolicy.float32(self.device_type).rules, *self.policy.rules}
        keeper = StateKeeper()
        capture = Capture(self._limit, ops, self._model, keeper.keep_tensor)
        capture.tap.places.on_call = keeper.keep
        with keeper.restored(), seeded(self._seed, self.device_type):
            if self._model is not None:
                keeper.keep(self._model)
            with contextlib.ExitStack() as stack:
                stack.enter_context(capture.tap)
                stack.enter_context(self._in_force(policy))
                with autocast(self.device_type, dtype=dtype, policy=policy):
                    result = self._fn()
                self.leaves_backward = _go_back(result, scale, capture)
                self.roots = [self._model] if self._model is not None else capture.tap.places.roots
                with capture.tap.muted():
                    _keep_gradients(self.roots, capture)
            loss = _number(result)
        maker = capture.maker(result) if loss is not None else None
        return Run(capture, scale if self.leaves_backward else 1.0, loss, maker)


class Run:
    """What one run of a step left: its values, the loss scale in force, the loss and the op that made it."""

    def __init__(self, capture: Capture, scale: float, loss: float | None, loss_maker: Key | None) -> None:
        self.samples = capture.samples
        self.went_back = capture.went_back
        self.scale = scale
        self.loss = loss
        self.loss_maker = loss_maker


def _go_back(result: Any, scale: float, capture: Capture) -> bool:
    """Do the backward pass from a scaled loss unless `fn` has done one; return whether it was done."""
    if capture.went_back or not isinstance(result, Tensor) or not result.requires_grad:
        return False
    if result.numel() != 1:
        raise AmpError(
            f"fn returned a tensor of shape {tuple(result.shape)}; return the loss, a single number."
        )
    with capture.tap.muted():
        loss = (result if result.dtype is torch.float64 else result.float()).sum() * scale
    loss.backward()  # type: ignore[no-untyped-call]
    return True


def _keep_gradients(roots: list[nn.Module], capture: Capture) -> None:
    for root in roots:
        for name, parameter in root.named_parameters():
            if parameter.grad is not None and not parameter.grad.is_sparse:
                place = Place(type(root).__name__, name.rpartition(".")[0])
                capture.parameter(place, name, parameter.grad)


def _number(result: Any) -> float | None:
    return float(result.detach()) if isinstance(result, Tensor) and result.numel() == 1 else None
