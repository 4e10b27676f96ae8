"""Apply each rule to the arguments of a call: the Python counterpart of torch's native autocast kernels.

`make_runner` inspects an op's schema once and returns a function that casts and runs the op, so no call
inspects the schema again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from amp_core._torch.dispatcher import (
    Overload,
    arguments,
    autocast_key,
    dispatcher_name,
    entry_of,
    is_mutable,
    redispatch_below,
    run_with_numbers,
    short_name,
)
from amp_core._torch.op_kernels import dispatch_key, is_excluded, set_excluded
from amp_core.common.cast import to_dtype
from amp_core.dispatch.low_in_fp32_out import composed
from amp_core.dispatch.target_dtype import Args, Kwargs, TargetDtype, argument_tensors, eligible, target_dtype
from amp_core.dispatch.weight_casts import kept_cast
from amp_core.policy import names
from amp_core.policy import rules as r
from amp_core.policy.recipes import RecipeRule

Runner = Callable[[Any, Args, Kwargs], Any]
"""(key set of the call, positional arguments, keyword arguments) -> the op's result."""

_BANNED = (
    "{name} is banned by the op policy. Run it where autocast is off, or give it another rule by "
    "OpPolicy.override()."
)
_BANNED_BCE = (
    "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.\n"
    "Many models use a sigmoid layer right before the binary cross entropy layer.\n"
    "In this case, combine the two layers using torch.nn.functional.binary_cross_entropy_with_logits\n"
    "or torch.nn.BCEWithLogitsLoss.  binary_cross_entropy_with_logits and BCEWithLogits are\n"
    "safe to autocast."
)


def once_defined(name: str, make: Callable[[Overload], Callable[..., Any]]) -> Callable[..., Any]:
    """Return ``make(overload)`` of the op `name`, made at the first call if the op is not defined yet."""
    overload = names.find(name)
    if overload is not None:
        return make(overload)

    @functools.cache
    def made() -> Callable[..., Any]:
        defined = names.find(name)
        assert defined is not None, f"{name} was called but is not defined"
        return make(defined)

    def call(*args: Any, **kwargs: Any) -> Any:
        return made()(*args, **kwargs)

    return call


def make_runner(op: Overload, rule: str, device_type: str) -> Runner:
    """Return the function that runs `op` under `rule` on `device_type`."""
    if rule == r.BANNED:
        return _banned(op)
    if rule == r.UNCHANGED:
        return _unchanged(op, device_type)
    return _without_autocast(_make(op, rule, device_type), device_type)


def _make(op: Overload, rule: str, device_type: str) -> Runner:
    call = _caller(op)
    if isinstance(rule, RecipeRule):
        from amp_core.dispatch.scaled_products import scaled

        low = target_dtype(r.LOWER_PRECISION_FP, op, device_type)
        return scaled(op, rule, call, _casting(op, _arguments, low, device_type), device_type)
    if rule in _SPECIAL:
        return _SPECIAL[rule](op, call, device_type)
    target = target_dtype(rule, op, device_type)
    first_stays = rule == r.MATCH_DESTINATION
    if _writes(op):
        return _writing_back(op, call, target, device_type, first_stays)
    return _casting(op, call, target, device_type, first_stays)


def _without_autocast(run: Runner, device_type: str) -> Runner:
    """Return a runner whose op, the casts before it, and the ops that it calls in turn have no rules."""
    key = dispatch_key(autocast_key(device_type))

    def run_below(keyset: Any, args: Args, kwargs: Kwargs) -> Any:
        before = is_excluded(key)
        try:
            set_excluded(key, True)
            return run(keyset, args, kwargs)
        finally:
            set_excluded(key, before)

    return run_below


def _caller(op: Overload) -> Callable[..., Any]:
    """Return a function that runs `op`, also with a number in place of a tensor."""
    enter = entry_of(op)

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return enter(*args, **kwargs)
        except (RuntimeError, TypeError):
            return run_with_numbers(op, args, kwargs)

    return call


def _arguments(*args: Any, **kwargs: Any) -> tuple[Args, Kwargs]:
    return args, kwargs


def _banned(op: Overload) -> Runner:
    name = dispatcher_name(op)
    text = _BANNED_BCE if name == "aten::binary_cross_entropy" else _BANNED.format(name=name)

    def run(_keyset: Any, _args: Args, _kwargs: Kwargs) -> Any:
        raise RuntimeError(text)

    return run


def _unchanged(op: Overload, device_type: str) -> Runner:
    below = redispatch_below(op, autocast_key(device_type))

    def run(keyset: Any, args: Args, kwargs: Kwargs) -> Any:
        return below(keyset, *args, **kwargs)

    return run


def _casting(
    op: Overload, call: Callable[..., Any], target: TargetDtype, device_type: str, first_stays: bool = False
) -> Runner:
    tensors = [i for i, a in enumerate(arguments(op)) if "Tensor" in str(a.real_type) and not a.kwarg_only]
    positions = tuple(i for i in tensors if i > 0 or not first_stays)

    def run(_keyset: Any, args: Args, kwargs: Kwargs) -> Any:
        dtype = target(args, kwargs)
        if dtype is None:
            return call(*args, **kwargs)
        new, given = list(args), len(args)
        for i in positions:
            if i < given and getattr(new[i], "dtype", None) is not dtype:
                new[i] = cast_to(new[i], dtype, device_type)
        if kwargs:
            kwargs = {k: cast_to(v, dtype, device_type) for k, v in kwargs.items()}
        return call(*new, **kwargs)

    return run


def cast_to(value: Any, dtype: torch.dtype, device_type: str, *, keep: bool = True) -> Any:
    """Cast the eligible tensors in `value`; `keep` allows the casts of weights to be kept."""
    if isinstance(value, torch.Tensor):
        if value.dtype is dtype or not eligible(value, device_type):
            return value
        kept = kept_cast(value, dtype, device_type) if keep else None
        return to_dtype(value, dtype) if kept is None else kept
    if isinstance(value, (list, tuple)) and any(isinstance(item, torch.Tensor) for item in value):
        return [cast_to(item, dtype, device_type, keep=keep) for item in value]
    return value


_STATISTICS = frozenset({"running_mean", "running_var"})


def _writes(op: Overload) -> bool:
    return is_mutable(op) or _statistics_flag(op) is not None


def _statistics_flag(op: Overload) -> str | None:
    """Return the argument by which `op` updates running statistics, which few schemas say are written."""
    names = {a.name for a in arguments(op)}
    updates = names >= _STATISTICS and not short_name(op).endswith("_functional")  # those return new ones
    flags = names & {"training", "use_input_stats"} if updates else ()
    return next(iter(flags), None)


def _writing_back(
    op: Overload,
    call: Callable[..., Any],
    target: TargetDtype,
    device_type: str,
    first_stays: bool = False,
    rounding: TargetDtype | None = None,
) -> Runner:
    """Return a runner for an op that writes to its arguments: it writes to casts, then copies them back.

    torch's own rules lose the write (pytorch#65788). `rounding` says to which dtype to cast before.
    """
    parameters = [a.name for a in arguments(op)]
    written = {a.name for a in arguments(op) if a.alias_info is not None and a.alias_info.is_write}
    flag = _statistics_flag(op)
    statistics = frozenset() if flag is None else _STATISTICS
    kept = parameters[0] if first_stays else None

    def cast_all(values: Kwargs, dtype: torch.dtype) -> Kwargs:
        # Bypass the cache: the op must not write to a cached cast. A tensor that is given twice has one cast.
        given = argument_tensors(v for n, v in values.items() if n != kept)
        casts = {id(each): cast_to(each, dtype, device_type, keep=False) for each in given}

        def cast(value: Any) -> Any:
            return [*map(cast, value)] if isinstance(value, (list, tuple)) else casts.get(id(value), value)

        return {n: v if n == kept else cast(v) for n, v in values.items()}

    def run(_keyset: Any, args: Args, kwargs: Kwargs) -> Any:
        dtype = target(args, kwargs)
        given = {**dict(zip(parameters, args, strict=False)), **kwargs}
        if dtype is None:
            return call(*args, **kwargs)
        rounded = None if rounding is None else rounding(args, kwargs)
        cast = cast_all(given if rounded is None else cast_all(given, rounded), dtype)
        result = call(*(cast[n] for n in parameters[: len(args)]), **{n: cast[n] for n in kwargs})
        updates = flag is None or given[flag]
        now = written | statistics if updates else written - statistics
        return _put_back(result, [(given[n], cast[n]) for n in given if n in now])

    return run


def _put_back(result: Any, pairs: list[tuple[Any, Any]]) -> Any:
    originals: dict[int, torch.Tensor] = {}
    for given, cast in pairs:
        for mine, theirs in zip(argument_tensors([given]), argument_tensors([cast]), strict=True):
            if theirs is not mine:
                if not mine.is_nested and mine.shape != theirs.shape:  # the op resized ``out=``
                    mine.resize_(theirs.shape)
                mine.copy_(theirs)
                originals[id(theirs)] = mine
    if isinstance(result, (list, tuple)):
        return type(result)(originals.get(id(item), item) for item in result)
    return originals.get(id(result), result)


def _low_in_fp32_out(op: Overload, call: Callable[..., Any], device_type: str) -> Runner:
    low, wide = (target_dtype(rule, op, device_type) for rule in (r.LOWER_PRECISION_FP, r.FP32))
    if _writes(op):
        return _writing_back(op, call, wide, device_type, rounding=low)
    of_products = composed(op, device_type)

    def on_rounded(*args: Any, **kwargs: Any) -> Any:
        result = None if of_products is None else of_products(*args, **kwargs)
        return portable(None, args, kwargs) if result is None else result

    portable = _casting(op, call, wide, device_type)
    return _casting(op, on_rounded, low, device_type)


# Rules that set a dtype argument instead of casting.


def _set_opt_dtype(op: Overload, call: Callable[..., Any], device_type: str) -> Runner:
    argument = r.dtype_argument(op)
    assert argument is not None, f"{dispatcher_name(op)} was admitted without a dtype argument"
    position, name, keyword_only = argument

    def run(_keyset: Any, args: Args, kwargs: Kwargs) -> Any:
        by_position = not keyword_only and len(args) > position
        given = args[position] if by_position else kwargs.get(name)
        if given is not None or not eligible(args[0], device_type):
            return call(*args, **kwargs)
        if not keyword_only and len(args) >= position and name not in kwargs:
            return call(*args[:position], torch.float32, *args[position + 1 :], **kwargs)
        return call(*args, **{**kwargs, name: torch.float32})

    return run


def _append_dtype(op: Overload, _call: Callable[..., Any], device_type: str) -> Runner:
    sibling = r.dtype_overload(op)
    assert sibling is not None, f"{dispatcher_name(op)} was admitted without an overload that takes a dtype"
    call = _caller(sibling)
    tail = arguments(op)
    name = arguments(sibling)[-1].name

    def run(_keyset: Any, args: Args, kwargs: Kwargs) -> Any:
        dtype = torch.float32 if eligible(args[0], device_type) else args[0].dtype
        rest = {a.name: a.default_value for a in tail[len(args) :]}  # the sibling has no defaults
        return call(*args, **{**rest, **kwargs, name: dtype})

    return run


_SPECIAL: dict[str, Callable[[Overload, Callable[..., Any], str], Runner]] = {
    r.FP32_SET_OPT_DTYPE: _set_opt_dtype,
    r.FP32_APPEND_DTYPE: _append_dtype,
    r.LOW_IN_FP32_OUT: _low_in_fp32_out,
}
