"""Every setting of Lightning that has to do with precision is obeyed or refused in words."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

pytest.importorskip("lightning", reason="Lightning is not installed; tox -e ecosystem installs it")

import lightning as L
from lightning.fabric.plugins.precision import MixedPrecision as TheirFabricPrecision
from lightning.pytorch.plugins.precision import MixedPrecision as TheirPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from amp_core import GradScaler
from amp_core.integrations.lightning import FabricMixedPrecision, HoldSchedulers, MixedPrecision

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's own

TRAINER = {"precision", "plugins", "strategy", "gradient_clip_val", "gradient_clip_algorithm"}
TRAINERS_OWN = {
    "accelerator",
    "accumulate_grad_batches",
    "barebones",
    "benchmark",
    "callbacks",
    "check_val_every_n_epoch",
    "default_root_dir",
    "detect_anomaly",
    "deterministic",
    "devices",
    "enable_autolog_hparams",
    "enable_checkpointing",
    "enable_model_summary",
    "enable_progress_bar",
    "fast_dev_run",
    "inference_mode",
    "limit_predict_batches",
    "limit_test_batches",
    "limit_train_batches",
    "limit_val_batches",
    "log_every_n_steps",
    "logger",
    "max_epochs",
    "max_steps",
    "max_time",
    "min_epochs",
    "min_steps",
    "model_registry",
    "num_nodes",
    "num_sanity_val_steps",
    "overfit_batches",
    "profiler",
    "reload_dataloaders_every_n_epochs",
    "sync_batchnorm",
    "use_distributed_sampler",
    "val_check_interval",
}
FABRIC = {"accelerator", "strategy", "devices", "num_nodes", "precision", "plugins", "callbacks", "loggers"}
CLIP_GRADIENTS = {"module", "optimizer", "clip_val", "max_norm", "norm_type", "error_if_nonfinite"}
BOTH = [(MixedPrecision, TheirPrecision), (FabricMixedPrecision, TheirFabricPrecision)]


def parameters(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters) - {"self"}


class Module(L.LightningModule):
    """A linear model whose loss is large enough that a scaled gradient is far from the true one."""

    def __init__(self, optimizer: Any = torch.optim.SGD) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(4, 1)
        self.optimizer = optimizer
        self.norms: list[float] = []
        self.dtypes: set[torch.dtype] = set()

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        out = self.net(batch)
        self.dtypes.add(out.dtype)
        return out.float().square().mean()

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters(), lr=0.1)

    def norm(self) -> float:
        return float(torch.stack([p.grad.norm() for p in self.parameters()]).norm())


def fit(module: Module, *plugins: Any, **settings: Any) -> L.Trainer:
    quiet: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False
    )
    trainer = L.Trainer(accelerator="cpu", max_epochs=1, plugins=list(plugins) or None, **quiet, **settings)
    torch.manual_seed(0)
    trainer.fit(module, DataLoader(torch.randn(8, 4), batch_size=4))
    return trainer


def fp16() -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", GradScaler("cpu", 1024.0))


def test_the_settings_of_lightning_are_known() -> None:
    """A new version of Lightning has a setting that nobody thought of here."""
    assert parameters(L.Trainer.__init__) == TRAINER | TRAINERS_OWN
    assert parameters(L.Fabric.__init__) == FABRIC
    assert parameters(L.Fabric.clip_gradients) == CLIP_GRADIENTS
    for ours, theirs in BOTH:
        assert parameters(theirs.__init__) == {"precision", "device", "scaler"}
        assert parameters(ours.__init__) == {"precision", "device", "scaler", "policy"}


@pytest.mark.parametrize(("ours", "theirs"), BOTH)
def test_what_lightning_may_override_is_known(ours: type, theirs: type) -> None:
    """Lightning's plugin casts in a method that ours does not know of."""
    casting = {n for n, f in vars(theirs).items() if callable(f) and "autocast" in inspect.getsource(f)}
    assert casting - {"__init__"} <= set(vars(ours)) | {"forward_context"}


@pytest.mark.parametrize(
    ("precision", "dtype"), [("16-mixed", torch.float16), ("bf16-mixed", torch.bfloat16)]
)
def test_precision(precision: str, dtype: torch.dtype) -> None:
    """The forward runs in another dtype, or in torch's region with its weight cache."""
    plugin = MixedPrecision(precision, "cpu")
    module = Module()
    fit(module, plugin)
    assert module.dtypes == {dtype}
    with plugin.forward_context():
        assert not torch.is_autocast_cache_enabled()  # as in Lightning's own plugin


@pytest.mark.parametrize(("ours", "theirs"), BOTH)
@pytest.mark.parametrize("arguments", [("32-true", "cpu"), ("bf16-mixed", "cpu", GradScaler("cpu"))])
def test_what_lightning_refuses_is_refused(ours: type, theirs: type, arguments: tuple[Any, ...]) -> None:
    """A setting that Lightning's own plugin refuses is dropped by ours."""
    with pytest.raises((ValueError, MisconfigurationException)) as wanted:
        theirs(*arguments)
    with pytest.raises(type(wanted.value)) as refused:
        ours(*arguments)
    assert str(refused.value).replace(ours.__name__, theirs.__name__) == str(wanted.value)


@pytest.mark.parametrize(("ours", "theirs"), BOTH)
def test_a_scaler_of_torchs_is_refused(ours: type, theirs: type) -> None:
    """A scaler of torch's gets as far as the first method that it lacks."""
    theirs("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    with pytest.raises(TypeError, match=r"takes an amp_core.GradScaler"):
        ours("16-mixed", "cpu", torch.amp.GradScaler("cpu"))


def test_precision_twice_is_refused() -> None:
    """Of `precision=` and a plugin, one is dropped."""
    with pytest.raises(ValueError, match="Received both `precision"):
        fit(Module(), fp16(), precision="bf16-mixed")


@pytest.mark.parametrize("strategy", ["fsdp"])
def test_strategies_with_a_precision_of_their_own_refuse_ours(strategy: str) -> None:
    """FSDP 1 trains with its own mixed precision although amp-core's was asked for."""
    with pytest.raises((TypeError, ValueError, MisconfigurationException)):
        L.Trainer(accelerator="cpu", devices=1, strategy=strategy, plugins=[fp16()])


def test_lbfgs_is_refused() -> None:
    """A closure of LBFGS is called once, and its search goes wrong in silence."""
    with pytest.raises(MisconfigurationException, match="LBFGS"):
        fit(Module(torch.optim.LBFGS), fp16())


@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize("value", [1e-3, None])
def test_clipping(algorithm: str, value: float | None) -> None:
    """Gradients are clipped while they are scaled, or not at all."""
    after = []
    for plugins, settings in (([fp16()], {}), ([], {"precision": "32-true"})):
        module = Module()
        fit(module, *plugins, gradient_clip_val=value, gradient_clip_algorithm=algorithm, **settings)
        after.append(torch.cat([p.detach().flatten() for p in module.parameters()]))
    assert torch.allclose(*after, rtol=2e-3, atol=1e-4)


class Watching(Module):
    """Reads gradients before the step, as documented for logging their norm."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms.append(self.norm())


class Clipping(Module):
    """Clips by itself, as documented for methods of clipping that Lightning lacks."""

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.norms.append(self.norm())
        nn.utils.clip_grad_norm_(self.parameters(), 1e-3)


class Mixing(Watching):
    """Reads gradients, and leaves clipping by value to the trainer's method."""

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=1e-3, gradient_clip_algorithm="value")


@pytest.mark.parametrize("kind", [Watching, Clipping, Mixing])
def test_hooks_read_true_gradients(kind: type[Module]) -> None:
    """A hook before the step is given scaled gradients: it logs, or clips to, a norm 1024 times too large."""
    ours, exact = kind(), kind()
    fit(ours, fp16())
    fit(exact, precision="32-true")
    assert ours.norms == pytest.approx(exact.norms, rel=1e-2)
    for one, other in zip(ours.parameters(), exact.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=2e-3, atol=1e-4)


def test_a_callback_reads_true_gradients() -> None:
    """As before, for a callback."""

    class Callback(L.Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            pl_module.norms.append(pl_module.norm())

    ours, exact = Module(), Module()
    fit(ours, fp16(), callbacks=[Callback()])
    fit(exact, precision="32-true", callbacks=[Callback()])
    assert len(ours.norms) == 2
    assert ours.norms == pytest.approx(exact.norms, rel=1e-2)


@pytest.mark.parametrize("ours", [MixedPrecision, FabricMixedPrecision])
def test_a_copy_of_the_plugin(ours: type) -> None:
    """Strategies that spawn their processes, as ``ddp_spawn`` does, cannot pickle the plugin."""
    plugin = ours("16-mixed", "cpu", GradScaler("cpu", 512.0))
    for same in (pickle.loads(pickle.dumps(plugin)), copy.deepcopy(plugin)):
        assert same.state_dict() == plugin.state_dict()
        same.convert_module(torch.nn.Linear(2, 1))


def test_a_disabled_scaler_trains() -> None:
    """A scaler with ``enabled=False`` breaks the step or `HoldSchedulers`."""
    module = Module()
    plugin = MixedPrecision("16-mixed", "cpu", GradScaler("cpu", enabled=False))
    fit(module, plugin, gradient_clip_val=0.5, callbacks=[HoldSchedulers()])
    assert all(p.isfinite().all() for p in module.parameters())


class Overflowing(Module):
    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return super().training_step(batch, index) * torch.inf


def test_step_records_name_parameters() -> None:
    """Records name shapes, since the trainer makes the scaler without the model."""
    plugin = fp16()
    fit(Overflowing(), plugin)
    assert {bad.name for bad in plugin.scaler.history[0].bad_parameters} == {"net.weight", "net.bias"}


def test_step_records_of_fabric_name_parameters() -> None:
    """As before, in Fabric."""
    plugin = FabricMixedPrecision("16-mixed", "cpu")
    fabric = L.Fabric(accelerator="cpu", plugins=[plugin])
    module = nn.Sequential(nn.Linear(4, 1))
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    fabric.backward(model(torch.ones(2, 4)).sum() * torch.inf)
    optimizer.step()
    assert {bad.name for bad in plugin.scaler.history[0].bad_parameters} == {"0.weight", "0.bias"}
