"""``advise(goal="speed")``: find where low precision pays, op by op and size by size, and measure it."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from amp_core._torch.autograd import current_autograd_node
from amp_core._torch.tracing import calls_are_captured
from amp_core.common.containers import map_tensors, tensors_in
from amp_core.common.generators import seeded
from amp_core.common.text import counted
from amp_core.debugging.advice import ORIGIN, OpTime, SpeedAdvice
from amp_core.debugging.agreement import Ranks
from amp_core.debugging.capture import Capture
from amp_core.debugging.forward_region import forward_region
from amp_core.debugging.places import Places
from amp_core.debugging.state_keeper import StateKeeper
from amp_core.debugging.step import Step, check_result, is_of_freed_graph
from amp_core.debugging.tap import eager
from amp_core.debugging.timing import interleaved
from amp_core.dispatch.engine import engine
from amp_core.dispatch.work import work
from amp_core.errors import AmpError
from amp_core.policy import OpPolicy, names
from amp_core.policy import rules as r
from amp_core.policy.recipes import recipe_of
from amp_core.regions.region import autocast
from amp_core.regions.selecting import glob_of

_RANKS = (
    'advise(goal="speed") cannot time a model that several ranks share (DDP, FSDP2, tensor parallelism): '
    "each rank would measure other times, choose other rules, and wait in other collectives. Ask for advice "
    "on one rank before the model is wrapped or sharded, and apply it on all."
)
_REGION = (
    'advise(goal="speed") runs the step in regions of its own, one after the other. But all ops of fn that a '
    "region casts are in a region of fn's, which would make these runs alike. Leave the `with autocast(...)` "
    "out of fn."
)
_GAIN = 0.98  # a module's rule must save 2 % of the step


@dataclass(frozen=True)
class _Setting:
    """One way to run the step."""

    name: str
    policy: OpPolicy | None = None
    enabled: bool = True
    modules: Mapping[str, str] = field(default_factory=dict)


class SpeedSearch:
    """The search behind one call of ``advise(goal="speed")``.

    Args:
        step: the step to time.
        policy: the policy to start from; None for the device's.
        progress: called with a description of each measurement.
    """

    def __init__(
        self,
        step: Step,
        policy: OpPolicy | None,
        progress: Callable[[str], None],
    ) -> None:
        self._step, self._policy, self._progress = step, policy, progress
        self._calls: dict[Any, tuple[OpTime, tuple[Any, ...], dict[str, Any]]] = {}
        self._keeper = StateKeeper()
        self._runs_backward = False
        self._calls_in_regions = 0

    def run(self, rounds: int) -> SpeedAdvice:
        """Return the fastest setting, after trying at most `rounds` modules in float32."""
        with self._keeper.restored(), seeded(self._step.seed, self._step.device_type):
            self._rehearse()
            if Ranks(self._step.roots).are_several:
                raise AmpError(_RANKS)
            self._observe()
            self._progress(f"{counted(len(self._calls), 'op')} in two precisions")
            for entry, args, kwargs in self._calls.values():
                self._time_op(entry, args, kwargs)
            plain = [_Setting("float32", enabled=False), _Setting("autocast", self._policy)]
            policies = dict.fromkeys(self._by_size(cost) for cost in ("low", "chained"))
            policies.pop(self._step.policy, None)  # plain autocast: a gain over itself would be noise
            settings = plain + [s for s in (_Setting("advice", each) for each in policies) if self._runs(s)]
            best = _fastest(settings, self._measure(settings, f"{len(settings)} policies"))
            best = self._with_modules(best, rounds) if best.enabled else best
            # Measure again: the search has chosen among noisy figures.
            final = plain if best in plain else [*plain, replace(best, name="advice")]
            seconds = self._measure(final, "the proposal again")
        return self._advice(
            _fastest(final, seconds), dict(zip([s.name for s in final], seconds, strict=True))
        )

    def _advice(self, chosen: _Setting, seconds: dict[str, float]) -> SpeedAdvice:
        start = self._step.policy
        unchanged = start.override(dict.fromkeys(start.rules, r.UNCHANGED), origin=ORIGIN)
        policy = (chosen.policy or start) if chosen.enabled else unchanged
        seconds["advice"] = seconds[chosen.name]
        ops = sorted((entry for entry, *_ in self._calls.values()), key=lambda e: -e.calls * e.float32)
        for entry in ops:
            entry.rule = policy.rules.get(entry.op, r.UNCHANGED)
        return SpeedAdvice(
            policy, chosen.modules, None, enabled=chosen.enabled, seconds=seconds, ops=tuple(ops)
        )

    # What the step calls.

    def _rehearse(self) -> None:
        """Run the step once in float32, to save what it changes and see whether it runs its own backward."""
        step, keeper = self._step, self._keeper
        if step.model is not None:
            keeper.keep(step.model)
        capture = Capture(1, keeper.keep_tensor)
        tap = capture.tap(step.model)
        tap.places.on_call = keeper.keep
        region = autocast(step.device_type, dtype=step.dtype, enabled=False)
        with tap, self._watched(self._count_in_region), region:
            result = step.fn()
        step.roots = [step.model] if step.model is not None else tap.places.roots
        self._runs_backward = not keeper.has_gradients()
        if not capture.run.ran_backward:
            check_result(result)
        for root in step.roots:
            keeper.keep(root)  # it may only have run inside a functional_call
        try:
            self._backward(result)
        except RuntimeError as error:
            if not capture.run.ran_backward or not is_of_freed_graph(error):
                raise
            self._runs_backward = False  # fn ran it, and has cleared the gradients

    def _count_in_region(self, *_: Any) -> None:
        self._calls_in_regions += _is_of_forward()

    def _observe(self) -> None:
        """Run the step once, and keep the arguments of each op that may run in low precision."""
        places = Places(self._step.model)

        def note(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if _is_of_forward():
                self._note(op, args, kwargs, str(places.here))

        places.attach()
        try:
            with eager(), self._watched(note):
                self._run(_Setting("autocast", self._step.policy))
        finally:
            places.detach()
        if 0 < sum(entry.calls for entry, _, _ in self._calls.values()) <= self._calls_in_regions:
            raise AmpError(_REGION)

    @contextlib.contextmanager
    def _watched(self, note: Callable[[str, tuple[Any, ...], dict[str, Any]], None]) -> Iterator[None]:
        """Tell `note` of each call in a block that a region may run in low precision."""
        rules = self._step.policy.rules
        low = {op for op, rule in rules.items() if r.lowers(rule) and recipe_of(rule) is None}

        def observe(op: str, call: Callable[[], Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if op in low:
                note(op, args, kwargs)
            return call()

        end = engine(self._step.device_type).watch(low, observe)
        try:
            yield
        finally:
            end()

    def _note(self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any], module: str) -> None:
        overload = names.find(op)
        assert overload is not None, f"{op} just ran"
        tensors = [*tensors_in((args, kwargs))]
        shapes = ", ".join("x".join(map(str, t.shape)) or "scalar" for t in tensors)
        key = op, shapes, tuple(map(_is_differentiated, tensors))
        if key not in self._calls:
            entry = OpTime(op, shapes, work(overload, args, kwargs))
            self._calls[key] = entry, *map_tensors((args, kwargs), _detached)
        entry = self._calls[key][0]
        entry.calls += 1
        entry.modules = tuple(dict.fromkeys([*entry.modules, module]))

    # One op.

    def _time_op(self, entry: OpTime, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        step, op = self._step, names.find(entry.op)
        assert op is not None, f"{entry.op} just ran"

        def prepared(dtype: torch.dtype, enabled: bool) -> Callable[[], None]:
            def as_argument(t: Tensor) -> Tensor:
                wide = torch.float32 if isinstance(t, nn.Parameter) else dtype
                return t.detach().to(wide).requires_grad_(t.requires_grad) if t.is_floating_point() else t

            mine = map_tensors((args, kwargs), as_argument)
            leaves = [t for t in tensors_in(mine) if t.requires_grad]

            def run() -> None:
                with autocast(step.device_type, dtype=step.dtype, enabled=enabled, policy=self._policy):
                    result = op(*mine[0], **mine[1])
                if isinstance(result, Tensor) and result.requires_grad:
                    torch.autograd.grad(result, leaves, torch.ones_like(result), allow_unused=True)

            return run

        runs = [prepared(torch.float32, False), prepared(torch.float32, True), prepared(step.dtype, True)]
        entry.float32, entry.low, entry.chained = interleaved(runs, 0.02, step.device_type)

    def _by_size(self, cost: str) -> OpPolicy:
        """Return the policy with the threshold for each op that costs the least by its timed calls."""
        changes = {}
        for op in dict.fromkeys(entry.op for entry, *_ in self._calls.values()):
            entries = sorted((e for e, *_ in self._calls.values() if e.op == op), key=lambda e: e.work)
            changes[op] = _threshold(entries, cost)
        return self._step.policy.override(changes, origin=ORIGIN)

    # The whole step.

    def _measure(self, settings: Sequence[_Setting], words: str) -> list[float]:
        self._progress(words)
        runs = [functools.partial(self._run, setting) for setting in settings]
        return interleaved(runs, 1.5, self._step.device_type)

    def _with_modules(self, best: _Setting, rounds: int) -> _Setting:
        """Run children of the model in float32, one after the other, where the step becomes faster."""
        root = self._step.roots[0] if len(self._step.roots) == 1 else nn.Module()
        losing = (e for e, *_ in self._calls.values() if e.low > e.float32)
        users = {module for entry in losing for module in entry.modules}
        children = [n for n, _ in root.named_children() if any(f"{u}.".startswith(f"{n}.") for u in users)]
        for name in children[:rounds] if len(children) > 1 else ():
            tried = replace(best, name="advice", modules={**best.modules, glob_of(name): r.FP32})
            if self._runs(tried):
                now, then = self._measure([best, tried], f"{name} in float32")
                best = tried if then < _GAIN * now else best
        return best

    def _runs(self, setting: _Setting) -> bool:
        """Return whether the step runs: a layer with weights in low precision may take no float32."""
        try:
            self._run(setting)
        except RuntimeError as error:
            self._progress(f"which raises {str(error)!r}")
            return False
        return True

    def _run(self, setting: _Setting) -> None:
        step = self._step
        self._keeper.clear_gradients()
        with step.applied(setting.modules), step.in_force(setting.policy):
            region = autocast(step.device_type, step.dtype, setting.enabled, policy=setting.policy)
            with forward_region(region):
                result = step.fn()
            self._backward(result)

    def _backward(self, result: Any) -> None:
        if self._runs_backward and isinstance(result, Tensor) and result.requires_grad:
            result.float().sum().backward()  # type: ignore[no-untyped-call]


def _is_of_forward() -> bool:
    return current_autograd_node() is None and not calls_are_captured()


def _detached(tensor: Tensor) -> Tensor:
    copy, differentiated = tensor.detach(), _is_differentiated(tensor)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(copy, differentiated)
    return copy.requires_grad_(differentiated)


def _is_differentiated(tensor: Tensor) -> bool:
    """Return whether the call that uses `tensor` now has a backward pass, as none has under ``no_grad``."""
    return tensor.requires_grad and torch.is_grad_enabled()


def _fastest(settings: Sequence[_Setting], seconds: Sequence[float]) -> _Setting:
    return settings[seconds.index(min(seconds))]


def _threshold(entries: list[OpTime], cost: str) -> str:
    """Return the rule of one op whose calls, ordered by work, cost the least."""
    costs = [
        sum(e.calls * e.float32 for e in entries[:split])
        + sum(e.calls * getattr(e, cost) for e in entries[split:])
        for split in range(len(entries) + 1)
    ]
    split = costs.index(min(costs))
    if split == 0:
        return r.LOWER_PRECISION_FP
    if split == len(entries):
        return r.FP32
    below, above = entries[split - 1].work, entries[split].work
    rule = r.above(math.sqrt(below * above))
    limit = r.threshold(rule)
    return (
        rule if limit is not None and below <= limit < above else f"{r.LOWER_PRECISION_FP} above {below} FLOP"
    )
