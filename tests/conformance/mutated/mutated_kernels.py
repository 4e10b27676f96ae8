"""Kernels with one mutation: what goes wrong, and when."""

from __future__ import annotations

import itertools
import os
import random
import sys
import threading
import time
import warnings
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import mutated_what as doing
import mutated_when as whens
import torch
from torch._subclasses.fake_tensor import FakeTensor

from amp_core.kernels import Portable
from amp_core.states.loss_scale import Hysteresis
from amp_core.testing.suite.data import same_bits


class Mutation(NamedTuple):
    """A method of a right backend, when it goes wrong, and what it does then."""

    method: str
    when: str
    what: str


class Call:
    """What is known of a call before it runs."""

    def __init__(self, kernels, given, pairs, **arguments):
        self.given, self.pairs, self.number = given, pairs, kernels.calls
        self.mode = torch.utils._python_dispatch._get_current_dispatch_mode() is not None
        self.fake = any(isinstance(s, FakeTensor) for s, _ in pairs)
        self.busy, self._kernels = kernels.running, kernels
        self.__dict__.update(arguments)

    def again(self, what, key):
        """Whether the last call had the same."""
        key, last = list(key), self._kernels.last.get(what)
        self._kernels.last[what] = key
        return key == last


def _tensor(method, name, test):
    return name, lambda c: [i for i, (s, t) in enumerate(c.pairs) if test(s, t, i, c.pairs)]


def _call(name, test):
    return name, lambda c: list(range(max(1, len(c.pairs)))) if test(c) else []


_WIDENING = {
    f"{a} to {b}".replace("torch.", "")
    for a, b in itertools.product(whens.DTYPES, repeat=2)
    if a is b or a.itemsize < b.itemsize
}
ORDERS = (1.0, 2.0, 3.0, 0.5, 2.5, torch.inf)
FACTORS = {
    "a factor of 1": lambda c: c.factor == 1,
    "a factor of 0": lambda c: c.factor == 0,
    "a negative factor": lambda c: c.factor < 0,
    "a factor that is not finite": lambda c: not torch.isfinite(torch.tensor(c.factor)),
    "a factor below 1e-20": lambda c: 0 < abs(c.factor) < 1e-20,
    "a factor of 1/3": lambda c: abs(c.factor - 1 / 3) < 1e-6,
    "no flag": lambda c: c.flag is None,
    "a flag of one dimension": lambda c: c.flag is not None and c.flag.dim() == 1,
    "a flag that is set": lambda c: c.flag is not None and float(c.flag) > 0,
}
UPDATES = {
    "an overflow": lambda c: c.found > 0,
    "no overflow": lambda c: c.found == 0,
    "a flag above 1": lambda c: c.found > 1,
    "a flag of one dimension": lambda c: c.flag.dim() == 1,
    "a tracker of 0": lambda c: c.tracker == 0,
    "a tracker beyond the interval": lambda c: c.tracker > c.schedule.growth_interval,
    "the last step of the interval": lambda c: c.tracker == c.schedule.growth_interval - 1,
    "an interval of 1": lambda c: c.schedule.growth_interval == 1,
    "an interval above 2^31": lambda c: c.schedule.growth_interval > 2**31,
    "a smallest scale": lambda c: c.schedule.min_scale > 0,
    "a largest scale": lambda c: c.schedule.max_scale < 1e30,
    "a scale of 0": lambda c: c.scale == 0,
    "a scale near the top": lambda c: c.scale > 1e38,
    "a subnormal scale": lambda c: 0 < c.scale < 1e-38,
    "no hysteresis left": lambda c: c.left == 0,
    **{f"hysteresis {k.value}": lambda c, k=k: c.schedule.hysteresis_kind is k for k in Hysteresis},
    "a growth factor of 1.7": lambda c: c.schedule.growth_factor == 1.7,
    "the scale of before": lambda c: c.again("scale", [c.scale]),
    "the state of before, another schedule": lambda c: (
        c.again("state", [c.scale, c.tracker, c.left]) and not c.again("schedule", [c.schedule])
    ),
}
UPDATED = {
    "the scale halved": lambda k, c: c.state.scale.mul_(0.5) if c.scale else c.state.scale.fill_(1.0),
    "the tracker one more": lambda k, c: c.state.growth_tracker.add_(1),
    "the tracker 0": lambda k, c: c.state.growth_tracker.zero_(),
    "the hysteresis one less": lambda k, c: c.state.hysteresis_left.sub_(1),
    "the scale rounded to bfloat16": lambda k, c: c.state.scale.copy_(c.state.scale.bfloat16()),
    "no version of the scale moved": lambda k, c: doing._hide(c.state.scale),
    "the flag cleared": lambda k, c: c.flag.zero_(),
    "the flag's version moved": lambda k, c: (
        None if c.flag.is_inference() else torch.autograd.graph.increment_version(c.flag)
    ),
    "the element after the scale written": lambda k, c: doing._zero(doing._beyond(c.state.scale, 1)),
    "the element before the tracker written": lambda k, c: doing._zero(
        doing._beyond(c.state.growth_tracker, -1)
    ),
    "the state kept": lambda k, c: setattr(k, "kept", c.state.scale),
    "the scale before an update kept": lambda k, c: c.state.scale.fill_(
        k.stale.setdefault(id(c.state.scale), float(c.state.scale))
    ),
}  # fmt: skip
# Of the statistics; each takes the kernels, the call, the places and the right ones.
STATS = {
    "norms off by 0.1 %": lambda k, c, at, r: replace(r, norms=_scaled(r.norms, at, 1.001)),
    "norms in float16": lambda k, c, at, r: replace(r, norms=r.norms.half()),
    "the norm off by 0.1 %": lambda k, c, at, r: replace(r, norm=r.norm * 1.001),
    "the norm without one": lambda k, c, at, r: replace(
        r, norm=torch.linalg.vector_norm(_scaled(r.norms, at, 0.0), c.order)
    ),
    "norms without an element": lambda k, c, at, r: replace(
        r, norms=k.right.grad_stats(_cut(c.given, at), c.order).norms.to(r.norms.dtype)
    ),
    "flags not set": lambda k, c, at, r: replace(
        r, nonfinite=_scaled(r.nonfinite, at, 0.0), found_inf=_scaled(r.nonfinite, at, 0.0).sum().clamp(max=1)
    ),
    "flags of all but the last element": lambda k, c, at, r: replace(
        r, **{n: getattr(k.right.grad_stats(_cut(c.given, at)), n) for n in ("nonfinite", "found_inf")}
    ),
    "flags set": lambda k, c, at, r: replace(r, nonfinite=_scaled(r.nonfinite, at, 0.0, 1.0)),
    "found_inf a count": lambda k, c, at, r: replace(r, found_inf=r.nonfinite.sum()),
    "found_inf lost": lambda k, c, at, r: replace(r, found_inf=r.found_inf * 0),
    "found_inf set": lambda k, c, at, r: replace(r, found_inf=r.found_inf * 0 + 1),
    "an inf norm of NaN": lambda k, c, at, r: replace(
        r, norm=torch.where(r.norm.isinf(), torch.nan, r.norm)
    ),
    "a NaN norm of inf": lambda k, c, at, r: replace(
        r, norms=torch.where(r.norms.isnan(), torch.inf, r.norms)
    ),
    "flags in float64": lambda k, c, at, r: replace(r, nonfinite=r.nonfinite.double()),
    "found_inf of one dimension": lambda k, c, at, r: replace(r, found_inf=r.found_inf.reshape(1)),
    "the norm a view of the norms": lambda k, c, at, r: (
        replace(r, norm=r.norms[0]) if len(r.norms) == 1 else r
    ),
    "order 2": lambda k, c, at, r: k.right.grad_stats(c.given),
    "the statistics of before": lambda k, c, at, r: k.stale.setdefault(
        (c.order, *map(id, c.given)), replace(r, **{n: v.clone() for n, v in vars(r).items()})
    ),
    "kept": lambda k, c, at, r: setattr(k, "kept", r) or r,
    "it requires gradients": lambda k, c, at, r: replace(r, norm=r.norm.clone().requires_grad_()),
}  # fmt: skip
FLAGS = {
    "the flag not set": lambda k, c, before: c.flag.copy_(before),
    "the flag set": lambda k, c, before: c.flag.fill_(1.0),
    "the flag cleared first": lambda k, c, before: c.flag.sub_(before).clamp_(min=0.0),
    "the flag counted": lambda k, c, before: c.flag.add_(c.flag),
    "the flag set behind autograd": lambda k, c, before: doing._hide(c.flag),
    "the element after the flag written": lambda k, c, before: doing._zero(doing._beyond(c.flag, 1)),
    "the factor written": lambda k, c, before: c.number_tensor.mul_(2.0),
    "the factor's version moved": lambda k, c, before: (
        None if c.number_tensor.is_inference() else torch.autograd.graph.increment_version(c.number_tensor)
    ),
    "multiplied twice": lambda k, c, before: k.right.multiply_(c.given, c.number_tensor),
    "the flag kept": lambda k, c, before: setattr(k, "kept", c.flag),
}
# To any call; each takes the kernels, the call, the places and the results, if new.
ANY = {
    "the source kept alive": lambda k, c, at, r: setattr(
        k, "kept", [c.pairs[i][0] for i in at[:1] if c.pairs]
    ),
    "the source's memory kept alive": lambda k, c, at, r: setattr(
        k, "kept", [c.pairs[i][0].detach() for i in at[:1] if c.pairs]
    ),
    "the target kept alive": lambda k, c, at, r: setattr(
        k, "kept", [(c.pairs if r is None else list(zip(r, r, strict=True)))[i][1] for i in at[:1] if c.pairs]
    ),
    "more memory with every call": lambda k, c, at, r: k.grown.append(object()),
    "it raises": lambda k, c, at, r: _raise(),
    "it waits for the device": lambda k, c, at, r: [c.pairs[i][0].sum().item() for i in at[:1] if c.pairs],
    "it warns": lambda k, c, at, r: warnings.warn("slow", stacklevel=2),
    "it prints": lambda k, c, at, r: sys.stdout.write("slow\n"),
    "it draws a number": lambda k, c, at, r: random.random(),
    "it draws torch's number": lambda k, c, at, r: torch.rand(()),
    "it leaves a thread": lambda k, c, at, r: threading.Thread(
        target=time.sleep, args=(0.3,), daemon=True
    ).start(),
    "it sets the environment": lambda k, c, at, r: os.environ.__setitem__("SOME_OPTION", str(time.time())),
}  # fmt: skip


def _same(one, other):
    try:
        return same_bits(one, other)
    except (RuntimeError, ValueError):  # under torch.func
        return False


def _raise():
    raise RuntimeError("mutated")


def _scaled(values, at, factor, plus=0.0):
    values = values.clone()
    values[at] = values[at] * factor + plus if factor else plus
    return values


def _cut(tensors, at):
    return [
        t.detach().reshape(-1)[:-1] if i in set(at) and t.numel() > 1 else t for i, t in enumerate(tensors)
    ]


class Mutated(Portable):
    """The portable kernels with one mutation; `fired` and `changed` say what became of it."""

    def __init__(self, mutation, places):
        super().__init__()
        self.mutation, self.places, self.right = mutation, places, Portable()
        self.calls = self.running = self.fired = self.changed = 0
        self.last, self.stale, self.grown, self.kept = {}, {}, [], None

    def _at(self, call):
        with nullcontext() if call.fake else torch.utils._python_dispatch._disable_current_modes():
            at = self.places(call)
        self.fired += bool(at)
        return at

    def _run(self, method, call, right, change):
        if method != self.mutation.method:
            return right()
        self.calls += 1
        self.running += 1
        try:
            at = self._at(call)
            return change(at) if at else right()
        finally:
            self.running -= 1

    def _written(self, call, right, at, results=None):
        what, fake = self.mutation.what, call.fake
        known = what == "not written" and not fake
        before = {i: call.pairs[i][1].detach().clone() for i in at if known and call.pairs}
        made = right()
        results = results or made
        if what in ANY:
            ANY[what](self, call, at, results)
        elif results is not None and what in doing.NEW:
            for i in at if call.pairs else ():
                results[i] = doing.NEW[what](call.pairs[i][0], results[i])
        elif what == "exchanged with the next" and results is not None:
            for i in at[:1] if len(call.pairs) > 1 else ():
                j = (i + 1) % len(results)
                results[i], results[j] = results[j], results[i]
        elif what == "left out" and results is not None:
            del results[at[-1] :]
        elif what == "the result of before" and results is not None:
            for i in at if call.pairs else ():
                old = self.stale.setdefault((id(call.pairs[i][0]), results[i].dtype), results[i].clone())
                results[i] = old.clone() if old.shape == results[i].shape else results[i]
        else:
            change = {**doing.VALUES, **doing.WRITTEN, **doing.READ}[what]
            for i in at if call.pairs else ():
                source, target = call.pairs[i]
                was = None if fake else target.detach().clone()
                change(source, target, before.get(i))
                self.changed += was is None or what not in doing.VALUES or not _same(was, target)
        return made

    def cast(self, tensors, dtype, out=None):
        if self.mutation.method not in ("cast", "cast(out=)"):
            return self.right.cast(tensors, dtype, out)
        method = "cast" if out is None else "cast(out=)"
        if out is not None and len(out) != len(tensors):
            return self.right.cast(tensors, dtype, out)
        targets = [torch.empty(0, dtype=dtype).expand(0)] * len(tensors) if out is None else out
        pairs = list(zip(tensors, targets, strict=True))
        call = Call(self, tensors, pairs, out=out)

        def change(at):
            if out is not None:
                return self._written(call, lambda: self.right.cast(tensors, dtype, out), at)
            results = self.right.cast(tensors, dtype)
            call.pairs = list(zip(tensors, results, strict=True))
            self._written(call, lambda: None, at, results)
            return results

        return self._run(method, call, lambda: self.right.cast(tensors, dtype, out), change)

    def add_(self, totals, grads):
        right = lambda: self.right.add_(totals, grads)
        if len(totals) != len(grads):
            return right()
        call = Call(self, grads, list(zip(grads, totals, strict=True)))
        return self._run("add_", call, right, lambda at: self._written(call, right, at))

    def multiply_(self, grads, factor, found_inf=None):
        right = lambda: self.right.multiply_(grads, factor, found_inf)
        plain = factor.detach() if "factor" in self.mutation.when else None
        value = float(plain) if plain is not None and type(plain) is torch.Tensor else 0.5
        pairs = [(g, g) for g in grads]
        call = Call(self, grads, pairs, factor=value, flag=found_inf, number_tensor=factor)

        def change(at):
            if self.mutation.what not in FLAGS:
                return self._written(call, right, at)
            before = None if found_inf is None else found_inf.clone()
            right()
            if found_inf is not None:
                FLAGS[self.mutation.what](self, call, before)
            return None

        return self._run("multiply_", call, right, change)

    def grad_stats(self, grads, norm_type=2.0):
        right = lambda: self.right.grad_stats(grads, norm_type)
        call = Call(self, grads, [(g, g) for g in grads], order=norm_type)

        def change(at):
            what = self.mutation.what
            if what in STATS:
                return STATS[what](self, call, at if grads else [], right()) if grads else right()
            stats = right()
            (
                ANY[what](self, call, at, list(grads))
                if what in ANY
                else [doing.READ[what](grads[i], None, None) for i in at if grads]
            )
            return stats

        return self._run("grad_stats", call, right, change)

    def update_scale_(self, state, found_inf, schedule):
        right = lambda: self.right.update_scale_(state, found_inf, schedule)
        if self.mutation.method != "update_scale_":
            return right()
        values = {"scale": float(state.scale), "tracker": int(state.growth_tracker)}
        call = Call(
            self, [], [], state=state, flag=found_inf, found=float(found_inf), schedule=schedule,
            left=int(state.hysteresis_left), **values,
        )  # fmt: skip

        def change(at):
            right()
            if self.mutation.what in ANY:
                ANY[self.mutation.what](self, call, at, [])
            else:
                UPDATED[self.mutation.what](self, call)

        return self._run("update_scale_", call, right, change)


def _whens(method) -> dict[str, Any]:
    """Return what a mutation of `method` may depend on."""
    tensors = {**whens.LAYOUT, **whens.KIND, **whens.PLACE, **whens.SIZE, **whens.VALUES}
    if method in ("cast(out=)", "add_"):
        tensors |= whens.TWO
    if method in ("multiply_", "grad_stats"):
        tensors |= whens.COMPLEX
    lacking = ["conjugated"] if method in ("cast", "cast(out=)", "add_") else []
    if method == "multiply_":  # what is written overlaps with nothing
        lacking += ["expanded", "expanded in the last dimension", "windows", "twice in the list"]
        lacking += ["at an earlier one's address"]
    if method == "add_":  # totals are no narrower than gradients
        lacking += [name for name in tensors if " to " in name and name not in _WIDENING]
    tensors = {name: test for name, test in tensors.items() if name not in lacking}
    if method == "update_scale_":
        found = dict(_call(n, t) for n, t in {**whens.CONTEXT, **UPDATES}.items())
        for name in ("FakeTensors", "torch.func", "a dispatch mode", "a backward pass"):
            found.pop(name)
        return found
    calls = {**whens.CONTEXT, **whens.CALL, **(FACTORS if method == "multiply_" else {})}
    if method == "grad_stats":
        calls |= {f"order {o}": lambda c, o=o: c.order == o for o in ORDERS}
        calls["an int as order"] = lambda c: isinstance(c.order, int)
    return dict(_tensor(method, n, t) for n, t in tensors.items()) | dict(
        _call(n, t) for n, t in calls.items()
    )


def _whats(method) -> list[str]:
    """Return what `method` can do wrong."""
    if method == "update_scale_":
        return [*UPDATED, *(w for w in ANY if "source" not in w and "target" not in w and "waits" not in w)]
    if method == "grad_stats":
        return [*STATS, *doing.READ, *ANY]
    if method == "cast":
        return [
            *doing.VALUES,
            *doing.READ,
            *doing.NEW,
            *ANY,
            "exchanged with the next",
            "left out",
            "the result of before",
        ]
    if method == "cast(out=)":
        return [*doing.VALUES, *doing.WRITTEN, *doing.READ, *ANY]
    if method == "add_":
        return [*doing.VALUES, *doing.WRITTEN, *doing.READ, *ANY]
    return [*doing.VALUES, *doing.WRITTEN, *FLAGS, *ANY]


METHODS = ("cast", "cast(out=)", "add_", "grad_stats", "multiply_", "update_scale_")
_CHECKS = {
    "cast": "cast_of or cast_r or cast_k",
    "cast(out=)": "cast_into or cast_is or cast_refuses",
    "add_": "add",
    "grad_stats": "grad_stats",
    "multiply_": "multiply",
    "update_scale_": "update",
}
VISIBLE = (
    *("the first element wrong", "the last element wrong", "in float32", "of another shape", "a parameter"),
    *("requires gradients", "the source kept alive", "it raises", "norms in float16", "flags in float64"),
    *(
        "found_inf of one dimension",
        "the factor written",
        "the factor's version moved",
        "the tracker one more",
    ),
    *("the hysteresis one less", "the scale halved", "the state kept", "the source's version moved"),
)
"""Faults that show whatever the values are, if there are any."""
RARE = (
    *("FakeTensors", "torch.func", "while another call runs", "a dispatch mode", "an inference tensor"),
    *("deterministic algorithms", "anomaly mode", "another thread", "a factor that is not finite"),
)
"""Conditions in which a kernel may raise, or in which the kit runs few calls."""


def everything() -> list[Mutation]:
    """Return all mutations."""
    return [Mutation(m, when, what) for m in METHODS for when in _whens(m) for what in _whats(m)]


def build(mutation) -> Mutated:
    """Return kernels with `mutation`."""
    return Mutated(mutation, _whens(mutation.method)[mutation.when])


def checks_of(mutation) -> list[tuple[list[str], str]]:
    """Return areas and keywords of the checks that concern `mutation`, the likeliest to find it first."""
    area = next(
        a for a in ("cast", "add", "grad_stats", "multiply", "update") if mutation.method.startswith(a)
    )
    return [([area, "layouts"], _CHECKS[mutation.method]), (["contexts", "memory", "layouts"], "kernels")]
