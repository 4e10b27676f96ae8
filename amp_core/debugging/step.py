"""Run a training step repeatedly in different precisions from the same state."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from amp_core._torch.tracing import without_torch_functions
from amp_core.casts.shards import whole
from amp_core.common.arguments import as_whole, check_dtype, device_type_of
from amp_core.common.containers import tensors_in
from amp_core.common.generators import seeded
from amp_core.debugging.capture import Capture, Run
from amp_core.debugging.fits import fits_of_parameters
from amp_core.debugging.forward_region import forward_region
from amp_core.debugging.places import Places
from amp_core.debugging.state_keeper import StateKeeper
from amp_core.debugging.step_gradients import gradients_sampled
from amp_core.debugging.tap import measuring, muted
from amp_core.dispatch.activate import activation, check_policy, default_policy, pop, with_recipe
from amp_core.errors import AmpError
from amp_core.formats import Recipe
from amp_core.plugin import get_backend
from amp_core.policy import OpPolicy
from amp_core.policy.recipes import as_rule
from amp_core.regions.base import format_dtype
from amp_core.regions.modules import apply_policy
from amp_core.regions.region import autocast


class Step:
    """A step that can run under different policies.

    Args:
        fn: runs the forward pass and returns the loss; may also run the backward pass.
        device: the device type, as for `autocast`.
        dtype: the low-precision dtype; None for the device's.
        policy: the policy of mixed-precision runs; None for the device's.
        model: the model that names the modules; None for the outermost module that `fn` calls.
        seed: seed of the random generators before each run.
        limit: the maximum number of elements to keep per tensor.

    Attributes:
        roots: the outermost modules that `fn` called.
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
            raise TypeError(f"fn must be a function without arguments, not {type(fn).__name__}.")
        Places.check(model)
        limit, seed = as_whole(limit, "limit", 1), as_whole(seed, "seed")
        if policy is not None:
            check_policy(policy)
        if dtype is not None:
            check_dtype(dtype, "dtype")
        self.device_type = device_type_of(device)
        backend = get_backend(self.device_type)
        self.dtype = backend.default_dtype() if dtype is None else dtype
        if self.dtype is not torch.float8_e4m3fn and backend.autocast_refusal(self.dtype) is not None:
            supported = backend.supported_dtypes()
            if self.dtype in supported:  # the device itself is missing
                raise ValueError(
                    f"There are no regions on {self.device_type!r} here: {backend.availability().reason}."
                )
            raise ValueError(
                f"dtype={self.dtype}: {backend.dtype_reason(self.dtype)}. Regions on "
                f"{self.device_type!r} take {', '.join(map(str, supported))}."
            )
        self.policy = default_policy(backend) if policy is None else policy
        self._float32 = OpPolicy.float32(self.device_type)
        self.roots: list[nn.Module] = []
        self._exact: tuple[float, Run] | None = None
        self._fn, self.model, self.seed, self._limit = fn, model, seed, limit

    def fn(self) -> Any:
        """Run the step.

        Raises:
            AmpError: an iterator from which it takes its data has come to an end.
        """
        try:
            return self._fn()
        except StopIteration as error:
            raise AmpError(
                "fn has come to the end of an iterator: it runs several times, on one batch. Take the batch "
                "before, and let fn use it."
            ) from error

    def reference(self, dtype: torch.dtype, scale: float) -> Run:
        """Run the step in `dtype`; for float32, all ops with a rule run in float32, once for each scale."""
        if dtype is torch.float32:
            if self._exact is None or self._exact[0] != scale:
                self._exact = scale, self._run(self.dtype, self._float32, scale)
            return self._exact[1]
        if dtype is torch.float64:
            raise AmpError(
                "reference=torch.float64: autocast does not support float64; convert the model inside fn."
            )
        return self._run(dtype, self.policy, scale)

    def mixed(self, policy: OpPolicy, scale: float, at_end: Callable[[], None] = lambda: None) -> Run:
        """Run the step in mixed precision; call `at_end` while its gradients are there."""
        return self._run(self.dtype, policy, scale, at_end)

    def named_modules(self) -> dict[str, nn.Module]:
        """Return the modules that can have rules, by name: those of the root, if there is one only."""
        return dict(self.roots[0].named_modules()) if len(self.roots) == 1 else {}

    def applied(self, modules: Mapping[Any, Any]) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which `modules` of the model have rules, as for `apply_policy`."""
        if not modules:
            return contextlib.nullcontext()
        return apply_policy(self.roots[0], modules, device_type=self.device_type)

    @contextlib.contextmanager
    def in_force(self, policy: OpPolicy | None) -> Iterator[None]:
        """Keep `policy` in force in a block, also where checkpoints rerun a forward pass after its region."""
        active = activation(get_backend(self.device_type), policy)
        if active is None:
            yield
            return
        active.push()
        try:
            yield
        finally:
            pop()

    def _run(
        self, dtype: torch.dtype, policy: OpPolicy, scale: float, at_end: Callable[[], None] = lambda: None
    ) -> Run:
        ops = {*self._float32.rules, *self.policy.rules}
        keeper = StateKeeper()
        capture = Capture(self._limit, keeper.keep_tensor)
        tap = capture.tap(self.model, ops)
        tap.places.on_call = keeper.keep
        run = capture.run
        with keeper.restored(), seeded(self.seed, self.device_type):
            if self.model is not None:
                keeper.keep(self.model)
            with contextlib.ExitStack() as stack:
                stack.enter_context(tap)
                stack.enter_context(self.in_force(policy))
                roots = [self.model] if self.model is not None else tap.places.roots
                with gradients_sampled(capture, roots):
                    with forward_region(autocast(self.device_type, dtype=dtype, policy=policy)):
                        result = self.fn()
                    ran_here = _run_backward(result, scale, capture, keeper)
                self.roots = roots
                with measuring():
                    if run.recipe is not None:
                        done = {key.place.module for key in run.fits}
                        run.parameters = fits_of_parameters(self.roots, run.recipe, done)
                    at_end()
            run.loss = _number(result)
        if run.loss is not None:
            run.loss_producer = capture.producer(result)
        if ran_here:
            run.scale = scale
        run.scales_itself = run.ran_backward and not ran_here
        return run


def quantising(
    device: str | torch.device | Tensor,
    policy: OpPolicy | None,
    recipe: str | Recipe,
    dtype: torch.dtype | None,
) -> tuple[OpPolicy, torch.dtype]:
    """Return `policy`, or the device's, with a recipe for its low-precision products, and the region's dtype.

    Raises:
        PolicyError: there is no recipe of that name, or it cannot be a rule; or `policy` has products in low
            precision by size.
    """
    if not isinstance(recipe, (str, Recipe)) or not recipe:
        raise TypeError(f"format= must be an amp_core.Recipe or the name of one, not {recipe!r}.")
    if policy is not None:
        check_policy(policy)
    rule = as_rule(recipe if isinstance(recipe, Recipe) else f"recipe {recipe}")
    backend = get_backend(device_type_of(device))
    quantised = with_recipe(
        default_policy(backend) if policy is None else policy,
        rule.recipe,
        f"format={rule.removeprefix('recipe ')}",
    )
    return quantised, dtype or format_dtype(backend)


def is_of_freed_graph(error: RuntimeError) -> bool:
    """Return whether a backward pass raised `error` because one through the same graph had run before."""
    return "backward through the graph a second time" in str(error)


def check_result(result: Any) -> None:
    """Raise AmpError if `result`, of a step that ran no backward pass, hides the loss in a container."""
    if not isinstance(result, Tensor) and any(each.requires_grad for each in tensors_in(result)):
        raise AmpError(
            f"fn returned a {type(result).__name__} with tensors that require a gradient, and ran no "
            f"backward pass. Return the loss alone, a single number; or run fn under torch.no_grad(), to "
            f"look at the forward pass alone."
        )


def _run_backward(result: Any, scale: float, capture: Capture, keeper: StateKeeper) -> bool:
    """Run the backward pass from the scaled loss unless `fn` ran it; return whether it ran here."""
    if isinstance(result, Tensor) and result.is_meta:
        raise AmpError("fn returned a tensor on the meta device: it has no values to compare.")
    if not capture.run.ran_backward:
        check_result(result)
    if not isinstance(result, Tensor) or not result.requires_grad:
        return False
    with without_torch_functions():
        size = result.numel()
    # A pass that left no gradients may have been another one, as for a penalty on gradients.
    may_have_run = capture.run.ran_backward
    if may_have_run and (capture.run.has_gradients() or keeper.has_gradients() or size != 1):
        return False
    if size != 1:
        raise AmpError(
            f"fn returned a tensor of shape {tuple(result.shape)}; return the loss, a single number."
        )
    with muted():
        loss = (result if result.dtype is torch.float64 else result.float()).sum() * scale
    try:
        loss.backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        if not may_have_run or not is_of_freed_graph(error):
            raise
        keeper.clear_gradients()  # fn ran the pass, and cleared what it gave
        return False
    return True


@measuring()
def _number(result: Any) -> float | None:
    return float(whole(result.detach())) if isinstance(result, Tensor) and result.numel() == 1 else None
