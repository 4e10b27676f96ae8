"""`compare`: compare a step in float32 and in mixed precision, value by value."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from amp_core.common.arguments import check_dtype, check_real
from amp_core.common.text import counted
from amp_core.debugging.agreement import Ranks
from amp_core.debugging.capture import MODULE, OP, PARAMETER, Key, Run
from amp_core.debugging.difference import Difference, Found, first_fault, scalar_error
from amp_core.debugging.report import Report
from amp_core.debugging.sink import BACKWARD, FORWARD
from amp_core.debugging.step import Step, quantising
from amp_core.formats import Recipe
from amp_core.policy import OpPolicy
from amp_core.states.loss_scale import valid_scale


def _check_one_of(name: str, given: object, known: tuple[str, ...]) -> None:
    if not isinstance(given, str) or given not in known:
        raise ValueError(f"{name}= must be one of {', '.join(map(repr, known))}, not {given!r}.")


def check_tolerance(given: float | None) -> None:
    """Raise TypeError or ValueError unless `given` is a tolerance, or None."""
    if given is None:
        return
    check_real(given, "tolerance")
    if not given >= 0:
        raise ValueError(f"tolerance= must be a relative error of 0 or more, not {given!r}.")


def tolerances(dtype: torch.dtype, given: float | None = None) -> tuple[float, float]:
    """Return the tolerated relative errors: one that an op may add, one for the loss and gradients.

    The defaults are 16 times the ``eps`` of `dtype`, but at least 0.03 and 0.125: rounding that moves a
    number across the 0 of a ReLU can add that much error to its result and to a parameter's gradient.
    """
    if given is not None:
        return given, given
    rounding = 16 * torch.finfo(dtype).eps
    return max(0.03, rounding), max(0.125, rounding)


class Comparison(Report):
    """The result of `compare`; `print` it, or save it with `to_json` and `to_html`.

    Attributes:
        differences: one for each value in both runs, in order of computation.
        unmatched: the number of values in only one of the runs.
        dtype: the low-precision dtype, also where only the step's own regions name it.
        reference_dtype: the dtype of the reference run.
        ran_backward: whether a backward pass ran.
        scale: the loss scale of the mixed-precision run.
        scales_itself: whether `fn` ran the backward pass itself, so that `scale` was not used.
        loss: the loss of the mixed-precision run, if `fn` returned one.
        reference_loss: the loss of the reference run.
        reference_is_finite: whether the loss and the gradients of parameters in the reference run are finite;
            those that are not have no error.
        quantized: what recipes did to operands, as in `Recording`.
        fits: how well these operands fit their formats, by the same keys.
        parameters: how well the parameters of modules without a recipe, such as norms and embeddings, would
            fit the format of weights, by name.
        work: the floating-point operations of products with a recipe in the forward pass, by module and op.
        parents: for each value, the values that it was computed from.
        narrow_references: the number of reference values narrower than the reference dtype, because `fn`
            casts them itself.

    Over several ranks, a difference is the largest that a rank found, and a loss the mean of all; what
    recipes did is of this rank.
    """

    def __init__(
        self,
        reference: Run,
        mixed: Run,
        dtype: torch.dtype,
        reference_dtype: torch.dtype,
        ranks: Ranks,
    ) -> None:
        found = ranks.merged(Found.of(reference, mixed), Found.merged)
        self.differences = [*found.differences.values()]
        shared = len(found.differences)
        self.unmatched = len(reference.samples) + len(mixed.samples) - 2 * shared
        self.dtype = _low_dtype(mixed, dtype)
        self.reference_dtype = reference_dtype
        self.scale = mixed.scale
        self.loss, self.reference_loss = found.losses
        self.reference_is_finite, self._reference_fault = first_fault(reference, found.differences)
        self.ran_backward = reference.ran_backward
        self.scales_itself = mixed.scales_itself
        self.quantized = mixed.quantized.read()
        self.fits, self.parameters, self.work = mixed.fits, mixed.parameters, found.work
        self._loss_producer = mixed.loss_producer
        self.parents = found.parents
        self.narrow_references = sum(
            s.dtype.itemsize < reference_dtype.itemsize for s in reference.samples.values()
        )

    def at(self, level: str, phase: str | None = None) -> list[Difference]:
        """Return the differences at one level in one or both phases, largest added error first.

        Args:
            level: ``"op"``, ``"module"`` or ``"parameter"``.
            phase: ``"forward"`` or ``"backward"``; by default both.

        Raises:
            ValueError: there is no such level or phase.
        """
        _check_one_of("level", level, (OP, MODULE, PARAMETER))
        if phase is not None:
            _check_one_of("phase", phase, (FORWARD, BACKWARD))
        selected = [d for d in self.differences if d.key.level == level and phase in (None, d.key.phase)]
        return sorted(selected, key=lambda d: (-d.added, d.order))

    def leads(self, tolerance: float | None = None) -> list[Difference]:
        """Return the ops that make the loss or a gradient wrong: sources of inf or NaN first, then by error.

        Errors that do not reach the result are ignored, such as a mask of ``finfo(dtype).min`` that a
        softmax turns into zeros, and errors of gradients that are tiny beside the largest one. Without a loss
        and gradients of parameters, every op counts as a result.

        Args:
            tolerance: the relative error to accept in results and from each op; by default 0.125 and 0.03,
                but at least 16 times the dtype's ``eps``.

        Raises:
            TypeError: `tolerance` is no real number.
            ValueError: `tolerance` is NaN or below 0.
        """
        check_tolerance(tolerance)
        limit, of_results = tolerances(self.dtype, tolerance)
        wrong = {d.key: d for d in self.differences if d.error > limit and not d.noise}
        largest = max((d.size for d in self.at(PARAMETER) if not d.noise), default=0.0)
        reaching = {
            key
            for key in self._results()
            if key in wrong
            and wrong[key].error > of_results
            and (key.level != PARAMETER or _weight(wrong[key]) > of_results * largest)
        }
        pending = list(reaching)
        while pending:
            parents = [key for key in self.parents[pending.pop()] if key in wrong and key not in reaching]
            reaching.update(parents)
            pending += parents
        ops = [wrong[key] for key in reaching if key.level == OP and not wrong[key].random]
        causes = [d for d in ops if d.added > limit]
        return sorted(causes, key=lambda d: (d.added < math.inf, d.key.phase == BACKWARD, -d.added, d.order))

    def _results(self) -> list[Key]:
        results = [d.key for d in self.differences if d.key.level == PARAMETER]
        results += [] if self._loss_producer is None else [self._loss_producer]
        return results or [d.key for d in self.differences]

    @functools.cached_property
    def first_not_finite(self) -> Difference | None:
        """The first op that produced inf or NaN where the reference is finite."""
        return next((d for d in self.differences if d.key.level == OP and d.overflow), None)

    @functools.cached_property
    def loss_error(self) -> float:
        """The relative error of the loss; 0 if there is none, or that of the reference is not finite."""
        return scalar_error(self.loss, self.reference_loss)

    @functools.cached_property
    def gradient_error(self) -> float:
        """The largest relative error of a parameter's gradient, ignoring noise; 0 without a backward pass."""
        return max((d.error for d in self.at(PARAMETER) if not d.noise), default=0.0)

    @functools.cached_property
    def result_error(self) -> float:
        """The largest relative error of the loss and of gradients, those over the largest gradient's norm."""
        gradients = [d for d in self.at(PARAMETER) if not d.noise]
        largest = max((d.size for d in gradients), default=0.0)
        errors = (_weight(d) / largest if largest else d.error for d in gradients)
        return max(self.loss_error, *errors, 0.0)

    def __repr__(self) -> str:
        return f"<Comparison of {counted(len(self.differences), 'value')} in {self.dtype}>"


def _low_dtype(run: Run, dtype: torch.dtype) -> torch.dtype:
    """Return `dtype`, or what the ops of `run` ran in instead: regions of the step may name another."""
    halves = {torch.float16, torch.bfloat16}
    ran = halves.intersection(sample.dtype for sample in run.samples.values())
    return ran.pop() if dtype in halves and len(ran) == 1 else dtype


def _weight(gradient: Difference) -> float:
    """Return the size of an error, which counts against the largest gradient: next to it, it may be noise."""
    return math.inf if gradient.error == math.inf else gradient.distance


def compared(
    step: Step,
    policy: OpPolicy,
    modules: Mapping[Any, Any] = MappingProxyType({}),
    scale: float = 1.0,
    reference: torch.dtype = torch.float32,
) -> Comparison:
    """Compare `step` in the `reference` dtype with `step` under `policy`, with rules for `modules`."""
    wanted = step.reference(reference, scale)
    with step.applied(modules):
        mixed = step.mixed(policy, scale)
    return Comparison(wanted, mixed, step.dtype, reference, Ranks(step.roots))


def compare(
    fn: Callable[[], Any],
    device: str | torch.device | Tensor = "auto",
    *,
    policy: OpPolicy | None = None,
    format: str | Recipe | None = None,  # noqa: A002
    reference: torch.dtype = torch.float32,
    dtype: torch.dtype | None = None,
    scale: float = 1.0,
    model: nn.Module | None = None,
    seed: int = 0,
    limit: int = 16384,
) -> Comparison:
    """Run a step in float32 and in mixed precision, and report where they differ, worst first.

    It compares the results of ops and modules, the gradients in the backward pass and those of parameters.
    Ops with an autocast rule are compared as the program calls them, others as kernels.

    Both runs start from the same state and seed. Afterwards the parameters, buffers, gradients and training
    flags of the modules that `fn` calls, the state of the optimizers, scalers, schedulers and averages of
    weights (torch's) that it uses, and the random generators of torch and ``random`` are restored; hooks of
    scalers are not called. Other changes made by `fn` persist, so it should use a fixed batch rather than
    advance an iterator. What it changes of the model before it calls it, as ``zero_grad()`` does, is restored
    only if `model` is passed.

    Under DDP, FSDP2 and tensor parallelism all ranks must call it; all get the same result. Values of
    DTensors are compared whole. Where each rank has values of its own, such as activations, the worst counts.
    FSDP2 casts weights in both runs if it has an ``mp_policy``: shard without one, and let autocast cast.

    Args:
        fn: the step, a function without arguments. It runs the forward pass and returns the loss alone;
            `compare` then runs the backward pass with `scale`. If `fn` runs it itself, `scale` is not used.
            `fn` needs no autocast region; a region that it enters without a policy uses the run's policy.
            What it does outside of its own regions is in the run's, except for backward passes and steps of
            optimizers.
        device: the device type, as for `autocast`.
        policy: the policy of the mixed-precision run; by default the device's.
        format: a `Recipe`, or the name of one, for those matrix products that the policy runs in low
            precision; `dtype` then defaults to bfloat16 if the device has it. The report counts, per layer
            and role, the elements that the format could not hold.
        reference: the reference dtype: float32, or another that autocast supports.
        dtype: the low-precision dtype; by default the device's.
        scale: the loss scale of the mixed-precision run, as applied by a `GradScaler`.
        model: the model whose ``named_modules()`` names the modules; by default, the outermost module
            that `fn` calls.
        seed: seed of the random generators before each run.
        limit: the maximum number of evenly spaced elements to compare per tensor; all elements are
            checked for inf and NaN.

    Raises:
        AmpError: `fn` returned a tensor that is not a scalar or has no values, or a container with the loss,
            or came to the end of an iterator; FSDP1 shards its model, TorchScript compiled a part of it, or a
            parameter is not initialised yet; or `reference` is not supported.
        PolicyError: there is no recipe `format`, or it cannot be a rule; or `policy` has products in low
            precision by size, and `format` is given.
        TypeError: `fn` is not callable, `model` is not a module, or another argument has the wrong type.
        ValueError: `scale` or `limit` is out of range, or the device has no regions of `dtype`.

    Example::

        print(compare(lambda: loss_fn(model(inputs), targets), "cpu", dtype=torch.bfloat16))
    """
    scale = valid_scale(scale, "scale=")
    check_dtype(reference, "reference")
    if not reference.is_floating_point:
        raise ValueError(f"reference= must be a floating-point dtype, not {reference}.")
    if format is not None:
        policy, dtype = quantising(device, policy, format, dtype)
    step = Step(fn, device, dtype, policy, model, seed, limit)
    return compared(step, step.policy, scale=scale, reference=reference)
