"""`record`: record which op ran in which precision, and why."""

from __future__ import annotations

from collections import Counter, defaultdict
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Self

from amp_core._torch.dispatcher import Overload, dispatcher_name
from amp_core._torch.list_writes import see_list_writes
from amp_core._torch.tensors import identity_of, part_of, version_of
from amp_core._torch.tracing import outside_graphs
from amp_core.common.identity import WeakIdentityMapping
from amp_core.common.optimizers import watch_steps
from amp_core.common.text import counted, dtype_name
from amp_core.debugging import saved, stored_dtypes
from amp_core.debugging.collectives import CollectiveCount, CollectiveKey
from amp_core.debugging.op_counts import CastCount, CastKey, OpKey
from amp_core.debugging.op_kinds import dtypes_of
from amp_core.debugging.places import Places
from amp_core.debugging.quantized_counts import QuantizedCount, QuantizedCounts, QuantizedKey
from amp_core.debugging.report import Report
from amp_core.debugging.sink import BACKWARD, Sink, Where
from amp_core.debugging.stored_dtypes import TensorKey
from amp_core.debugging.tap import Tap
from amp_core.debugging.violations import Violation, violations
from amp_core.dispatch.quantized_products import ScaledProduct
from amp_core.errors import AmpError
from amp_core.policy.coverage import REDUCTION, heavy_ops
from amp_core.regions.plan import PrecisionPlan

_UNRULED = ("", "")


class Recording(Report, Sink):
    """A record of a ``with amp_core.record()`` block; `print` it, or save it with `to_json` and `to_html`.

    Attributes:
        ops: the number of calls of each op, by `OpKey`.
        casts: the conversions between floating-point dtypes, by `CastKey`.
        environment: versions and devices of the run.
        unruled: the matrix products and custom ops of `ops` that ran in a region without a rule.
        collectives: what ranks exchanged, by `CollectiveKey`.
        tensors: the number of elements of each parameter and buffer, and of the gradients and optimizer
            state that there were in a step or at the end of the block, by `TensorKey`. Of a tied parameter
            or buffer, all names but the first have 0 elements.
        plan: the plan that the report checks.
        met_compiled: whether a backward pass ran that was compiled before the block.
    """

    def __init__(self, model: nn.Module | None = None, plan: PrecisionPlan | None = None) -> None:
        Places.check(model)
        _check_plan(plan)
        self.plan = plan
        self.ops: Counter[OpKey] = Counter()
        self.casts: defaultdict[CastKey, CastCount] = defaultdict(CastCount)
        self.environment = saved.environment()
        self.unruled: Counter[OpKey] = Counter()
        self.collectives: defaultdict[CollectiveKey, CollectiveCount] = defaultdict(CollectiveCount)
        self.tensors: dict[TensorKey, int] = {}
        self._quantized = QuantizedCounts()
        self._model = model
        # Weak references to weights and gradients would forbid torch.utils.swap_tensors.
        self._cast_versions: WeakIdentityMapping[torch.UntypedStorage, Any] = WeakIdentityMapping()
        self._weight_versions: dict[Tensor, Any] = {}
        self._tap: Tap | None = None
        self.met_compiled = False

    def __enter__(self) -> Self:
        if self._tap is not None:
            raise AmpError("This recording is already active; call amp_core.record() for each block.")
        self._heavy = {op for op, kind in heavy_ops().items() if kind != REDUCTION}
        self._tap = Tap(self, self._model, self._heavy)
        self._tap.__enter__()
        see_list_writes()
        places = self._tap.places  # a step of another thread may end after the block
        self._end_watching = watch_steps(
            lambda optimizer: self._after_step(optimizer, places),
            after=True,
            is_ours=lambda p: bool(places.of_parameter(p)[1]),
        )
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._tap is not None, "__exit__ without __enter__"
        self._end_watching()
        del self._end_watching  # it holds the model
        self._tap.__exit__(*exc)
        self.met_compiled |= self._tap.met_compiled
        models = self._tap.places.models
        self.tensors.update(stored_dtypes.of_models(models if self._model is None else models[:1]))
        self._tap = None
        self._forget_versions()

    def __getstate__(self) -> dict[str, Any]:
        self._quantized.read()  # so that the copy never has to wait for the device
        findings = {name: value for name, value in self.__dict__.items() if not name.startswith("_")}
        return {**findings, "_quantized": self._quantized}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(Recording().__dict__, **state)  # a copy has only the findings: no model, no tap

    def diff(self, other: Recording) -> RecordingDiff:
        """Return the ops, casts and collectives of other dtypes, or of another number, in `other`.

        `other` may be loaded: from another process, device or version.

        Raises:
            TypeError: `other` is no `Recording`.
        """
        return RecordingDiff(self, other)

    def violations(self, plan: PrecisionPlan | None = None) -> list[Violation]:
        """Return what ran, or was kept, in a dtype that `plan` forbids; by default the plan of `record`.

        A dtype is forbidden if it is narrower than the plan's, or another one of the same width. The plan's
        `reduce_dtype` holds for reductions of the weights' gradients over any dimension of the mesh.

        Raises:
            AmpError: there is no plan.
            TypeError: `plan` is no `PrecisionPlan`.
        """
        _check_plan(plan)
        plan = self.plan if plan is None else plan
        if plan is None:
            raise AmpError("There is no plan to check: pass one here, or to amp_core.record(plan=...).")
        return violations(self.collectives, self.tensors, plan)

    def check(self, plan: PrecisionPlan | None = None) -> None:
        """Raise if anything ran, or was kept, in a dtype that `plan` forbids.

        Raises:
            AmpError: `violations` returns some; the message lists them. Or there is no plan.
            TypeError: `plan` is no `PrecisionPlan`.
        """
        found = self.violations(plan)
        if found:
            lines = "".join(f"\n  {each}" for each in found)
            raise AmpError(f"The run did not keep to its plan:{lines}")

    def save(self, path: str | PathLike[str]) -> None:
        """Write the recording to `path`, for `load`.

        Raises:
            OSError: the file cannot be written.
            TypeError: `path` is no path.
            ValueError: it is empty.
        """
        counts = ("ops", "unruled", "casts", "quantized", "collectives", "tensors")
        data = {name: saved.as_lists(getattr(self, name)) for name in counts}
        facts = {"environment": self.environment, "met_compiled": self.met_compiled}
        saved.write(path, "recording", {**facts, **data})

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Self:
        """Read a file that `save` wrote.

        Raises:
            AmpError: it is not such a file, or is damaged.
            OSError: it cannot be read.
        """
        recording = cls()
        with saved.reading(path, "recording") as data:
            recording.ops.update(saved.counted(OpKey, data["ops"]))
            recording.unruled.update(saved.counted(OpKey, data["unruled"]))
            recording.casts.update(saved.counted(CastKey, data["casts"], CastCount))
            quantized = saved.counted(QuantizedKey, data.get("quantized", []), QuantizedCount)
            recording._quantized = QuantizedCounts(quantized)
            collectives = saved.counted(CollectiveKey, data.get("collectives", []), CollectiveCount)
            recording.collectives.update(collectives)
            recording.tensors = {TensorKey(*key): elements for *key, elements in data.get("tensors", [])}
            recording.met_compiled, recording.environment = data["met_compiled"], data["environment"]
        return recording

    @property
    def quantized(self) -> dict[QuantizedKey, QuantizedCount]:
        """The operands that recipes quantised, by `QuantizedKey`; reading it waits for the device."""
        return self._quantized.read()

    def __repr__(self) -> str:
        casts = sum(c.calls for c in self.casts.values())
        return f"<Recording of {counted(sum(self.ops.values()), 'op')} and {counted(casts, 'cast')}>"

    # Callbacks of the tap.

    def ran(self, op: Overload, inputs: list[Tensor], outputs: list[Tensor], where: Where) -> None:
        """Count one op."""
        kernel = dispatcher_name(op)
        frame = where.frames[0] if where.frames else None
        ran_in = dtypes_of(inputs)
        key = OpKey(
            where.phase,
            where.place,
            kernel if frame is None else frame.op,
            kernel,
            _joined(ran_in if frame is None else frame.given or ran_in),
            where.formats or _joined(ran_in),
            dtype_name(outputs[0].dtype),
            *(where.cause or _UNRULED),
        )
        self.ops[key] += 1
        if not key.rule and where.frames and where.frames[-1].op in self._heavy:
            self.unruled[key] += 1

    def cast(self, source: Tensor, result: Tensor, where: Where) -> None:
        """Count one cast."""
        assert self._tap is not None
        cause = where.frames[0].op if where.frames else ""
        name = _name_in(self._tap.places, source)
        dtypes = dtype_name(source.dtype), dtype_name(result.dtype)
        count = self.casts[
            CastKey(where.phase, where.place, cause, *dtypes, name, *(where.cause or _UNRULED))
        ]
        nbytes = result.numel() * result.element_size()
        count.calls += 1
        count.nbytes += nbytes
        if where.phase != BACKWARD and self._is_repeat(source, result.dtype):
            count.repeats += 1
            count.repeated_bytes += nbytes

    def multiplied(self, product: ScaledProduct, where: Where) -> None:
        """Count the operands that a recipe quantised."""
        self._quantized.add(product, where)

    def communicated(
        self, kind: str, of: str, inputs: list[Tensor], outputs: list[Tensor], where: Where
    ) -> None:
        """Count a collective, by dtype."""
        del outputs
        for dtype in {tensor.dtype for tensor in inputs}:
            count = self.collectives[CollectiveKey(where.phase, where.place, kind, of, dtype_name(dtype))]
            count.calls += 1
            count.nbytes += sum(t.numel() * t.element_size() for t in inputs if t.dtype is dtype)

    def _is_repeat(self, source: Tensor, dtype: torch.dtype) -> bool:
        known: dict[Any, int]
        if isinstance(source, nn.Parameter):
            known, key = self._weight_versions.setdefault(source, {}), (identity_of(source), dtype)
        elif source.layout in (torch.strided, torch.jagged):
            part = source.values() if source.layout is torch.jagged else part_of(source)
            known = self._cast_versions.setdefault(part.untyped_storage(), {})
            key = (part.dtype, dtype, *_extent(part))
        else:
            return False
        version = 0 if source.is_inference() else version_of(source)
        repeat = known.get(key) == version
        known[key] = version
        return repeat

    @outside_graphs
    def _after_step(self, optimizer: Any, places: Places) -> None:
        numbers = {id(model): number for number, model in enumerate(places.models)}

        def name_of(parameter: Tensor) -> tuple[str, int]:
            return _name_in(places, parameter), numbers.get(id(places.model_of(parameter)), 0)

        self.tensors.update(stored_dtypes.of_step(optimizer, name_of))
        self._forget_versions()  # fused optimizers change weights without a version bump

    def _forget_versions(self) -> None:
        self._cast_versions.clear()
        self._weight_versions.clear()


def record(model: nn.Module | None = None, *, plan: PrecisionPlan | None = None) -> Recording:
    """Record which op runs in which precision in a ``with amp_core.record() as r:`` block.

    For each op, dtypes and module, it counts calls and casts, with the policy rule behind each; the bytes of
    casts, and repeats (casts of an unchanged tensor to the same dtype); and ops that ran in float32 although
    they received low precision. Ops of the backward pass count towards the modules that created its nodes.
    Views and copies are not counted, nor ops without a floating-point argument or result, such as those on
    complex numbers, comparisons and `argmax`. It also counts what ranks exchange, by dtype, and notes the
    dtypes of parameters, buffers, gradients and optimizer state.

    It records the thread that enters the block and the backward passes that it starts; of other threads,
    only steps of optimizers that have parameters of the recorded model. Every op in the block goes through
    Python; after it, only leaving a region takes longer, by half a µs. Functions compiled by `torch.compile`
    run eagerly during the block, in all threads (`torch.compiler.set_stance`).

    Args:
        model: the model whose ``named_modules()`` names the modules; by default, the outermost
            called module.
        plan: a plan that the run should keep to: the report lists what it forbids.

    Returns:
        A `Recording`: the context manager and report.

    Raises:
        TypeError: `model` is not a module, or `plan` not a plan.

    Example::

        with record(model) as recording, autocast("cpu"):
            loss_fn(model(inputs), targets).backward()
        print(recording)
        recording.to_html("precision.html")
    """
    return Recording(model, plan)


def _name_in(places: Places, tensor: Tensor) -> str:
    return places.of_parameter(tensor)[1] or ("(a parameter)" if isinstance(tensor, nn.Parameter) else "")


def _extent(tensor: Tensor) -> tuple[Any, ...]:
    return () if tensor.is_nested else (tensor.storage_offset(), tensor.shape, tensor.stride())


def _joined(dtypes: tuple[torch.dtype, ...]) -> str:
    return "+".join(map(dtype_name, dtypes))


def _check_plan(plan: object) -> None:
    if not isinstance(plan, PrecisionPlan | None):
        raise TypeError(f"plan= must be an amp_core.PrecisionPlan, not {type(plan).__name__}.")


class RecordingDiff(Report):
    """The differences between two recordings.

    Attributes:
        here: the first recording.
        there: the second recording.
    """

    def __init__(self, here: Recording, there: Recording) -> None:
        if not isinstance(there, Recording):
            raise TypeError(f"diff() compares with another Recording, not with {there!r}.")
        self.here, self.there = here, there
