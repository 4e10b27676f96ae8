"""``advise(format=)``: find the layers that tolerate a format, and a policy for them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable

from amp_core.common.text import counted
from amp_core.debugging.advice import ORIGIN, FormatAdvice, LayerInFormat
from amp_core.debugging.comparison import Comparison, compared, tolerances
from amp_core.debugging.places import Place
from amp_core.debugging.step import Step
from amp_core.errors import PolicyError
from amp_core.policy import OpPolicy
from amp_core.regions.selecting import glob_of

_LESS = 0.8  # of the room for errors, if the estimate was too low
_PARTS = 1000  # in which that room is divided

Layer = tuple[str | None, str]
"""A module, or None for all calls of the op, and an op."""


class FormatSearch:
    """The search behind one call of ``advise(format=)``.

    The errors of layers are nearly independent, so their squares add up: that estimate names the sets of
    layers to measure. Only what was measured counts.

    Args:
        step: the step, under the policy without the format.
        policy: that policy with the format's recipe for its matrix products.
        tolerance: the relative error to accept in loss and gradients.
        progress: called with a description of each run.
    """

    def __init__(
        self, step: Step, policy: OpPolicy, tolerance: float | None, progress: Callable[[str], None]
    ) -> None:
        self._step, self._policy, self._progress = step, policy, progress
        _, self._tolerance = tolerances(step.dtype, tolerance)
        self._work: dict[Layer, int] = {}
        self._tried: dict[frozenset[Layer], Comparison] = {}

    def run(self, rounds: int) -> FormatAdvice:
        """Search; at the end try at most `rounds` layers more than the estimate allows, one by one."""
        whole = self._tried[frozenset()] = self._measure(self._policy, {}, "all layers in the format")
        if not whole.work:
            raise PolicyError(
                "The step has no matrix product that takes the format: the policy runs none in low "
                "precision, or fn enters a region with its own policy or dtype. amp_core.record() shows the "
                "rule of each op."
            )
        self._work = self._layers(whole.work)
        if self._is_tolerable(self._work):
            return self._advice(self._work, {}, whole)
        plain = self._with(())
        alone = {layer: self._with([layer]).result_error for layer in self._work}
        if self._is_tolerable(()):
            self._try_sets(plain.result_error, alone, rounds)
        return self._advice(self._best(), alone, whole)

    def _try_sets(self, plain: float, alone: dict[Layer, float], rounds: int) -> None:
        """Measure the set with the most work whose estimated error fits, smaller ones, and larger ones."""
        added = {layer: max(error**2 - plain**2, 0.0) for layer, error in alone.items()}
        room = self._tolerance**2 - plain**2
        chosen = _most_work(self._work, added, room)
        # However little room there is, it holds the layers that seem to add nothing.
        while not self._is_tolerable(chosen) and any(added[layer] for layer in chosen):
            room *= _LESS
            chosen = _most_work(self._work, added, room)
        chosen = self._best()
        left = [layer for layer in self._work if layer not in chosen and alone[layer] <= self._tolerance]
        for layer in sorted(left, key=lambda layer: -self._work[layer])[:rounds]:
            if self._is_tolerable({*chosen, layer}):
                chosen |= {layer}

    def _best(self) -> frozenset[Layer]:
        """Return the set with the most work among those measured and found within the tolerance."""
        sets = (frozenset(self._work.keys() - out) for out in self._tried)
        return max(
            (each for each in sets if self._is_tolerable(each)), key=self._work_of, default=frozenset()
        )

    def _work_of(self, layers: Iterable[Layer]) -> int:
        return sum(self._work[layer] for layer in layers)

    def _is_tolerable(self, layers: Iterable[Layer]) -> bool:
        return self._with(layers).result_error <= self._tolerance

    # Runs.

    def _with(self, layers: Iterable[Layer]) -> Comparison:
        """Return the comparison of the step with `layers` in the format."""
        out = frozenset(self._work.keys() - {*layers})
        if out not in self._tried:
            words = f"{len(self._work) - len(out)} of {counted(len(self._work), 'layer')} in the format"
            self._tried[out] = self._measure(*self._rules(out), words)
        return self._tried[out]

    def _measure(self, policy: OpPolicy, modules: dict[str, dict[str, str]], words: str) -> Comparison:
        self._progress(words)
        return compared(self._step, policy, modules)

    def _advice(self, layers: Iterable[Layer], alone: dict[Layer, float], whole: Comparison) -> FormatAdvice:
        chosen, total = {*layers}, max(self._work_of(self._work), 1)
        policy, modules = self._rules(frozenset(self._work.keys() - chosen))
        after = self._measure(policy, modules, "the proposal again")
        listed = [
            LayerInFormat(module, op, work, (module, op) in chosen, alone.get((module, op)))
            for (module, op), work in self._work.items()
        ]
        return FormatAdvice(
            policy,
            modules,
            None,
            before=whole,
            after=after,
            share=self._work_of(chosen) / total,
            tolerance=self._tolerance,
            layers=tuple(listed),
        )

    # Layers and rules.

    def _layers(self, work: dict[tuple[Place, str], int]) -> dict[Layer, int]:
        """Return the work of each layer; an op that also runs where no module has a name is one layer."""
        named = self._step.named_modules()
        nameless = {op for place, op in work if not place.model or place.module not in named}
        layers: defaultdict[Layer, int] = defaultdict(int)
        for (place, op), count in work.items():
            layers[None if op in nameless else place.module, op] += count
        return dict(layers)

    def _rules(self, out: frozenset[Layer]) -> tuple[OpPolicy, dict[str, dict[str, str]]]:
        """Return the rules of the policy and of modules that leave the layers in `out` out of the format."""
        policy, modules = self._policy, defaultdict[str, dict[str, str]](dict)
        for op in dict.fromkeys(op for _, op in self._work):
            plain, recipe = self._step.policy.rules[op], self._policy.rules[op]
            here = {module for module, name in self._work if name == op}
            without = {module for module, name in out if name == op}
            if here == without:
                policy = policy.override({op: plain}, origin=ORIGIN)
                continue
            for module in sorted(without, key=str):
                modules[glob_of(str(module))][op] = plain
            for module in sorted(here - without, key=str):
                if any(_is_inside(str(module), str(other)) for other in without):
                    modules[glob_of(str(module))][op] = recipe
        return policy, dict(modules)


def _is_inside(module: str, other: str) -> bool:
    return module != other and (not other or module.startswith(f"{other}."))


def _most_work(work: dict[Layer, int], added: dict[Layer, float], room: float) -> frozenset[Layer]:
    """Return the layers with the most work whose squared errors fit into `room`: a knapsack."""
    best = [(0, frozenset[Layer]())] * (_PARTS + 1)
    for layer, error in added.items():
        if not 0 <= error <= room:
            continue
        size = math.ceil(error / room * _PARTS) if room else 0
        for used in range(_PARTS, size - 1, -1):
            total, layers = best[used - size]
            if total + work[layer] > best[used][0]:
                best[used] = total + work[layer], layers | {layer}
    return best[_PARTS][1]
