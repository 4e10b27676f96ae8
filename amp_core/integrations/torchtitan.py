"""torchtitan: a `Trainer` with a scaler, so that it can train in float16. Tested with torchtitan 0.3."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor

from amp_core import GradScaler, OpPolicy, PrecisionPlan
from amp_core.callbacks import SkipAwareScheduler
from amp_core.common.extras import needing
from amp_core.common.text import dtype_name
from amp_core.integrations.checks import replaced
from amp_core.policy.rules import FP32

_TESTED = "0.3"

with needing("torchtitan", f"torchtitan=={_TESTED}.*"):
    import torchtitan.trainer
    from torchtitan.components.loss import ChunkedLossWrapper


class Trainer(torchtitan.trainer.Trainer):
    """``torchtitan.trainer.Trainer`` that trains in float16 with a `GradScaler`.

    All ranks make one decision per step, over data, tensor, pipeline and expert parallelism: one collective
    tells them the norm of the whole model, by which they clip, and whether to step. Learning-rate schedules
    wait after skipped steps. The scale is saved with the ``train_state`` of torchtitan's checkpoints.

    Args:
        config: torchtitan's, from a ``config_registry`` or ``ConfigManager().parse_args()``. Call this class
            with it instead of ``config.build()``.
        plan: gives FSDP2 its dtypes, and names float32 parameters and buffers. By default, the dtypes are
            those of ``config.training``.
        scaler: arguments for the `GradScaler`. It is enabled if parameters are computed in float16.

    Attributes:
        scaler: the `GradScaler`.

    Raises:
        RuntimeError: another version of torchtitan is installed.
        ValueError: `plan` or `config` asks for what torchtitan, or this class, does not do.

    Example::

        plan = PrecisionPlan.from_toml("plan.toml")  # [distributed] param_dtype = "float16"
        trainer = Trainer(llama3_debugmodel(), plan=plan, scaler={"growth_interval": 500})
        trainer.train()
        trainer.close()
    """

    def __init__(
        self,
        config: torchtitan.trainer.Trainer.Config,
        *,
        plan: PrecisionPlan | None = None,
        scaler: Mapping[str, Any] | None = None,
    ) -> None:
        installed = version("torchtitan")
        if installed.rpartition(".")[0] != _TESTED:
            raise RuntimeError(
                f"torchtitan {installed} is installed, but this class replaces steps inside of the training "
                f"step of torchtitan {_TESTED}. Install that: pip install 'torchtitan=={_TESTED}.*'."
            )
        for refusal in _refusals(config, plan):
            raise ValueError(refusal)
        super().__init__(config if plan is None else _planned(config, plan))
        half = self.config.training.mixed_precision_param == "float16"
        self.scaler = self._new_scaler({"enabled": half, **(scaler or {})})
        if self.scaler.is_enabled():
            for scheduler in self.lr_schedulers:
                SkipAwareScheduler(scheduler, self.scaler)
            _scale_losses(self.loss_fn, self.scaler)

    def _new_scaler(self, options: Mapping[str, Any]) -> GradScaler:
        pipeline = self.parallel_dims.get_optional_mesh("pp")
        named = {name: param for part in self.model_parts for name, param in part.named_parameters()}
        if options["enabled"]:
            for name, param in named.items():
                _check_described(name, param, 1 if pipeline is None else pipeline.size())
        scaler = GradScaler(
            self.device.type,
            named_parameters=named.items(),
            process_group=distributed.group.WORLD,
            sharded_over={} if pipeline is None else {pipeline: named.values()},
            **options,
        )
        scaler.scale(torch.zeros((), device=self.device))  # ranks of inner stages see no loss
        return scaler

    def forward_backward_step(self, **kwargs: Any) -> Tensor:
        """Return the loss of one batch, not scaled, after its backward pass."""
        loss: Tensor = super().forward_backward_step(**kwargs)
        last = getattr(self, "pp_has_last_stage", True)  # other stages return no loss
        scale = self.scaler._get_scale_async() if last else None
        return loss if scale is None else loss / scale

    def train_step(self, data_iterator: Iterator[Any]) -> None:
        """Take one step, or skip it."""
        if not self.scaler.is_enabled():
            super().train_step(data_iterator)
            return
        self._stepped = False
        clip = replaced(torchtitan.trainer.dist_utils, "clip_grad_norm_", self._clip)
        with clip, replaced(self.optimizers, "step", self._step):
            super().train_step(data_iterator)
        if not self._stepped:
            raise RuntimeError(
                f"{type(self).__name__}.train_step ended without optimizers.step(), where gradients are "
                f"unscaled: a class between it and torchtitan's Trainer replaces this part of the step."
            )

    def _clip(self, _: Iterable[Tensor], max_norm: float, **__: Any) -> Tensor:
        return self.scaler.clip_grad_norm_(list(self.optimizers), max_norm)

    def _step(self) -> None:
        """Step as the container does, with its hooks, but each optimizer through the scaler."""
        through = [_Through(self.scaler, optimizer) for optimizer in self.optimizers]
        with replaced(self.optimizers, "optimizers", through):
            type(self.optimizers).step(self.optimizers)
        self.scaler.update()
        self._stepped = True

    def state_dict(self) -> dict[str, Any]:
        """Return torchtitan's state and the scaler's."""
        return {**super().state_dict(), "scaler": self.scaler.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of `state_dict`."""
        super().load_state_dict(state_dict)
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(state_dict["scaler"])


@dataclasses.dataclass
class _Through:
    scaler: GradScaler
    optimizer: torch.optim.Optimizer

    def step(self) -> None:
        self.scaler.step(self.optimizer)


def _refusals(config: torchtitan.trainer.Trainer.Config, plan: PrecisionPlan | None) -> Iterator[str]:
    if not config.training.disable_cuda_graphs:
        yield "CUDA graphs would keep the first scale: set training.disable_cuda_graphs = True."
    if plan is None:
        return
    if plan.policy != OpPolicy.default(plan.policy.device_type) or any(
        rules != FP32 for rules in plan.modules.values()
    ):
        yield (
            "The plan has rules for ops, which only work in autocast regions, and torchtitan has none: FSDP2 "
            "casts the weights. Keep [distributed] and the modules that stay float32."
        )
    if plan.output_dtype is not None:
        yield "The plan sets output_dtype, which torchtitan does not pass on to FSDP2. Remove it."


def _planned(
    config: torchtitan.trainer.Trainer.Config, plan: PrecisionPlan
) -> torchtitan.trainer.Trainer.Config:
    """Return a config whose model is sharded as the plan says."""
    spec, training = config.model_spec, config.training
    assert spec is not None
    dtypes = {"mixed_precision_param": plan.param_dtype, "mixed_precision_reduce": plan.reduce_dtype}
    named = {key: dtype_name(dtype) for key, dtype in dtypes.items() if dtype is not None}

    def parallelize(model: nn.Module, **kwargs: Any) -> nn.Module:
        plan.apply(model)
        with _policies_of(plan, model):
            return spec.parallelize_fn(model, **kwargs)

    return dataclasses.replace(
        config,
        training=dataclasses.replace(training, **named),
        model_spec=dataclasses.replace(spec, parallelize_fn=parallelize),
    )


@contextlib.contextmanager
def _policies_of(plan: PrecisionPlan, model: nn.Module) -> Iterator[None]:
    """Give each unit of `model` that torchtitan shards the policy that the plan has for it."""
    shard = torchtitan.distributed.fsdp.fully_shard

    def planned(unit: Any, *, mp_policy: Any, **kwargs: Any) -> Any:
        modules = unit if isinstance(unit, list) else [unit]
        policies = [plan.fsdp_policy(model, module) for module in modules]
        if any(policy != policies[0] for policy in policies):
            raise ValueError(
                f"torchtitan shards the modules {', '.join(type(m).__name__ for m in modules)} as one unit, "
                f"but the plan has other dtypes for some of them. Name all or none in float32_parameters."
            )
        ours = dataclasses.replace(policies[0], cast_forward_inputs=mp_policy.cast_forward_inputs)
        for key in ("param_dtype", "reduce_dtype"):
            if getattr(ours, key) is None:
                ours = dataclasses.replace(ours, **{key: getattr(mp_policy, key)})
        return shard(unit, mp_policy=ours, **kwargs)

    with replaced(torchtitan.distributed.fsdp, "fully_shard", planned):
        yield


def _check_described(name: str, param: Tensor, stages: int) -> None:
    """Refuse a parameter that does not say how it is spread over the ranks of its stage."""
    ranks = distributed.get_world_size() // stages
    reach = param.device_mesh.size() if isinstance(param, DTensor) else 1
    if reach != ranks:
        raise ValueError(
            f"The parameter {name} is a {type(param).__name__} that is spread over {reach} of the {ranks} "
            f"ranks of its stage, so the scaler cannot tell whether the others have copies of it. Set "
            f"parallelism.spmd_backend to 'partial_dtensor' or 'full_dtensor'."
        )


def _scale_losses(loss_fn: Any, scaler: GradScaler) -> None:
    """Scale the losses from which backward passes start."""
    leaf = loss_fn.loss_fn if isinstance(loss_fn, ChunkedLossWrapper) else loss_fn
    own = type(leaf)

    def call(self: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        loss, metrics = own.__call__(self, *args, **kwargs)
        return (scaler.scale(loss) if loss.requires_grad else loss), metrics

    leaf.__class__ = type(own.__name__, (own,), {"__call__": call, "__module__": own.__module__})
