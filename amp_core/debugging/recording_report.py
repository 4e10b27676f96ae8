"""The reports for `Recording` and `RecordingDiff`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from amp_core.debugging.collectives import CollectiveCount, CollectiveKey
from amp_core.debugging.format_tables import quantized_table
from amp_core.debugging.op_counts import CastCount, CastKey, OpKey
from amp_core.debugging.places import Place
from amp_core.debugging.recording import Recording
from amp_core.debugging.report import content_of
from amp_core.debugging.sink import BACKWARD, FORWARD
from amp_core.debugging.stored_dtypes import TensorKey
from amp_core.debugging.tables import Content, Table, Value, as_bytes, as_count, as_share, columns
from amp_core.debugging.violations import Violation
from amp_core.policy.names import short

NO_RULE = "(no rule)"


@content_of.register
def _(recording: Recording) -> Content:
    return Content(
        "What ran in which precision",
        facts_of(recording),
        [_COMPILED] if recording.met_compiled else [],
        [
            *([_violations(recording.violations())] if recording.plan else []),
            _by_op(recording.ops),
            _widened(recording.ops),
            _unruled(recording.unruled),
            quantized_table(recording.quantized),
            _casts(recording.casts),
            _repeats(recording.casts),
            _collectives(recording.collectives),
            _tensors(recording.tensors),
            _by_module(recording),
            _all_ops(recording.ops),
        ],
    )


_COMPILED = (
    "A backward pass ran that torch.compile compiled before the block, with its forward pass. Only the "
    "kernels that it calls through the dispatcher are recorded. To record everything, move the forward "
    "pass into the block."
)


def called(op: str, kernel: str) -> str:
    """Return the op's name, followed by its kernel's if that differs."""
    mine, theirs = short(op), short(kernel)
    same = mine.partition(".")[0].lstrip("_") == theirs.partition(".")[0].lstrip("_")
    return mine if same else f"{mine} ({theirs})"


def facts_of(recording: Recording) -> dict[str, str]:
    """Return the figures at the head of the report."""
    total = sum(recording.ops.values())
    by_result: Counter[str] = Counter()
    for key, calls in recording.ops.items():
        by_result[key.result] += calls
    shares = [f"{dtype} {as_share(n / total)}" for dtype, n in by_result.most_common()]
    counts = recording.casts.values()
    calls, nbytes = sum(c.calls for c in counts), sum(c.nbytes for c in counts)
    repeats, again = sum(c.repeats for c in counts), sum(c.repeated_bytes for c in counts)
    widened = sum(n for key, n in recording.ops.items() if key.widened)
    facts = {
        "ops": f"{as_count(total)}: {', '.join(shares)}" if total else "none",
        "casts": f"{as_count(calls)}, {as_bytes(nbytes)} written",
        "repeated casts": f"{as_count(repeats)}, {as_bytes(again)}, of tensors unchanged since the last cast",
        "widened to float32": f"{as_count(widened)} of these ops, though given low precision",
    }
    if recording.collectives:
        sent = recording.collectives.values()
        size = as_bytes(sum(c.nbytes for c in sent))
        facts["collectives"] = f"{as_count(sum(c.calls for c in sent))}, {size} from this rank"
    if recording.plan is not None:
        facts["forbidden by the plan"] = as_count(len(recording.violations()))
    return facts


def _by_op(ops: Counter[OpKey]) -> Table:
    counts: Counter[tuple[str, str, str]] = Counter()
    passes: defaultdict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)
    for key, calls in ops.items():
        group = called(key.op, key.kernel), key.dtypes, key.result
        counts[group] += calls
        passes[group][key.phase] += calls
    rows = [(*g, n, passes[g][FORWARD], passes[g][BACKWARD]) for g, n in counts.most_common()]
    about = "Calls of each op by the dtypes it ran in. Brackets show the kernel if its name differs."
    spec = columns("op, dtypes=ran in, result, calls, forward, backward")
    return Table("ops", "Ops by dtype", spec, rows, about, shown=30)


def _widened(ops: Counter[OpKey]) -> Table:
    calls: Counter[tuple[str, ...]] = Counter()
    kernels: defaultdict[tuple[str, ...], dict[str, None]] = defaultdict(dict)
    for key, n in ops.items():
        if key.widened:
            why = (key.rule, key.origin) if key.rule else (NO_RULE, _PROMOTED)
            group = str(key.place), short(key.op), key.given, *why
            calls[group] += n
            kernels[group][short(key.kernel)] = None
    rows: list[tuple[Value, ...]]
    rows = [(*g[:3], ", ".join(kernels[g]), n, *g[3:]) for g, n in calls.most_common()]
    spec = columns("module, op, given, kernels, calls, rule, origin=from")
    about = (
        "The op received low-precision tensors but its kernels returned float32: because of a policy rule, "
        "because other inputs were float32, or because the kernel itself returns float32 "
        "(lower_precision_fp)."
    )
    return Table("widened", "Ran in float32 though given low precision", spec, rows, about)


_PROMOTED = "type promotion or the program's own casts"


def _unruled(ops: Counter[OpKey]) -> Table:
    rows = [(str(k.place), k.phase, short(k.kernel), k.given, k.result, n) for k, n in ops.most_common()]
    spec = columns("module, phase=pass, op, given, result, calls")
    about = (
        "Matrix products and custom ops that ran in a region in the dtypes that they were given. "
        "policy.override({op: rule}) gives one a rule."
    )
    return Table("unruled", "Heavy ops without a rule", spec, rows, about)


def _casts(casts: dict[CastKey, CastCount]) -> Table:
    def group(key: CastKey) -> tuple[str, ...]:
        cause = short(key.cause) or ("the module" if key.rule else _own_cast(key))
        return (
            str(key.place),
            key.phase,
            kind_of(key),
            cause,
            f"{key.source} to {key.result}",
            key.rule,
            key.origin,
        )

    spec = columns("module, pass, of, cause=made for, dtypes, rule, origin=from, " + _COUNTS)
    about = "Conversions between floating-point dtypes, the op that needed each, and the rule behind it."
    return Table("casts", "Casts", spec, _summed(casts.items(), group), about)


def kind_of(key: CastKey) -> str:
    """Say what was cast."""
    return "weight" if key.weight else "activation" if key.phase == FORWARD else "gradient"


def _own_cast(key: CastKey) -> str:
    return "the gradient of a cast" if key.phase == BACKWARD else "the program's own code"


_COUNTS = "calls, bytes, repeats, repeated_bytes=repeated bytes"


def _repeats(casts: dict[CastKey, CastCount]) -> Table:
    repeated = [(k, c) for k, c in casts.items() if k.weight and c.repeats]
    about = "Unchanged weights that were cast again. amp_core.cached_casts(model) casts each once."
    rows = _summed(repeated, lambda key: (key.weight, key.result))
    return Table("repeats", "Weights cast again", columns("weight, dtype=to, " + _COUNTS), rows, about)


def _summed(items: Iterable[tuple[CastKey, CastCount]], group: Callable[[Any], tuple[str, ...]]) -> list[Any]:
    sums: defaultdict[tuple[str, ...], list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for key, count in items:
        parts = count.calls, count.nbytes, count.repeats, count.repeated_bytes
        sums[group(key)] = [a + b for a, b in zip(sums[group(key)], parts, strict=True)]
    rows = [(*key, *counts) for key, counts in sums.items()]
    return sorted(rows, key=lambda row: -row[-3])


def _violations(found: list[Violation]) -> Table:
    spec = columns("what, where, phase=pass, dtype, wanted=plan, entry, calls")
    rows = [(v.what, v.where, v.phase, v.dtype, v.wanted, v.entry, v.calls) for v in found]
    about = "What ran, or was kept, in another dtype than its entry of the plan allows."
    return Table("violations", "Forbidden by the plan", spec, rows, about, shown=50)


def _collectives(found: dict[CollectiveKey, CollectiveCount]) -> Table:
    rows = [(str(k.place), k.phase, k.kind, k.of, k.dtype, c.calls, c.nbytes) for k, c in found.items()]
    spec = columns("module, phase=pass, kind=collective, of, dtype, calls, bytes")
    about = (
        "What ranks exchanged, and the dtype that travels and is added up. Bytes are those that this rank "
        "contributed."
    )
    return Table("collectives", "Collectives", spec, rows, about)


def _tensors(found: dict[TensorKey, int]) -> Table:
    counts: Counter[tuple[str, ...]] = Counter()
    elements: Counter[tuple[str, ...]] = Counter()
    names: dict[tuple[str, ...], str] = {}
    for key, size in found.items():
        group = key.kind, key.state, key.dtype
        counts[group] += size > 0
        elements[group] += size
        names.setdefault(group, key.name)
    rows: list[tuple[Value, ...]]
    rows = [(*group, n, elements[group], names[group]) for group, n in counts.items()]
    spec = columns("kind, state, dtype, calls=tensors, elements, name=such as")
    about = "The dtypes in which parameters, buffers, gradients and the optimizer's state are kept."
    return Table("tensors", "Stored tensors", spec, rows, about)


def _by_module(recording: Recording) -> Table:
    ops: defaultdict[Place, Counter[str]] = defaultdict(Counter)
    casts: Counter[Place] = Counter()
    nbytes: Counter[Place] = Counter()
    for key, calls in recording.ops.items():
        ops[key.place][key.result] += calls
    for cast, count in recording.casts.items():
        casts[cast.place] += count.calls
        nbytes[cast.place] += count.nbytes
    rows: list[tuple[Value, ...]] = []
    for place in dict.fromkeys([*ops, *casts]):
        results = ", ".join(f"{dtype} {n}" for dtype, n in ops[place].most_common())
        rows.append((str(place), sum(ops[place].values()), results, casts[place], nbytes[place]))
    spec = columns("module, calls=ops, results=by dtype of the result, casts, bytes=bytes cast")
    return Table("modules", "By module", spec, rows, "In the order in which the modules first ran an op.")


def _all_ops(ops: Counter[OpKey]) -> Table:
    rows: list[tuple[Value, ...]] = [
        # the slice: given, dtypes, result
        (str(k.place), k.phase, short(k.op), short(k.kernel), *k[4:7], n, k.rule, k.origin)
        for k, n in ops.items()
    ]
    spec = columns("module, pass, op, kernel, given, dtypes=ran in, result, calls, rule, origin=from")
    return Table("calls", "Every op in every module", spec, rows, "In the order of first use.", shown=0)
