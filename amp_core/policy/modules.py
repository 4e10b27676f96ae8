"""Rules for some modules of a model, by glob: put on without editing the model, and taken off again."""

from __future__ import annotations

import difflib
import fnmatch
import types
from collections.abc import Iterator, Mapping
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from amp_core._torch import internals as _torch
from amp_core.errors import PolicyError
from amp_core.policy.op_policy import Explanations, OpName, OpPolicy

if TYPE_CHECKING:
    from amp_core.dispatch.activate import Changes

_REGION = "_amp_policy_region"
_FLOAT32 = "fp32"


def apply_policy(
    model: nn.Module,
    rules: Mapping[str, Mapping[OpName, str] | str] | PathLike[str],
    *,
    device_type: str | None = None,
) -> AppliedPolicy:
    """Give some modules of `model` rules of their own.

    While such a module runs, the rules change whatever policy is in force around it: the device's default, or
    that of the region. They do nothing outside autocast.

    Args:
        model: the model; it is changed in place, and changed back by `AppliedPolicy.remove`.
        rules: glob over the names of ``model.named_modules()`` to either op rules, as for
            `OpPolicy.override`, or ``"fp32"``: the module runs without autocast and gets its floating-point
            tensor arguments in float32. ``*`` stands for one part of a name, ``**`` for any number of
            parts, ``""`` for the model itself. Where several globs match one module, later ones win.
            Or the path of a TOML file with such rules in its table ``modules``.
        device_type: by default, that of the model's first parameter or buffer.

    Raises:
        PolicyError: a glob matches no module, an op or rule is unknown or cannot be applied; for a file,
            with the line. The model is then as it was.
        OSError: the file cannot be read.
    """
    device_type = device_type or _device_type(model)
    places: Mapping[str, str] = {}
    if isinstance(rules, PathLike):
        from amp_core.policy.toml import read_modules

        rules, places = read_modules(rules)
    planned: dict[str, _Region] = {}
    for glob, what in rules.items():
        try:
            region = _region(device_type, glob, what)
            for name in _matches(model, glob):
                planned[name] = region.on_top_of(planned.get(name))
        except PolicyError as error:
            if glob not in places:
                raise
            raise PolicyError(f"{places[glob]}: {error}") from error
    return AppliedPolicy(model, device_type, planned, rules)


class AppliedPolicy:
    """What `apply_policy` put on a model. Also a context manager that removes it at the end.

    Attributes:
        modules: the names of the modules that have rules of their own.
    """

    def __init__(
        self,
        model: nn.Module,
        device_type: str,
        regions: Mapping[str, _Region],
        rules: Mapping[str, Mapping[OpName, str] | str],
    ) -> None:
        self.modules = tuple(regions)
        self._rules = rules
        self._regions = regions
        self._device_type = device_type
        self._wrapped = [_Wrapped(model.get_submodule(name), region) for name, region in regions.items()]

    def remove(self) -> None:
        """Take the rules off again. Does nothing the second time.

        Raises:
            PolicyError: something else was put on one of the modules later and is still on it.
        """
        for wrapped in self._wrapped:
            wrapped.check_removable()
        for wrapped in self._wrapped:
            wrapped.remove()
        self._wrapped = []

    def to_toml(self) -> str:
        """Return the rules as TOML, which `apply_policy` reads from a file."""
        from amp_core.policy.toml import write_modules

        return write_modules(
            {g: what if isinstance(what, str) else _named(what) for g, what in self._rules.items()}
        )

    def explain(self, module: str, op: OpName) -> Explanations:
        """Return rule and origin of `op` in the module called `module`, over the device's default policy.

        Raises:
            PolicyError: the module has no rules of its own, or the op is unknown.
        """
        if module not in self._regions:
            raise PolicyError(f"No rule was put on the module {module!r}; {_listed(self.modules)}.")
        return self._regions[module].on(OpPolicy.default(self._device_type)).explain(op)

    def __enter__(self) -> AppliedPolicy:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"<AppliedPolicy on {len(self.modules)} modules: {', '.join(map(repr, self.modules))}>"


class _Region:
    """What surrounds the forward of one module: changed op rules, or no autocast at all."""

    def __init__(self, device_type: str, changes: Changes | None) -> None:
        self.device_type = device_type
        self.changes = changes

    def on_top_of(self, other: _Region | None) -> _Region:
        from amp_core.dispatch.activate import Changes

        if other is None or other.changes is None or self.changes is None:
            return self
        origin = f"{other.changes.origin}, {self.changes.origin}"
        return _Region(
            self.device_type,
            Changes(self.device_type, {**other.changes.rules, **self.changes.rules}, origin),
        )

    def on(self, policy: OpPolicy) -> OpPolicy:
        if self.changes is not None:
            return self.changes.on(policy)
        return policy.override(dict.fromkeys(policy.rules, "unchanged"), origin="module rule 'fp32'")

    def run(self, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.changes is not None:
            from amp_core.dispatch.graphs import InForce

            with InForce(self.changes):
                return call(*args, **kwargs)
        if not torch.is_autocast_enabled(self.device_type):
            return call(*args, **kwargs)
        args, kwargs = _torch.tree_map_only(torch.Tensor, self._float32, (args, kwargs))
        with torch.autocast(self.device_type, enabled=False):
            return call(*args, **kwargs)

    def _float32(self, tensor: torch.Tensor) -> torch.Tensor:
        from amp_core.dispatch.target_dtype import eligible

        return tensor.float() if eligible(tensor, self.device_type) else tensor


def runs_in_float32(module: nn.Module) -> bool:
    """Whether the rule ``"fp32"`` was put on `module`."""
    found = module.__dict__.get(_REGION)
    return found is not None and found[0].changes is None


class _Wrapped:
    """A module whose instance has a forward of ours.

    An attribute of the instance, as Dynamo guards on that, so that a compiled model notices; a bound method,
    so that a deep copy of the module is bound to the copy; and a hook that does nothing, which keeps
    nn.TransformerEncoderLayer from a fast path that would run the module's weights without the module.
    """

    def __init__(self, module: nn.Module, region: _Region) -> None:
        self._module = module
        self._earlier = {key: module.__dict__[key] for key in ("forward", _REGION) if key in module.__dict__}
        self._hook = module.register_forward_pre_hook(_nothing)
        self._forward = types.MethodType(forward, module)
        module.__dict__[_REGION] = region, self._earlier
        module.__dict__["forward"] = self._forward

    def check_removable(self) -> None:
        if self._module.__dict__.get("forward") is not self._forward:
            raise PolicyError(
                f"The forward of {type(self._module).__name__} was replaced after the policy was put on; "
                f"take that off first."
            )

    def remove(self) -> None:
        self._hook.remove()
        for key in ("forward", _REGION):
            del self._module.__dict__[key]
        self._module.__dict__.update(self._earlier)


def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """TorchScript cannot compile a module with an op policy of its own: AppliedPolicy.remove() first."""
    # The docstring is for the error of torch.jit.script, which shows it. The name is for pickle.
    region, earlier = self.__dict__[_REGION]
    if "forward" in earlier:
        return region.run(earlier["forward"], args, kwargs)
    return region.run(type(self).forward, (self, *args), kwargs)


def _nothing(_module: nn.Module, _args: object) -> None:
    return None


def _region(device_type: str, glob: str, what: Mapping[OpName, str] | str) -> _Region:
    from amp_core.dispatch.activate import Changes

    if isinstance(what, str):
        if what != _FLOAT32:
            raise PolicyError(f"{glob!r}: {what!r} is not a rule for a module; use 'fp32' or op rules.")
        return _Region(device_type, None)
    try:
        rules = OpPolicy(device_type, what).rules
    except PolicyError as error:
        raise PolicyError(f"{glob!r}: {error}") from error
    return _Region(device_type, Changes(device_type, rules, f"module glob {glob!r}"))


def _named(rules: Mapping[OpName, str]) -> dict[str, str]:
    return {op if isinstance(op, str) else str(op): rule for op, rule in rules.items()}


def _device_type(model: nn.Module) -> str:
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device.type
    raise PolicyError("The model has no parameter to take the device from; pass device_type=.")


def _matches(model: nn.Module, glob: str) -> list[str]:
    known = [name for name, _ in model.named_modules()]
    found = [name for name in known if _is_match(name.split("."), glob.split("."))]
    if not found:
        near = difflib.get_close_matches(glob, known, n=3, cutoff=0.5)
        hint = f"near names are {', '.join(map(repr, near))}" if near else _listed(tuple(known))
        raise PolicyError(f"The glob {glob!r} matches no module of {type(model).__name__}; {hint}.")
    return found


def _is_match(name: list[str], glob: list[str]) -> bool:
    if not glob:
        return not name
    if glob[0] == "**":
        return any(_is_match(name[i:], glob[1:]) for i in range(len(name) + 1))
    return bool(name) and fnmatch.fnmatchcase(name[0], glob[0]) and _is_match(name[1:], glob[1:])


def _listed(modules: tuple[str, ...]) -> str:
    def shown() -> Iterator[str]:
        yield from map(repr, modules[:8])
        if len(modules) > 8:
            yield f"and {len(modules) - 8} more"

    return f"the names are {', '.join(shown())}"
