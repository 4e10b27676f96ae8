"""How a module with rules gets another forward, and what copies of it do."""

from __future__ import annotations

import functools
import inspect
from types import CodeType
from typing import Any, cast

from torch import nn
from torch.utils.hooks import RemovableHandle

from amp_core._torch.modules import replica_of
from amp_core._torch.tracing import is_compiling
from amp_core.errors import PolicyError
from amp_core.regions.module_region import ModuleRegion

_REGION = "_amp_policy_region"
_SCRIPTED = "__prepare_scriptable__"  # torch.jit.script calls it
_REPLICATED = "_replicate_for_data_parallel"  # nn.DataParallel calls it
_KEYS = {"forward", _REGION, _SCRIPTED, _REPLICATED}
_CONTENTS = ("_parameters", "_buffers", "_modules")
_SUSPENDED = inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction


class _Forward(functools.partial[Any]):
    """What replaces a forward, with what others read of it: trainers its arguments, Dynamo the code of fx."""

    @property
    def _replaced(self) -> Any:
        module, _, wrapped = self.args
        return type(module).forward.__get__(module) if wrapped is None else wrapped

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._replaced)

    @property
    def __code__(self) -> CodeType:
        return cast("CodeType", self._replaced.__code__)


class ReplacedForward:
    """A module whose forward is replaced on the instance.

    Dynamo guards on instance attributes, so a compiled model notices the change. The forward is a partial,
    not a bound method: a deep copy binds both to the copied module, but a pickle turns a bound method into
    the forward of the class. A hook refuses other copies, whose forward would use the original's weights. It
    also keeps nn.TransformerEncoderLayer off a fast path that uses weights without calling the module.
    """

    def __init__(self, module: nn.Module, region: ModuleRegion) -> None:
        self._module = module
        self._earlier = {key: module.__dict__[key] for key in _KEYS if key in module.__dict__}
        self._hook: RemovableHandle | None = None
        self._removed = False
        wrapped = self._earlier.get("forward")
        if isinstance(wrapped, _Forward):  # rules applied earlier
            _, below, wrapped = wrapped.args
            region = region.on_top_of(below)
        inner = type(module).forward if wrapped is None else wrapped
        call = forward_later if any(is_kind(inner) for is_kind in _SUSPENDED) else forward
        self._region, self._forward = region, _Forward(call, module, region, wrapped)

    def attach(self) -> None:
        """Replace the forward."""
        self._hook = self._module.register_forward_pre_hook(_refuse_copy)
        refuse = functools.partial(_refuse_script, self._module)
        replicate = functools.partial(_replicate, self._module)
        replaced = {"forward": self._forward, _SCRIPTED: refuse, _REPLICATED: replicate}
        self._module.__dict__.update({_REGION: self._region, **replaced})

    def check_removable(self) -> None:
        """Raise PolicyError if something else has replaced the forward since."""
        if not self._removed and self._module.__dict__.get("forward") is not self._forward:
            raise PolicyError(
                f"The forward of {type(self._module).__name__} was replaced after the policy was applied; "
                f"remove that replacement first."
            )

    def remove(self) -> None:
        """Give the module back what it had; again, if an interrupt broke it off."""
        self._removed = True
        if self._hook is not None:
            self._hook.remove()
        self._module.__dict__.update(self._earlier)  # first: another thread may call the module
        for key in _KEYS - self._earlier.keys():
            self._module.__dict__.pop(key, None)


def forward(self: nn.Module, region: ModuleRegion, wrapped: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Run what was the module's forward, its class's if `wrapped` is None, in the region of its rules."""
    if wrapped is None:
        return region.run(type(self).forward, (self, *args), kwargs)
    return region.run(wrapped, args, kwargs)


def forward_later(self: nn.Module, region: ModuleRegion, wrapped: Any, /, *args: Any, **kwargs: Any) -> Any:
    """As `forward`, where it is a generator or a coroutine, which runs after it was called."""
    if wrapped is None:
        return region.run_later(type(self).forward, (self, *args), kwargs)
    return region.run_later(wrapped, args, kwargs)


def _refuse_copy(module: nn.Module, _args: object) -> None:
    """Raise PolicyError if `module` has the forward of another one and weights of its own."""
    if is_compiling():
        return
    call = module.__dict__.get("forward")
    owner = call.args[0] if isinstance(call, _Forward) else module
    if owner is not module and any(vars(owner)[key] is not vars(module)[key] for key in _CONTENTS):
        raise PolicyError(
            f"This {type(module).__name__} has the attributes of a module with rules, and so its forward, "
            f"which uses the weights of that one. Before it is copied, call remove() of what apply_policy "
            f"returned, and apply the rules to the copy; or copy it with copy.deepcopy."
        )


def _replicate(module: nn.Module) -> nn.Module:
    replica = replica_of(module)
    call = replica.__dict__.get("forward")
    if isinstance(call, _Forward):
        replica.__dict__["forward"] = _Forward(call.func, replica, *call.args[1:])
    return replica


def _refuse_script(module: nn.Module) -> None:
    raise PolicyError(
        f"TorchScript cannot compile {type(module).__name__}, which has op rules of its own: "
        f"torch.jit.script would drop them. Call remove() of what apply_policy returned first, or use "
        f"torch.compile."
    )


def runs_in_float32(module: nn.Module) -> bool:
    """Return whether `module` has the rule ``"fp32"``."""
    region = module.__dict__.get(_REGION)
    return region is not None and region.changes is None
