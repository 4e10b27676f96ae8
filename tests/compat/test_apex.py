"""`amp_compat.apex` against what apex documented for O0 to O3."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from amp_compat import apex as amp


@pytest.fixture(autouse=True)
def _off_afterwards() -> Iterator[None]:
    """Apex's state is one per process: switch it off after each test."""
    yield
    amp.initialize(nn.Linear(1, 1), enabled=False)
    assert not torch.is_autocast_enabled("cpu")


def make() -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
    """A small model with a batch norm, its optimizer and an input."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(16, 8)


def train(level: str, steps: int = 4, **options) -> tuple[list[float], nn.Module]:
    """Losses and model after a few steps, written as apex's documentation has it."""
    model, optimizer, x = make()
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(x).float().pow(2).mean()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 10.0)
        optimizer.step()
        losses.append(loss.item())
    return losses, model


def test_o0_is_float32_training() -> None:
    """O0 is bit for bit what the same loop gives without amp."""
    model, optimizer, x = make()
    plain = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        plain.append(loss.item())
    assert train("O0")[0] == plain


def test_sparse_gradients() -> None:
    """An embedding with sparse gradients ends in an error of torch's about SparseCPU."""

    def train_embedding(with_amp: bool) -> torch.Tensor:
        torch.manual_seed(0)
        table = nn.Embedding(4, 8, sparse=True)
        optimizer = torch.optim.SGD(table.parameters(), lr=0.5)
        if with_amp:
            table, optimizer = amp.initialize(table, optimizer, opt_level="O0", loss_scale="dynamic")
        for rows in ([0, 1, 1], [1, 3, 0]):
            optimizer.zero_grad()
            for row in rows:
                loss = table(torch.tensor([row])).square().mean()
                if with_amp:
                    with amp.scale_loss(loss, optimizer) as scaled:
                        scaled.backward()
                else:
                    loss.backward()
            optimizer.step()
        return table.weight.detach()

    assert torch.equal(train_embedding(with_amp=True), train_embedding(with_amp=False))


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_levels_train_close_to_float32(level: str) -> None:
    """Each low-precision level follows the float32 losses to float16's precision, and gets better."""
    reference = train("O0")[0]
    losses = train(level)[0]
    assert losses == pytest.approx(reference, rel=2e-2)
    assert losses[-1] < losses[0]


def test_o1_leaves_weights_and_casts_ops() -> None:
    """O1: float32 weights, float16 matrix products, the loss scale at 2**16."""
    model, optimizer, x = make()
    amp.initialize(model, optimizer, opt_level="O1")
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert torch.mm(x, x.t()).dtype == torch.float16
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 0}}


def test_o2_keeps_batchnorm_and_masters() -> None:
    """O2: float16 weights but float32 batch norms; the optimizer holds float32 copies; float32 comes out."""
    model, optimizer, x = make()
    amp.initialize(model, optimizer, opt_level="O2")
    assert [p.dtype for p in model.parameters()] == [torch.float16] * 2 + [torch.float32] * 2 + [
        torch.float16
    ] * 2
    assert {p.dtype for p in amp.master_params(optimizer)} == {torch.float32}
    assert model(x).dtype == torch.float32


def test_o2_masters_keep_what_float16_would_lose() -> None:
    """An update below float16's step is kept in the master weight, and reaches the model once grown."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    amp.initialize(model, optimizer, opt_level="O2", loss_scale=128.0)
    for _ in range(10):
        optimizer.zero_grad()
        with amp.scale_loss(model(torch.ones(1, 1)).sum(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    (master,) = amp.master_params(optimizer)
    assert master.item() == pytest.approx(1 - 10e-4, abs=1e-6)
    assert model.weight.item() == pytest.approx(1 - 10e-4, abs=5e-4)
    assert model.weight.item() != 1.0


def test_o3_is_float16_throughout() -> None:
    """O3: batch norms too, no master weights, loss scale 1."""
    model, optimizer, _ = make()
    amp.initialize(model, optimizer, opt_level="O3")
    assert {p.dtype for p in model.parameters()} == {torch.float16}
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 1.0


def test_overflow_skips_one_step_and_halves_the_scale() -> None:
    """An inf in the gradients leaves the weights as they are, once, and the scale goes down by two."""
    model, optimizer, x = make()
    amp.initialize(model, optimizer, opt_level="O1")
    before = [p.detach().clone() for p in model.parameters()]
    with amp.scale_loss(model(x).float().sum() * float("inf"), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 32768.0, "unskipped": 0}
    optimizer.zero_grad()
    with amp.scale_loss(model(x).float().pow(2).mean(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    assert not torch.equal(before[0], next(model.parameters()))


def test_gradients_accumulate_unscaled() -> None:
    """Two scale_loss blocks before a step give the sum of both gradients, unscaled."""
    model, optimizer, x = make()
    amp.initialize(model, optimizer, opt_level="O0", loss_scale=64.0)
    for part in x.split(8):
        with amp.scale_loss(model(part).sum(), optimizer) as scaled_loss:
            scaled_loss.backward()
    got = [p.grad.clone() for p in model.parameters()]
    optimizer.zero_grad()
    for part in x.split(8):
        model(part).sum().backward()
    for ours, plain in zip(got, model.parameters(), strict=True):
        torch.testing.assert_close(ours, plain.grad)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("delayed", [(True, False), (True, True, False), (False, False)])
def test_delayed_gradients_are_unscaled_with_the_last(level: str, delayed: tuple[bool, ...]) -> None:
    """Gradients that `delay_unscale` left scaled enter the step multiplied by the scale."""
    model, optimizer, x = make()
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=128.0, verbosity=0)

    def add(delay: bool) -> None:
        with amp.scale_loss(model(x).float().pow(2).mean(), optimizer, delay_unscale=delay) as scaled:
            scaled.backward()

    add(False)
    once = [param.grad.clone() for param in amp.master_params(optimizer)]
    optimizer.zero_grad()
    for _ in range(2):  # nothing of the first window stays for the second
        for delay in delayed:
            add(delay)
        for param, grad in zip(amp.master_params(optimizer), once, strict=True):
            torch.testing.assert_close(param.grad, len(delayed) * grad, rtol=1e-2, atol=1e-3)
        optimizer.zero_grad()


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("delayed", [False, True])
def test_a_failed_block_keeps_the_gradients_before_it(level: str, backward: bool, delayed: bool) -> None:
    """One bad micro-batch loses the gradients of the others, or the next block mixes up their scale."""
    model, optimizer, x = make()
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=128.0, verbosity=0)

    def add(*, delay: bool = False) -> None:
        with amp.scale_loss(model(x).float().pow(2).mean(), optimizer, delay_unscale=delay) as scaled:
            scaled.backward()

    def fail() -> None:
        with amp.scale_loss(model(x).float().pow(2).mean(), optimizer) as scaled:
            if backward and not delayed:
                scaled.backward()
            raise ValueError("bad batch")

    add()
    once = [param.grad.clone() for param in amp.master_params(optimizer)]
    optimizer.zero_grad()
    add(delay=delayed)
    with pytest.raises(ValueError, match="bad batch"):
        fail()
    add()
    for param, grad in zip(amp.master_params(optimizer), once, strict=True):
        torch.testing.assert_close(param.grad, 2 * grad, rtol=1e-2, atol=1e-3)


def test_o2_steps_on_from_loaded_weights() -> None:
    """The float32 copies keep the initial weights: the first step after a resume undoes what was loaded."""
    model, optimizer, _ = make()
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    saved = {name: tensor + 1 for name, tensor in model.state_dict().items()}
    nn.ModuleDict({"inner": model}).load_state_dict({f"inner.{name}": t for name, t in saved.items()})
    masters = list(amp.master_params(optimizer))
    for param, master in zip(model.parameters(), masters, strict=True):
        assert torch.equal(master, param.float())
    with torch.no_grad():
        masters[0][0, 0].add_(1e-5)
    exact = [master.clone() for master in masters]
    model.load_state_dict(model.state_dict())  # the same weights: what float16 cannot hold stays
    assert all(torch.equal(master, before) for master, before in zip(masters, exact, strict=True))


def test_o2_steps_on_from_weights_that_are_loaded_into_a_part_of_the_model() -> None:
    """A pretrained body that is loaded after `initialize` is undone by the first step."""
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    body = model[0]
    body.load_state_dict({name: tensor + 1 for name, tensor in body.state_dict().items()})
    for param, master in zip(model.parameters(), amp.master_params(optimizer), strict=True):
        assert torch.equal(master, param.float())


def test_state_round_trip_and_apex_checkpoints() -> None:
    """A state from apex is taken; one with another number of losses is refused and changes nothing."""
    model, optimizer, _ = make()
    amp.initialize(model, optimizer, opt_level="O1", num_losses=2)
    saved = {f"loss_scaler{i}": {"loss_scale": 2.0**i, "unskipped": i} for i in (0, 1)}
    amp.load_state_dict(saved)
    assert amp.state_dict() == saved
    with pytest.raises(RuntimeError, match="The state has 1 loss scale"):
        amp.load_state_dict({"loss_scaler0": {"loss_scale": 8.0, "unskipped": 0}})
    assert amp.state_dict() == saved


def scale_after(scale: float, unskipped: int, value: float, **options: float | None) -> float:
    """The loss scale after a step from a loaded one, with the factor `value` in the loss."""
    model, optimizer, x = make()
    amp.initialize(model, optimizer, opt_level="O1", **options)
    amp.load_state_dict({"loss_scaler0": {"loss_scale": scale, "unskipped": unskipped}})
    with amp.scale_loss(model(x).float().sum() * value, optimizer) as scaled_loss:
        scaled_loss.backward()
    return amp.state_dict()["loss_scaler0"]["loss_scale"]


def test_a_dynamic_scale_keeps_its_bounds() -> None:
    """A scale grows or shrinks past what the program allows, or does not move within it."""
    assert scale_after(2.0**10, 1999, 1.0) == 2.0**11
    assert scale_after(2.0**10, 1999, 1.0, max_loss_scale=1500.0) == 1500.0
    assert scale_after(2.0**24, 1999, 1e-9) == 2.0**24
    assert scale_after(2.0**10, 0, float("inf")) == 2.0**9
    assert scale_after(2.0**10, 0, float("inf"), min_loss_scale=700.0) == 700.0


def test_a_patched_forward_keeps_its_signature() -> None:
    """Trainers that pass a model the columns that its forward names pass none."""

    class Model(nn.Linear):
        def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            return super().forward(x) * scale

    model = amp.initialize(Model(2, 2), opt_level="O2")
    assert [*inspect.signature(model.forward).parameters] == ["x", "scale"]
    assert model(torch.ones(1, 2), scale=0.0).tolist() == [[0.0, 0.0]]


def test_bad_arguments() -> None:
    """Unknown levels, contradictions and models that are half already get an error that says what to do."""
    model, optimizer, _ = make()
    with pytest.raises(RuntimeError, match="Unexpected optimization level 01"):
        amp.initialize(model, optimizer, opt_level="01")
    with pytest.raises(RuntimeError, match="master_weights does not apply"):
        amp.initialize(model, optimizer, opt_level="O1", master_weights=True)
    with pytest.raises(RuntimeError, match=r"do not call \.half\(\)"):
        amp.initialize(nn.Linear(1, 1).half(), opt_level="O2")


def test_disabled_does_nothing() -> None:
    """enabled=False returns everything as it was, and scale_loss yields the loss itself."""
    model, optimizer, x = make()
    assert amp.initialize(model, optimizer, enabled=False) == (model, optimizer)
    loss = model(x).sum()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        assert scaled_loss is loss
