"""`record`: which op ran in which precision, and why."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary
from typing_extensions import Self

from amp_core._torch.dispatcher import Overload, dispatcher_name
from amp_core.debugging.places import Place, Places
from amp_core.debugging.report import Report
from amp_core.debugging.tap import BACKWARD, Frame, Tap, Where, dtypes_of, is_low
from amp_core.errors import AmpError

_UNRULED = ("", "")


class OpKey(NamedTuple):
    """What calls of an op have in common to be counted together.

    Attributes:
        phase: ``forward`` or ``backward``.
        place: the model and module.
        op: the op as autocast saw it, such as ``aten::linear.default``; else the same as `kernel`.
        kernel: the op that ran, such as ``aten::addmm``.
        given: the floating-point dtypes that `op` was given, before casts.
        dtypes: the floating-point dtypes that `kernel` was given.
        result: the dtype that it returned.
        rule: of the policy, which applied to `op`; empty if none did.
        origin: where that rule comes from.
    """

    phase: str
    place: Place
    op: str
    kernel: str
    given: str
    dtypes: str
    result: str
    rule: str
    origin: str

    @property
    def widened(self) -> bool:
        """Whether the op ran in float32 although something it was given was in low precision."""
        return any(is_low(_dtype(name)) for name in self.given.split("+")) and self.result == "float32"


class CastKey(NamedTuple):
    """What casts have in common to be counted together; `cause` is the op they were made for."""

    phase: str
    place: Place
    cause: str
    source: str
    result: str
    weight: str
    rule: str
    origin: str


@dataclass
class CastCount:
    """How many casts, the bytes that they wrote; the same of tensors cast before and unchanged since."""

    calls: int = 0
    nbytes: int = 0
    repeats: int = 0
    repeated_bytes: int = 0


class Recording(Report):
    """What ran in a ``with amp_core.record()`` block; `print` it, or save it with `to_json` and `to_html`.

    Attributes:
        ops: how often each op ran, by `OpKey`.
        casts: the conversions between floating-point dtypes, by `CastKey`.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        Places.check(model)
        self.ops: Counter[OpKey] = Counter()
        self.casts: defaultdict[CastKey, CastCount] = defaultdict(CastCount)
        self._model = model
        self._seen: Any = WeakIdKeyDictionary()
        self._tap: Tap | None = None
        self._met_compiled = False

    def __enter__(self) -> Self:
        if self._tap is not None:
            raise AmpError("This recording is on already; make one with amp_core.record() for each block.")
        self._tap = Tap(self, self._model)
        self._tap.__enter__()
        self._hook = register_optimizer_step_post_hook(self._after_step)
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._tap is not None, "left without being entered"
        self._hook.remove()
        self._tap.__exit__(*exc)
        self._met_compiled |= self._tap.met_compiled
        self._tap = None
        self._seen.clear()

    def diff(self, other: Recording) -> RecordingDiff:
        """Return the ops that ran otherwise in `other`: in other dtypes, or another number of times."""
        return RecordingDiff(self, other)

    @property
    def met_compiled(self) -> bool:
        """Whether a backward pass ran that had been compiled before the block."""
        return self._met_compiled

    def __repr__(self) -> str:
        casts = sum(c.calls for c in self.casts.values())
        return f"<Recording of {sum(self.ops.values())} ops and {casts} casts>"

    # What the tap tells.

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
            _joined(ran_in),
            _short(outputs[0].dtype),
            *(where.cause or _UNRULED),
        )
        self.ops[key] += 1

    def cast(self, source: Tensor, result: Tensor, where: Where) -> None:
        """Count one cast."""
        cause = where.frames[0].op if where.frames else ""
        name = self._weight_name(source)
        dtypes = _short(source.dtype), _short(result.dtype)
        count = self.casts[
            CastKey(where.phase, where.place, cause, *dtypes, name, *(where.cause or _UNRULED))
        ]
        nbytes = result.numel() * result.element_size()
        count.calls += 1
        count.nbytes += nbytes
        if where.phase != BACKWARD and self._is_repeat(source, result.dtype):
            count.repeats += 1
            count.repeated_bytes += nbytes

    def moved(self, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        """Do nothing: what computes is what is counted."""

    def framed(self, frame: Frame, inputs: list[Tensor], outputs: list[Tensor], where: Where) -> None:
        """Do nothing: kernels are what is counted."""

    def _weight_name(self, tensor: Tensor) -> str:
        assert self._tap is not None
        name = self._tap.places.of_parameter(tensor)[1]
        return name or ("(a parameter)" if isinstance(tensor, nn.Parameter) else "")

    def _is_repeat(self, source: Tensor, dtype: torch.dtype) -> bool:
        version = 0 if source.is_inference() else source._version
        known = self._seen.setdefault(source, {})
        repeat = known.get(dtype) == version
        known[dtype] = version
        return bool(repeat)

    def _after_step(self, _optimizer: Any, _args: Any, _kwargs: Any) -> None:
        self._seen.clear()  # fused optimizers change weights without a new version


def record(model: nn.Module | None = None) -> Recording:
    """Record which op runs in which precision, in the block ``with amp_core.record() as r:``.

    Counted are, per op, dtypes and module: calls; casts, their bytes, and repeats (a tensor cast to a
    dtype that it was cast to before, unchanged since); the policy rule that caused each; ops that ran in
    float32 though they were given low precision. The backward pass counts too, for the modules that made its
    nodes. Views, copies and ops without floating-point tensors do not.

    The thread that enters is recorded, with the backward passes it starts. Every op in the block goes through
    Python; when no recording is on there is no cost. What `torch.compile` has compiled runs eagerly in the
    block, in all threads (`torch.compiler.set_stance`), and compiled again after it.

    Args:
        model: names the modules as its ``named_modules()`` does; by default, the outermost module
            that is called does.

    Returns:
        A context manager that is the report: `Recording`.

    Raises:
        TypeError: `model` is no module.
    """
    return Recording(model)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name)
    return found


def _joined(dtypes: tuple[torch.dtype, ...]) -> str:
    return "+".join(map(_short, dtypes))


class RecordingDiff(Report):
    """Where two recordings differ.

    Attributes:
        here: the first.
        there: the second.
    """

    def __init__(self, here: Recording, there: Recording) -> None:
        self.here, self.there = here, there
