"""`PrecisionPlan`: one file for the dtypes of ops, of sharded weights and of what ranks exchange."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from amp_core.common.arguments import check_module
from amp_core.common.handle import Handle
from amp_core.dispatch.activate import check_policy
from amp_core.errors import PolicyError
from amp_core.policy.changes import resolve_of_module
from amp_core.policy.op_policy import OpPolicy
from amp_core.policy.rules import FP32
from amp_core.policy.toml import checked_modules, parsed, policy_of
from amp_core.regions.kept_buffers import KeptBuffers
from amp_core.regions.modules import AppliedPolicy, Rules, apply_policy
from amp_core.regions.selecting import Modules, Selector, matching

if TYPE_CHECKING:  # the import takes a second
    from torch.distributed.fsdp import MixedPrecisionPolicy

_TABLE = "distributed"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_GLOBS = ("float32_parameters", "float32_buffers")


@dataclass(frozen=True)
class PrecisionPlan:
    """The dtypes of a sharded training run, as data: `from_toml` reads them from one file.

    A dtype of None leaves the choice to torch.

    Attributes:
        policy: the op rules, for ``autocast(policy=...)``.
        modules: the rules of modules, as for `apply_policy`. Under FSDP2, the weights of modules with the
            rule ``"fp32"`` stay float32.
        param_dtype: the dtype in which FSDP2 gathers weights and computes with them.
        reduce_dtype: the dtype in which FSDP2 and DDP reduce gradients. `amp_core.record` flags narrower
            reductions, also those over other mesh dimensions, which torch runs in the gradient's dtype.
        output_dtype: the dtype to which FSDP2 casts what a unit returns.
        cast_forward_inputs: whether FSDP2 casts a unit's inputs to `param_dtype`.
        float32_parameters: globs over parameter names, as over module names in `apply_policy`. FSDP2
            computes with these in float32.
        float32_buffers: globs over buffer names. These stay float32 when the model is cast.
        activation_reduce_dtype: the narrowest dtype in which activations and their gradients may be reduced,
            as tensor parallelism does. Torch has no such setting, so this is only for `amp_core.record`.
        grad_dtype: the narrowest dtype that gradients may have when the optimizer steps; only checked too.
        state_dtype: the narrowest dtype of the optimizer's state; only checked too.

    Raises:
        PolicyError: a dtype is not float32, bfloat16 or float16, another attribute has the wrong type, or
            modules have a rule that is unknown or that cannot apply to its op.

    Example:
        >>> import torch, amp_core
        >>> plan = amp_core.PrecisionPlan.from_toml('''
        ... device_type = "cpu"
        ... [distributed]
        ... param_dtype = "bfloat16"
        ... reduce_dtype = "float32"
        ... ''')
        >>> plan.fsdp_policy().reduce_dtype
        torch.float32
    """

    policy: OpPolicy
    modules: Mapping[Selector, Rules] = field(default_factory=dict, hash=False)
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    float32_parameters: tuple[str, ...] = ()
    float32_buffers: tuple[str, ...] = ()
    activation_reduce_dtype: torch.dtype | None = None
    grad_dtype: torch.dtype | None = None
    state_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        check_policy(self.policy)
        if not isinstance(self.modules, Mapping):
            raise PolicyError(
                f"modules must map modules to rules, as for apply_policy, not {self.modules!r}."
            )
        for selector, what in self.modules.items():
            resolve_of_module(selector, what)
        for name in _settings():
            _check(name, getattr(self, name))
        for name in _GLOBS:
            object.__setattr__(self, name, tuple(getattr(self, name)))

    @classmethod
    def from_toml(cls, source: str | PathLike[str], device_type: str | None = None) -> PrecisionPlan:
        """Read a plan from TOML: the keys of `OpPolicy.from_toml`, and a table ``distributed``.

        Args:
            source: a path, or the TOML text itself (any string that contains a line break).
            device_type: the device type to use if the file does not name one.

        Raises:
            PolicyError: the text is not TOML, or has unknown keys, ops, rules or dtypes; the message gives
                file and line. Or `device_type` is no device type, or another than the file's.
            OSError: the file cannot be read.
            TypeError: `source` is no path or string.
        """
        data, file = parsed(source)
        table = data.get(_TABLE, {})
        values = {key: _value(key, value, file.place(key, _TABLE)) for key, value in table.items()}
        policy = policy_of(OpPolicy, data, file, device_type)
        return cls(policy, checked_modules(data, file), **values)

    def fsdp_policy(
        self, model: nn.Module | None = None, unit: nn.Module | None = None
    ) -> MixedPrecisionPolicy:
        """Return the ``mp_policy`` for ``fully_shard(unit, ...)``.

        Weights that stay float32 need a unit of their own before torch 2.15; from then on, FSDP2 keeps single
        parameters of a unit in their dtype (``param_dtype_override_fn``).

        Args:
            model: the whole model, whose names the globs of `float32_parameters` and `modules` match. Only a
                plan without either needs none.
            unit: the module that will be sharded, of `model`; by default `model` itself. Shard inner units
                first: their parameters are then not the outer unit's.

        Raises:
            PolicyError: the plan needs `model`; a glob matches nothing; `unit` is not a module of `model`; a
                weight that should compute in float32 is stored in another dtype; or only a part of the
                unit's weights should stay float32 and this torch cannot do that.
            TypeError: `model` is no module.
        """
        from torch.distributed.fsdp import MixedPrecisionPolicy

        plain = MixedPrecisionPolicy(
            self.param_dtype, self.reduce_dtype, self.output_dtype, self.cast_forward_inputs
        )
        keeps_some = self.float32_parameters or FP32 in self.modules.values()
        if self.param_dtype in (None, torch.float32) or not keeps_some:
            return plain
        if model is None:
            raise PolicyError(
                "The plan keeps some weights in float32: pass the model whose names its globs match, and the "
                "unit to shard, as in fully_shard(layer, mp_policy=plan.fsdp_policy(model, layer))."
            )
        check_module(model, "PrecisionPlan.fsdp_policy")
        if unit is not None:
            check_module(unit, "PrecisionPlan.fsdp_policy")
        owned = _owned(model, model if unit is None else unit)
        exact = self._float32_parameters(model)
        kept = {name: param for name, param in owned.items() if id(param) in exact}
        _check_stored(kept)
        if not kept:
            return plain
        if len(kept) == len(owned):
            return dataclasses.replace(plain, param_dtype=torch.float32)
        return _overridden(plain, kept, [*owned])

    def ddp_hook(self) -> Callable[[Any, Any], torch.futures.Future[torch.Tensor]]:
        """Return the hook for ``DistributedDataParallel.register_comm_hook(None, hook)``.

        In place of None, which means all ranks, pass the process group of DDP if it is another one. The hook
        averages each bucket of gradients in `reduce_dtype`, which may be narrower or wider than the
        gradients; None means their own dtype. The gradients keep their dtype.
        """
        return _average_in(self.reduce_dtype)

    def apply(self, model: nn.Module) -> AppliedPlan:
        """Give modules of `model` their rules, and keep its `float32_buffers` in float32.

        Apply the plan before you cast the model: afterwards ``model.to(torch.bfloat16)``, ``half()`` and the
        like leave these buffers as they are, so that rotary frequencies, for example, keep their digits.

        Args:
            model: the model; modified in place.

        Returns:
            A handle that undoes it; also a context manager.

        Raises:
            PolicyError: as for `apply_policy`; a glob matches no buffer; or a buffer is already narrower
                than float32.
            TorchFeatureError: this torch casts modules in an unknown way.
            TypeError: `model` is no module.
        """
        check_module(model, "PrecisionPlan.apply")
        buffers = dict(model.named_buffers(remove_duplicate=False))  # modules may share one
        names = matching(buffers, self.float32_buffers, "buffer", model)
        kept = KeptBuffers(model, names)
        rules = (
            apply_policy(model, self.modules, device_type=self.policy.device_type) if self.modules else None
        )
        kept.attach()
        return AppliedPlan(rules, kept)

    def _float32_parameters(self, model: nn.Module) -> set[int]:
        """Return the ids of the parameters that stay float32."""
        modules = Modules(model)
        rules = {name: w for selector, w in self.modules.items() for name in modules.select(selector)[0]}
        whole = [name for name, what in rules.items() if what == FP32]  # of several rules, the last
        params = dict(model.named_parameters(remove_duplicate=False))  # a tied one by each of its names
        kept = [params[name] for name in matching(params, self.float32_parameters, "parameter", model)]
        # Not by names: those of a checkpoint_wrapper's parameters lack a part that its modules' names have.
        kept += [param for name in whole for param in model.get_submodule(name).parameters()]
        return {*map(id, kept)}


class AppliedPlan(Handle):
    """What `PrecisionPlan.apply` did to a model. As a context manager, undoes it on exit.

    Attributes:
        modules: the names of the modules with their own rules.
        buffers: the names of the buffers that stay float32.
    """

    def __init__(self, rules: AppliedPolicy | None, kept: KeptBuffers) -> None:
        self.modules = () if rules is None else rules.modules
        self.buffers = kept.names
        self._rules, self._kept = rules, kept

    def remove(self) -> None:
        """Remove the rules, and let the buffers be cast again. Calling it again has no effect.

        Raises:
            PolicyError: as for `AppliedPolicy.remove`.
        """
        if self._rules is not None:
            self._rules.remove()
        self._kept.detach()


def _average_in(dtype: torch.dtype | None) -> Callable[[Any, Any], torch.futures.Future[torch.Tensor]]:
    """Return a hook of DDP that averages gradients in `dtype`."""
    from torch import distributed as dist

    def average(group: Any, bucket: Any) -> Any:
        ranks: Any = group if group is not None else dist.group.WORLD
        whole: torch.Tensor = bucket.buffer()
        # Divided first, as torch's own hooks do: float16 would overflow in the sum.
        part = (whole if dtype is None else whole.to(dtype)).div_(ranks.size())
        future = dist.all_reduce(part, group=ranks, async_op=True).get_future()
        return future.then(lambda done: whole.copy_(done.value()[0]))

    average.__annotations__.clear()  # DDP compares them to types, and here they are strings
    return average


def _value(key: str, value: Any, place: str) -> Any:
    """Return what the entry `key` of the table means.

    Raises:
        PolicyError: there is no such key, or the value has another type.
    """
    if key not in _settings():
        keys = ", ".join(_settings())
        raise PolicyError(f"{place}: unknown key {key!r} in [{_TABLE}]; the keys are {keys}.")
    if key.endswith("_dtype") and isinstance(value, str):
        value = _DTYPES.get(value, value)
    _check(key, value, f"{place}: ")
    return value


def _settings() -> list[str]:
    """Return the attributes of a plan besides its rules, which are the keys of the table ``distributed``."""
    return [each.name for each in dataclasses.fields(PrecisionPlan)][2:]


def _check(name: str, value: Any, place: str = "") -> None:
    if name == "cast_forward_inputs":
        right, wanted = isinstance(value, bool), "true or false"
    elif name in _GLOBS:
        right = isinstance(value, (tuple, list)) and all(isinstance(glob, str) for glob in value)
        wanted = 'a list of globs, such as ["**.norm.*"]'
    else:
        right = value is None or any(value is dtype for dtype in _DTYPES.values())
        wanted = "one of " + ", ".join(each if place else f"torch.{each}" for each in _DTYPES)
    if not right:
        raise PolicyError(f"{place}{name} must be {wanted}, not {value!r}.")


def _owned(model: nn.Module, unit: nn.Module) -> dict[str, nn.Parameter]:
    """Return the floating-point parameters that ``fully_shard(unit)`` manages, by their name in `model`."""
    from torch.distributed.fsdp import FSDPModule

    Modules(model).select(unit)  # raises if it is none of the model's
    inner = [module for module in unit.modules() if module is not unit and isinstance(module, FSDPModule)]
    others = {id(param) for module in inner for param in module.parameters()}
    names = {id(param): name for name, param in model.named_parameters()}
    return {
        names[id(param)]: param
        for param in unit.parameters()
        if param.is_floating_point() and id(param) not in others
    }


def _check_stored(params: Mapping[str, nn.Parameter]) -> None:
    for name, param in params.items():
        if param.dtype is not torch.float32:
            raise PolicyError(
                f"The plan computes with {name!r} in float32, but its weights are {param.dtype}, which has "
                f"lost their digits. Keep the model in float32: fully_shard casts to param_dtype."
            )


def _overridden(
    policy: MixedPrecisionPolicy, kept: Mapping[str, nn.Parameter], owned: list[str]
) -> MixedPrecisionPolicy:
    if "param_dtype_override_fn" not in {each.name for each in dataclasses.fields(policy)}:
        rest = next(name for name in owned if name not in kept)
        raise PolicyError(
            f"The plan keeps {next(iter(kept))!r} in float32 but not {rest!r} of the same unit, which FSDP2 "
            f"can do from torch 2.15 on (this is {torch.__version__}). Call fully_shard on a module that has "
            f"only the former first, with plan.fsdp_policy(model, module)."
        )
    ids = {id(param) for param in kept.values()}  # asked while fully_shard runs, so none is freed before

    def dtype_of(param: nn.Parameter) -> torch.dtype | None:
        return torch.float32 if id(param) in ids else None

    extra: dict[str, Any] = {"param_dtype_override_fn": dtype_of}
    return dataclasses.replace(policy, **extra)
