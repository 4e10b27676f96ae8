"""`watch`: how the ranges of a model's tensors move while it trains, and what a format would lose of them."""

from __future__ import annotations

import functools
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from amp_core._torch.autograd import current_autograd_node
from amp_core._torch.dynamo import never_compile
from amp_core._torch.modules import uncompiled
from amp_core._torch.tensors import numbers, part_of, version_of
from amp_core._torch.tracing import outside_graphs, untraced
from amp_core.common.arguments import as_whole, check_module, home_of
from amp_core.common.text import counted, dtype_name
from amp_core.debugging import saved
from amp_core.debugging.attached import Attached, Hook, repeats_forward
from amp_core.debugging.op_kinds import floats_in
from amp_core.debugging.ranges import KINDS, Entry, Format
from amp_core.debugging.report import Report
from amp_core.debugging.state_keeper import is_rehearsing
from amp_core.debugging.tap import measuring
from amp_core.debugging.values import extent, in_parts, is_readable
from amp_core.plugin import get_backend
from amp_core.regions.selecting import glob_of, listed, matches
from amp_core.scaling.plot import new_figure, plain


class Watch(Attached, Report):
    """The ranges that `watch` collects; `print` it, or save it with `to_json`, `to_html` and `save`.

    Attributes:
        model: the model, unless `load` read these ranges.
        step: the number of the model's current training step, from 0.
        entries: one `Entry` per tensor and watched step.
        format: the `Format` against which the report measures.
        environment: versions and devices of the run.
    """

    def __init__(self, model: nn.Module, every: int, dtype: Any, limit: int) -> None:
        check_module(model, "watch")
        if uncompiled(model) is not model:
            raise TypeError("watch() needs the model itself: pass the one that was given to torch.compile().")
        for name, module in model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                raise TypeError(
                    f"watch() cannot see into {name or 'the model'}, which TorchScript has compiled. Watch "
                    f"the model before torch.jit.script or torch.jit.trace."
                )
        self.entries: list[Entry] = []
        self.format = Format.of(_default_dtype(model) if dtype is None else dtype)
        self.environment = saved.environment()
        self._every, self._limit = as_whole(every, "every", 1), as_whole(limit, "limit", 1)
        self._hooks: list[Any] = []
        self._seen: Any = WeakIdKeyDictionary()
        self._in_step = False
        super().__init__(model)  # last: a watch that is refused must leave no hook
        self._removers.append(self._end)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_hooks": [], "_seen": None}

    @outside_graphs
    def _enter(self, *call: Any) -> None:
        self._in_step = False
        super()._enter(*call)

    def _after(self, args: Any, kwargs: Any, result: Any) -> None:  # noqa: ARG002
        self._in_step = False

    def _before(self) -> None:
        self._end()
        self._in_step = True
        if self.step % self._every:
            return
        for name, module in self.model.named_modules():
            self._hooks.append(module.register_forward_hook(Hook(functools.partial(self._of_module, name))))
        for name, parameter in self.model.named_parameters():
            self._add("weight", name, parameter)
            if parameter.requires_grad and is_readable(parameter):
                self._hooks.append(self._hook_gradient(name, parameter))

    def _end(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()
        self._seen.clear()

    @outside_graphs
    @measuring()
    def _of_module(self, name: str, _module: nn.Module, _args: Any, result: Any) -> None:
        if not self._hooks or is_rehearsing() or repeats_forward():  # compiled code keeps removed hooks
            return
        if not (self._in_step or torch.is_grad_enabled()):  # an evaluation after the step
            return
        for tensor in floats_in(result)[:1]:
            version = 0 if tensor.is_inference() else version_of(tensor)
            if self._seen.get(tensor) != version:  # else it is the result of an inner module, as that left it
                self._seen[tensor] = version
                if self._in_step or current_autograd_node() is None:  # else a checkpoint repeats it
                    self._add("activation", name, tensor)
                if tensor.requires_grad:
                    tensor.register_hook(self._of_result(name))  # type: ignore[no-untyped-call]

    def _of_result(self, name: str) -> Callable[[Tensor | None], None]:
        def add(gradient: Tensor | None) -> None:
            if gradient is not None:
                self._add("gradient", name, gradient)

        never_compile(add)
        return add

    @measuring()
    def _hook_gradient(self, name: str, parameter: Tensor) -> Any:
        # The garbage collector does not see what a parameter's hooks refer to.
        ref = weakref.ref(self)

        def add(gradient: Tensor | None) -> None:
            watch = ref()
            if watch is not None and gradient is not None and not is_rehearsing(watch._thread):
                watch._add("weight gradient", name, gradient)

        if not parameter.is_leaf:  # functional_call can set such parameters
            never_compile(add)
            return parameter.register_hook(add)  # type: ignore[no-untyped-call]

        def written(parameter: Tensor) -> None:
            add(parameter.grad)

        never_compile(written)
        return parameter.register_post_accumulate_grad_hook(written)  # type: ignore[no-untyped-call]

    @measuring()
    @torch.no_grad()
    def _add(self, kind: str, name: str, tensor: Tensor) -> None:
        tensor = part_of(tensor)
        if not is_readable(tensor) or not tensor.numel():
            return
        flat = in_parts(tensor.detach()).reshape(-1)
        largest, _ = extent(flat)
        values = flat[:: -(-flat.numel() // self._limit)]
        values = values if values.dtype is torch.float64 else values.float()
        finite = values[values.isfinite()]
        exponents, counts = torch.unique(torch.frexp(finite[finite != 0])[1], return_counts=True)
        pairs = zip(numbers(exponents - 1), numbers(counts), strict=True)
        zeros, not_finite = int((values == 0).sum()), values.numel() - finite.numel()
        self.entries.append(
            Entry(self.step, kind, name, dtype_name(tensor.dtype), dict(pairs), zeros, not_finite, largest)
        )

    def __repr__(self) -> str:
        steps = counted(len({e.step for e in self.entries}), "step")
        return f"<Watch of {steps}, {counted(len(self.entries), 'range')}>"

    def measured_in(self, format: torch.dtype | tuple[int, int]) -> Watch:  # noqa: A002
        """Return the same ranges, measured against another format.

        Args:
            format: a dtype, or the bits of the exponent and of the mantissa, such as ``(4, 3)``.

        Raises:
            TypeError: `format` is neither.
            ValueError: it has no such numbers of bits.
        """
        other = Watch.__new__(Watch)
        other.__dict__.update(self.__dict__, format=Format.of(format), _removers=[])
        return other

    def diff(self, other: Watch) -> WatchDiff:
        """Return the tensors whose ranges differ in `other`, perhaps from another device or version.

        Raises:
            TypeError: `other` is no `Watch`.
        """
        return WatchDiff(self, other)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the ranges to `path`, for `load`.

        Raises:
            OSError: the file cannot be written.
            TypeError: `path` is no path.
            ValueError: it is empty.
        """
        entries = [asdict(entry) for entry in self.entries]
        saved.write(
            path, "watch", {"of": asdict(self.format), "environment": self.environment, "entries": entries}
        )

    @staticmethod
    def load(path: str | PathLike[str]) -> Watch:
        """Read a file that `save` wrote.

        Raises:
            AmpError: it is not such a file, or is damaged.
            OSError: it cannot be read.
        """
        loaded = Watch.__new__(Watch)
        loaded._removers = []
        with saved.reading(path, "watch") as data:
            loaded.environment, loaded.format = data["environment"], Format(**data["of"])
            loaded.entries = [
                Entry(**{**entry, "exponents": {int(e): n for e, n in entry["exponents"].items()}})
                for entry in data["entries"]
            ]
            loaded.step = max((entry.step for entry in loaded.entries), default=-1)
        return loaded

    def save_picture(self, path: str | PathLike[str], names: str = "**") -> None:
        """Draw the distribution of exponents over the steps, with the limits of the format.

        Args:
            path: the file; its suffix selects the format.
            names: a glob over the names of modules and parameters: ``*`` matches one part, ``**`` any number.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: no step has been watched, or `names` matches no tensor with values to draw.
        """
        drawn = [e for e in self.entries if e.exponents]
        chosen = [e for e in drawn if matches(e.name, names)]
        if not drawn:
            raise ValueError("There is nothing to draw: no step has been watched yet.")
        if not chosen:
            known = sorted({glob_of(entry.name) for entry in drawn})
            raise ValueError(f"{names!r} matches none of the watched tensors; {listed(known)}.")
        kinds = [kind for kind in KINDS if any(e.kind == kind for e in chosen)]
        figure = new_figure(8, 2.2 * len(kinds))
        panels = figure.subplots(len(kinds), 1, sharex=True, squeeze=False)[:, 0]
        for axes, kind in zip(panels, kinds, strict=True):
            points = [*_density([e for e in chosen if e.kind == kind])]
            steps, exponents, shares = zip(*points, strict=True)
            axes.scatter(steps, exponents, c=shares, cmap="viridis", marker="s", s=14, vmin=0)
            for value in (self.format.subnormal, self.format.largest):
                axes.axhline(value, color="#D55E00", linewidth=1)
            axes.set_ylabel("exponent of 2")
            axes.set_title(f"{kind}s; the lines are the limits of {self.format.name}", loc="left", fontsize=9)
            plain(axes)
        panels[-1].set_xlabel("step")
        figure.savefig(path)


def _density(entries: list[Entry]) -> Iterator[tuple[int, int, float]]:
    """Yield (step, exponent, share of the step's values)."""
    counts: defaultdict[int, Counter[int]] = defaultdict(Counter)
    for entry in entries:
        counts[entry.step].update(entry.exponents)
    for number, step in counts.items():
        for exponent, n in step.items():
            yield number, exponent, n / step.total()


class WatchDiff(Report):
    """The differences between two watched runs.

    Attributes:
        here: the first run.
        there: the second run.
    """

    def __init__(self, here: Watch, there: Watch) -> None:
        if not isinstance(there, Watch):
            raise TypeError(f"diff() compares with another Watch, not with {there!r}.")
        self.here, self.there = here, there


def _default_dtype(model: nn.Module) -> torch.dtype:
    weight = next(iter(model.parameters()), None)
    return get_backend("cpu" if weight is None else home_of(weight)).default_dtype()


@untraced
def watch(
    model: nn.Module,
    *,
    every: int = 100,
    format: torch.dtype | tuple[int, int] | None = None,  # noqa: A002
    limit: int = 65536,
) -> Watch:
    """Collect the ranges of a model's tensors in every `every`-th training step.

    It measures the results of modules and their gradients, the parameters and theirs: how many values have
    each exponent of 2. The report says what share of them a format would lose to underflow and saturation.
    Gradients are measured as they flow, with the loss scale; of DTensors, this rank's part. The watch stays
    on the model until ``remove()``, or to the end of a ``with`` block; other steps only call one hook. Its
    memory grows by an `Entry` per tensor and watched step: in a long run, save them and clear `entries`.

    Args:
        model: the model, as it is called in training. It may be compiled by `torch.compile`, as a
            whole or in parts: each module then breaks the graph.
        every: the number of training steps from one watched step to the next.
        format: the format to measure against: a dtype, or the bits of exponent and mantissa, such as
            ``(4, 3)``; by default the low-precision dtype of the model's device. `Watch.measured_in`
            measures the same ranges against another.
        limit: the maximum number of evenly spaced values to count per tensor.

    Returns:
        A `Watch` to print, save, draw or compare.

    Raises:
        TypeError: `model` is not a module, is the result of `torch.compile`, or has parts that TorchScript
            has compiled; or `format` is no format.
        ValueError: `every` or `limit` is below 1, or `format` has no such numbers of bits.

    Example:
        >>> import torch, amp_core
        >>> model = torch.nn.Linear(2, 2)
        >>> with amp_core.watch(model, every=1, format=torch.float16) as ranges:
        ...     model(torch.ones(1, 2)).sum().backward()
        >>> ranges
        <Watch of 1 step, 6 ranges>
    """
    return Watch(model, every, format, limit)
