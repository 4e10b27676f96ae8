"""The search behind `advise`: fix the worst fault with the narrowest change that helps, and test it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch.optim import Optimizer

from amp_core.casts.lost_updates import lost_to_rounding
from amp_core.common.optimizers import parameters_of
from amp_core.debugging.advice import ORIGIN, Advice, Finding
from amp_core.debugging.agreement import Ranks
from amp_core.debugging.capture import OP, PARAMETER, Key
from amp_core.debugging.comparison import Comparison, compared, tolerances
from amp_core.debugging.comparison_report import where
from amp_core.debugging.difference import Difference
from amp_core.debugging.sink import BACKWARD, FORWARD
from amp_core.debugging.step import Step
from amp_core.errors import PolicyError
from amp_core.policy import OpPolicy
from amp_core.policy import rules as r
from amp_core.policy.names import in_full, short
from amp_core.regions.selecting import glob_of

_LARGEST_SCALE = 2.0**24
_HEADROOM = 8  # range left above this step's largest gradient, for larger ones in other steps
_LOST = 0.1  # a share of lost updates that matters
_FEW = 0.01  # a share of underflowing values small enough to ignore


@dataclass(frozen=True)
class Proposal:
    """The settings of one run."""

    policy: OpPolicy
    modules: dict[str, dict[str, str] | str] = field(default_factory=dict)
    scale: float = 1.0


class Search:
    """The search behind one call of `advise`.

    Args:
        step: the step to run.
        tolerance: as for `Comparison.leads`.
        progress: called with a description of each run.
        optimizer: the optimizer whose updates the weights must not lose.
    """

    def __init__(
        self,
        step: Step,
        tolerance: float | None,
        progress: Callable[[str], None],
        optimizer: Optimizer | None,
    ) -> None:
        self._step, self._optimizer = step, optimizer
        self._given = tolerance
        self._progress = progress
        self._findings: list[Finding] = []

    def run(self, rounds: int) -> Advice:
        """Try to fix at most `rounds` faults."""
        proposal = Proposal(self._step.policy)
        before = now = self._try(proposal, "unchanged")
        proposal, now = self._scaled(proposal, now)
        given_up: set[Key] = set()
        for _ in range(rounds):
            fault = next((d for d in now.leads(self._given) if d.key not in given_up), None)
            if fault is None:
                break
            fixed = self._fix(proposal, now, fault)
            if fixed is None:
                given_up.add(fault.key)
            else:
                proposal, now = fixed
        if self._optimizer is not None:
            self._note_lost_updates(proposal, self._optimizer)
        scale = proposal.scale if self._takes_scale(before) else None
        return Advice(proposal.policy, proposal.modules, scale, tuple(self._findings), before, now)

    def _try(self, proposal: Proposal, words: str) -> Comparison:
        self._progress(words)
        return compared(self._step, proposal.policy, proposal.modules, proposal.scale)

    # The loss scale.

    def _scaled(self, proposal: Proposal, now: Comparison) -> tuple[Proposal, Comparison]:
        if not self._takes_scale(now):
            return proposal, now
        scaled = replace(proposal, scale=_fitting_scale(now))
        better = self._try(scaled, f"with a loss scale of {scaled.scale:g}")
        lost, share = _most_restored(now, better)
        if lost is not None and lost.underflow - share > _FEW and self._restores(now, better):
            what = f"{where(lost)}: {lost.underflow:.0%} of the gradient underflows"
            fix = f"init_scale = {scaled.scale:g}"
            place = lost.key.place.module
            self._findings.append(
                Finding(what, place, short(lost.key.name), fix, lost.underflow, share, lost.line)
            )
        return scaled, better

    def _takes_scale(self, comparison: Comparison) -> bool:
        takes = comparison.ran_backward and comparison.reference_is_finite and not comparison.scales_itself
        return takes and _is_narrow(comparison.dtype)

    def _restores(self, now: Comparison, better: Comparison) -> bool:
        """Return whether the gradient of some parameter is wrong now and right in `better`."""
        _, limit = tolerances(now.dtype, self._given)
        right = {d.key for d in better.at(PARAMETER) if d.error <= limit}
        return any(d.error > limit and not d.noise and d.key in right for d in now.at(PARAMETER))

    # The weights.

    def _note_lost_updates(self, proposal: Proposal, optimizer: Optimizer) -> None:
        """Add a finding for each weight whose dtype rounds away a large share of the optimizer's update."""
        lost: dict[str, float] = {}

        def count() -> None:
            names = {id(p): name for root in self._step.roots for name, p in root.named_parameters()}
            if proposal.scale != 1.0:
                for param in parameters_of(optimizer):
                    param.grad = None if param.grad is None else param.grad / proposal.scale
            lost.update(lost_to_rounding(optimizer, names))

        self._progress("for the updates of the weights")
        with self._step.applied(proposal.modules):
            self._step.mixed(proposal.policy, proposal.scale, count)
        lost = Ranks(self._step.roots).merged(lost, _mean_shares)
        for name, share in sorted(lost.items(), key=lambda item: -item[1]):
            if share > _LOST:
                what = f"{name} loses {share:.0%} of its updates to rounding"
                fix = "master_weights(model, optimizer, storage='remainder')"
                self._findings.append(Finding(what, name.rpartition(".")[0], "", fix, share, 0.0))

    # The ops.

    def _badness(self, comparison: Comparison) -> tuple[int, int, float]:
        faults = comparison.leads(self._given)
        not_finite = sum(d.added == math.inf for d in faults)
        return not_finite, len(faults), max(comparison.loss_error, comparison.gradient_error)

    def _fix(
        self, proposal: Proposal, now: Comparison, fault: Difference
    ) -> tuple[Proposal, Comparison] | None:
        what = f"{where(fault)} {'produces inf or NaN' if fault.added == math.inf else 'loses digits'}"
        bound, (limit, _) = self._badness(now), tolerances(now.dtype, self._given)
        refusal = ""
        for words, candidate in self._candidates(proposal, now, fault):
            try:
                tried = self._try(candidate, words)
            except PolicyError:  # the rule may not fit this op, or the module may be missing
                continue
            except RuntimeError as error:  # a layer with weights in low precision may take no float32
                refusal = refusal or f"; with {words} the step raises {str(error).partition(chr(10))[0]!r}"
                continue
            after = next((d.added for d in tried.differences if d.key == fault.key), 0.0)
            if after <= limit and self._badness(tried) < bound:
                self._note(what, fault, words, after)
                return candidate, tried
        self._note(what + refusal, fault, "", fault.added)
        return None

    def _note(self, fault: str, found: Difference, fix: str, after: float) -> None:
        module, op = found.key.place.module, short(found.key.name)
        self._findings.append(Finding(fault, module, op, fix, found.added, after, found.line))

    def _candidates(
        self, proposal: Proposal, now: Comparison, fault: Difference
    ) -> Iterator[tuple[str, Proposal]]:
        place = fault.key.place
        if place.module not in self._step.named_modules() or not place.model:
            for ops in ([in_full(fault.key.name)], self._differentiated(now, fault)):
                if ops:
                    policy = proposal.policy.override(dict.fromkeys(ops, r.FP32), origin=ORIGIN)
                    yield _words(ops, ""), replace(proposal, policy=policy)
            return
        if fault.key.phase == FORWARD:
            for ops in ([in_full(fault.key.name)], self._leading_to(now, fault)):
                if ops:
                    yield _words(ops, place.module), _with_ops(proposal, place.module, ops)
        elif not place.module and (ops := self._differentiated(now, fault)):
            yield _words(ops, ""), _with_ops(proposal, "", ops)
        around = place.module
        while around:
            yield f"{around} in float32", _with_module(proposal, around)
            around = around.rpartition(".")[0]

    def _differentiated(self, now: Comparison, fault: Difference) -> list[str]:
        """Return the low-precision ops on the line whose backward pass has the fault."""
        ops = (in_full(d.key.name) for d in now.at(OP, FORWARD) if _is_near(d, fault))
        low = {op for op in ops if r.lowers(self._step.policy.rules.get(op))}
        return sorted(low) if fault.key.phase == BACKWARD else []

    def _leading_to(self, now: Comparison, fault: Difference) -> list[str]:
        """Return the ops in the module that led to the fault, back to those meant for low precision."""
        ops, pending = [in_full(fault.key.name)], list(now.parents[fault.key])
        while pending:
            key = pending.pop()
            op = in_full(key.name)
            low = r.lowers(self._step.policy.rules.get(op))
            if key.place == fault.key.place and key.phase == fault.key.phase and not low and op not in ops:
                ops.append(op)
                pending += now.parents[key]
        return ops if len(ops) > 1 else []


def _is_near(one: Difference, other: Difference) -> bool:
    return one.key.place == other.key.place and bool(one.line) and one.line == other.line


def _with_ops(proposal: Proposal, module: str, ops: list[str]) -> Proposal:
    glob = glob_of(module)
    earlier = proposal.modules.get(glob, {})
    rules = {**(earlier if isinstance(earlier, dict) else {}), **dict.fromkeys(ops, r.FP32)}
    return replace(proposal, modules={**proposal.modules, glob: rules})


def _with_module(proposal: Proposal, module: str) -> Proposal:
    """Run the whole module in float32, replacing the rules for its parts."""
    glob = glob_of(module)
    others = {m: rules for m, rules in proposal.modules.items() if not f"{m}.".startswith(f"{glob}.")}
    return replace(proposal, modules={**others, glob: r.FP32})


def _words(ops: list[str], module: str) -> str:
    listed = ", ".join(map(short, ops))
    return f"{listed} in float32" + (f" in {module}" if module else "")


def _mean_shares(parts: list[dict[str, float]]) -> dict[str, float]:
    """Return the mean of what ranks lost, each of its shard; a rank without elements of a weight has NaN."""
    found: dict[str, list[float]] = {}
    for name, share in (item for part in parts for item in part.items() if not math.isnan(item[1])):
        found.setdefault(name, []).append(share)
    return {name: math.fsum(shares) / len(shares) for name, shares in found.items()}


def _is_narrow(dtype: torch.dtype) -> bool:
    """Return whether gradients can exceed the dtype's range: float16 but not bfloat16."""
    return torch.finfo(dtype).smallest_normal > torch.finfo(torch.float32).smallest_normal


def _fitting_scale(plain: Comparison) -> float:
    """Return the largest power of two that keeps low-precision gradients well below the dtype's maximum."""
    gradients = (d for d in plain.differences if d.key.phase == BACKWARD and d.dtype == plain.dtype)
    largest = max((d.largest / plain.scale for d in gradients), default=0.0)
    room = torch.finfo(plain.dtype).max / _HEADROOM / max(largest, 1 / _LARGEST_SCALE)
    return float(2.0 ** math.floor(math.log2(min(max(room, 1.0), _LARGEST_SCALE))))


def _most_restored(now: Comparison, better: Comparison) -> tuple[Difference | None, float]:
    """Return the backward op whose underflow `better` reduces the most, and what remains of it there."""
    left = {d.key: d.underflow for d in better.at(OP, BACKWARD)}
    lost = max(now.at(OP, BACKWARD), key=lambda d: d.underflow - left.get(d.key, d.underflow), default=None)
    return lost, 0.0 if lost is None else left.get(lost.key, lost.underflow)
