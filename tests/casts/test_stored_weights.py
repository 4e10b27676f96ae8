"""master_weights with bfloat16 storage: no update is lost, and float32 is not kept."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from amp_core import GradScaler, StoredWeights, autocast, master_weights
from amp_core.casts import stand_ins, stored

STORAGES = ["remainder", "stochastic", "kahan"]
LOW, WIDE = torch.bfloat16, torch.float32

ALL = sorted(
    cls.__name__
    for cls in vars(torch.optim).values()
    if isinstance(cls, type) and cls is not torch.optim.Optimizer
)

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9, nesterov=True, weight_decay=0.01),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9, fused=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-3),
    "Muon": lambda p: torch.optim.Muon(p, lr=1e-3),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-3),
}


def make(matrices: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    if matrices:  # all that Muon takes
        return nn.Sequential(nn.Linear(6, 5, bias=False), nn.ReLU(), nn.Linear(5, 3, bias=False))
    return nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.ReLU(), nn.Linear(5, 3))


def set_grads(model: nn.Module, step: int) -> None:
    """Give every parameter a gradient that bfloat16 holds exactly."""
    generator = torch.Generator().manual_seed(step)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator).to(LOW).to(p.dtype)


def bits(tensors: dict[str, Tensor]) -> dict[str, list[int]]:
    return {
        k: t.detach().contiguous().view(torch.int16 if t.dtype is LOW else torch.int32).flatten().tolist()
        for k, t in tensors.items()
    }


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("bucket", [1, 2**30])
def test_remainder_follows_float32_bit_for_bit(
    name: str, bucket: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights, and so every later step, differ from those of the float32 optimizer."""
    monkeypatch.setattr(stand_ins, "bucket_nbytes", lambda device_type: bucket)
    exact, model = make(name == "Muon"), make(name == "Muon")
    groups = lambda m: [{"params": [p]} for p in m.parameters()]
    reference, optimizer = OPTIMIZERS[name](groups(exact)), OPTIMIZERS[name](groups(model))
    masters = master_weights(model, optimizer, "remainder")
    for step in range(12):
        set_grads(exact, step)
        set_grads(model, step)
        reference.step()
        optimizer.step()
    assert {p.dtype for p in model.parameters()} == {LOW}
    assert bits(masters.float32_weights()) == bits(dict(exact.named_parameters()))


@pytest.mark.parametrize("dtype", [LOW, WIDE])
def test_parameters_that_join_the_optimizer_later(dtype: torch.dtype) -> None:
    """Layers that are unfrozen later lose their updates, or the first layers' state."""
    exact, model = make().to(LOW).float(), make().to(LOW).to(dtype)
    reference, optimizer = (torch.optim.AdamW(m[3].parameters(), lr=1e-4) for m in (exact, model))
    masters = master_weights(model, optimizer, "remainder", keep=["1.bias"])
    for step in range(40):
        if step == 5:
            reference.add_param_group({"params": [*exact[:3].parameters()], "lr": 1e-4})
            optimizer.add_param_group({"params": [*model[:3].parameters()], "lr": 1e-4})
        set_grads(exact, step)
        set_grads(model, step)
        reference.step()
        optimizer.step()
    wide = {key: param.detach() for key, param in model.named_parameters()} | masters.float32_weights()
    assert [key for key, weight in wide.items() if weight.dtype is LOW] == ["1.bias"] * (dtype is LOW)
    wide.pop("1.bias")
    assert bits(wide) == bits({key: p for key, p in exact.named_parameters() if key in wide})


def append(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    model.append(nn.Linear(3, 3, dtype=LOW))
    optimizer.add_param_group({"params": [*model[4].parameters()]})


def replace(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    model.load_state_dict({key: p.clone() for key, p in model.state_dict().items()}, assign=True)
    optimizer.param_groups[0]["params"] = [*model.parameters()]


@pytest.mark.parametrize("change", [append, replace])
def test_parameters_that_join_the_model_later(change: Callable[..., None]) -> None:
    """Layers that are added to the model later lose every update, and nothing says so."""
    model = make().to(LOW)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    masters = master_weights(model, optimizer, "remainder", keep=["1.bias"], lost_updates=True)
    change(model, optimizer)
    for p in model.parameters():
        p.detach().fill_(1.0)
    for _ in range(100):
        for p in model.parameters():
            p.grad = torch.full_like(p, 0.001)
        optimizer.step()
    weights = dict(model.named_parameters())
    kept = weights.pop("1.bias")
    assert masters.float32_weights().keys() == masters.lost_updates().keys() == weights.keys()
    assert kept.mean() == 1.0
    assert all(0.89 < p.float().mean() < 0.91 for p in weights.values())


def test_layers_that_the_optimizer_has_before_or_after_the_model() -> None:
    """They lose every update, or stop the step, and counts have the names of layers that have moved."""
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3))).to(LOW)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    masters = master_weights(model, optimizer, "remainder", lost_updates=True)
    early = nn.Linear(3, 3, dtype=LOW)
    optimizer.add_param_group({"params": [*early.parameters()]})
    stepped = [*model.parameters(), *early.parameters()]
    del model[2]

    def step(number: int = 1) -> None:
        for _ in range(number):
            for p in stepped:
                p.grad = torch.full_like(p, 0.001)
            optimizer.step()

    step()
    model.append(early)
    for p in stepped:
        p.detach().fill_(1.0)
    step(50)
    del model[0]
    model.append(nn.Linear(3, 3, dtype=LOW))
    optimizer.add_param_group({"params": [*model[2].parameters()]})
    step(50)
    assert all(0.89 < p.float().mean() < 0.91 for p in stepped)
    assert {*masters.float32_weights()} == {*model.state_dict()}
    assert {*masters.lost_updates()} == {*model[:2].state_dict()}  # the last layer has taken no step


def test_float32_weights_have_the_names_of_the_model_now() -> None:
    """Layers that changed places have each other's weights in a checkpoint."""
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    masters = master_weights(model, optimizer, "remainder")
    before = masters.float32_weights()
    model[0], model[1] = model[1], model[0]
    model.insert(1, nn.Tanh())
    model.pop(3)
    now = masters.float32_weights()
    moved = {"0.weight": "1.weight", "2.weight": "0.weight", "0.bias": "1.bias", "2.bias": "0.bias"}
    assert all(torch.equal(now[new], before[old]) for new, old in moved.items())


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("how", STORAGES)
@pytest.mark.parametrize("state_dtype", [WIDE, LOW])
def test_every_optimizer_of_torch_works_or_is_refused(name: str, how: str, state_dtype: torch.dtype) -> None:
    """One that steps otherwise than the rest would lose updates, or its state, without a word."""
    exact, model = make(matrices=True), make(matrices=True)
    make_optimizer = getattr(torch.optim, name)
    reference, optimizer = (make_optimizer(m.parameters(), lr=1e-3) for m in (exact, model))
    if name == "LBFGS":
        with pytest.raises(ValueError, match="LBFGS"):
            master_weights(model, optimizer, how, state_dtype=state_dtype)  # type: ignore[call-overload]
        return
    sparse = name == "SparseAdam"
    masters = master_weights(model, optimizer, how, state_dtype=state_dtype)  # type: ignore[call-overload]
    for step in range(4):
        for m in (exact, model):
            set_grads(m, step)
            for p in m.parameters() if sparse else ():
                p.grad = p.grad.to_sparse()
        reference.step()
        optimizer.step()
    assert {p.dtype for p in model.parameters()} == {LOW}
    wide = masters.float32_weights()
    for key, p in exact.named_parameters():
        # Stochastic rounding may be off by a step of bfloat16 at each of the four.
        torch.testing.assert_close(wide[key], p.detach(), rtol=0, atol=0.01)
        if how == "remainder" and state_dtype is WIDE:
            assert torch.equal(wide[key], p)


@pytest.mark.parametrize(
    ("how", "expected", "tolerance"),
    [
        ("nearest", 1.0, 0),
        ("remainder", 0.9, 2e-3),
        ("stochastic", 0.9, 2e-3),
        ("kahan", 0.9, 2e-3),
    ],
)
def test_small_updates_arrive(how: str, expected: float, tolerance: float) -> None:
    """100 updates of -0.001 on 1.0: plain bfloat16 loses them all."""
    model = nn.ParameterDict({"w": nn.Parameter(torch.ones(4000, dtype=LOW))})
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    if how != "nearest":
        master_weights(model, optimizer, how)  # type: ignore[call-overload]
    for _ in range(100):
        model["w"].grad = torch.full((4000,), 0.001, dtype=LOW)
        optimizer.step()
    assert abs(model["w"].float().mean().item() - expected) <= tolerance


@pytest.mark.parametrize("how", STORAGES)
@pytest.mark.parametrize("state_dtype", [WIDE, LOW])
@pytest.mark.parametrize("name", ["SGD", "AdamW", "AdamW fused", "Adafactor"])
def test_resumes_bit_for_bit(how: str, state_dtype: torch.dtype, name: str) -> None:
    """Torch casts loaded states to the dtype of the parameter, which would round them."""

    def start() -> tuple[nn.Module, torch.optim.Optimizer, StoredWeights]:
        model = make()
        optimizer = OPTIMIZERS[name](model.parameters())
        return model, optimizer, master_weights(model, optimizer, how, state_dtype=state_dtype)  # type: ignore[call-overload]

    def run(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            set_grads(model, step)
            optimizer.step()

    model, optimizer, masters = start()
    run(model, optimizer, range(5))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    run(model, optimizer, range(5, 10))
    again, other, theirs = start()
    again.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    run(again, other, range(5, 10))
    assert bits(dict(model.named_parameters())) == bits(dict(again.named_parameters()))
    assert bits(masters.float32_weights()) == bits(theirs.float32_weights())
    moments = [s[k] for s in optimizer.state.values() for k in ("exp_avg", "exp_avg_sq") if k in s]
    assert {t.dtype for t in moments} <= {state_dtype}


@pytest.mark.parametrize("how", ["remainder", "kahan"])
def test_a_checkpoint_of_the_plain_optimizer(how: Any) -> None:
    """What the weights lacked before the load is added to those of the checkpoint."""
    plain, model = make().to(LOW), make()
    reference, optimizer = (torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (plain, model))
    masters = master_weights(model, optimizer, how)
    set_grads(plain, 0)
    reference.step()
    model.load_state_dict(plain.state_dict())
    optimizer.load_state_dict(reference.state_dict())
    for name, weight in masters.float32_weights().items():
        assert torch.equal(weight, plain.get_parameter(name).float())


@pytest.mark.parametrize("max_norm", [None, 0.01])
@pytest.mark.parametrize("poison", [1.0, torch.inf])
def test_gradients_after_a_fused_step(max_norm: float | None, poison: float) -> None:
    """Gradients that a program logs after the step are larger than without the storage, by the scale."""
    seen: list[dict[str, Tensor]] = []
    for is_stored in (False, True):
        model = make().to(LOW)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        if is_stored:
            master_weights(model, optimizer, "remainder")
        scaler = GradScaler("cpu", init_scale=1024.0)
        loss = model(torch.ones(2, 6, dtype=LOW)).float().square().mean()
        scaler.scale(loss * poison).backward()
        scaler.step(optimizer, max_norm=max_norm)
        seen.append({key: p.grad for key, p in model.named_parameters() if p.grad is not None})
    for key, grad in seen[0].items():
        torch.testing.assert_close(seen[1][key], grad, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("how", STORAGES)
@pytest.mark.parametrize("fused", [True, False])
def test_a_skipped_step_changes_nothing(how: str, fused: bool) -> None:
    """An overflow must leave weights and what is kept, whether the device decides or the host."""
    model = make()
    model.register_parameter("many", nn.Parameter(torch.randn(4096)))  # one in a thousand is nearly a tie
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    masters = master_weights(model, optimizer, how)  # type: ignore[call-overload]
    scaler = GradScaler("cpu", init_scale=8.0)
    before = {}
    for poison in (False, True, False):
        optimizer.zero_grad()
        with autocast("cpu"):
            loss = model(torch.ones(2, 6)).float().square().mean() + model.many.float().mean()
        scaler.scale(loss).backward()
        if poison:
            before = bits({**masters.float32_weights(), "low": model.many.detach().clone()})
            next(model.parameters()).grad.fill_(torch.inf)  # type: ignore[union-attr]
        scaler.step(optimizer)
        scaler.update()
        if poison:
            assert bits({**masters.float32_weights(), "low": model.many.detach().clone()}) == before
    assert bits(masters.float32_weights())["many"] != before["many"]


@pytest.mark.parametrize(("how", "beside"), [("remainder", 2), ("stochastic", 0), ("kahan", 2)])
@pytest.mark.parametrize("state_dtype", [WIDE, LOW])
def test_bytes_per_parameter(how: str, beside: int, state_dtype: torch.dtype) -> None:
    """The point of the storages: what stays between two steps, counted."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    count = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters())
    masters = master_weights(model, optimizer, how, state_dtype=state_dtype)  # type: ignore[call-overload]
    set_grads(model, 0)
    optimizer.step()
    states = [v for s in optimizer.state.values() for k, v in s.items() if k != "step"]
    stored = sum(t.nbytes for t in [*model.parameters(), *states])
    assert stored == count * (2 + beside + 2 * state_dtype.itemsize)
    assert masters.nbytes() == count * beside


def test_hooks_closures_and_schedulers_see_one_step() -> None:
    """Buckets are an inner matter: a hook that ran per bucket would count wrong."""
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    master_weights(model, optimizer, "kahan")
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch))
    seen: list[int] = []
    optimizer.register_step_post_hook(lambda o, *_: seen.append(len(o.param_groups[0]["params"])))

    def closure() -> float:
        set_grads(model, 0)
        assert torch.is_grad_enabled()
        return 4.0

    assert optimizer.step(closure) == 4.0
    scheduler.step()
    assert seen == [6]
    assert all(p.grad is not None for p in model.parameters())


def test_what_is_kept_as_it_is() -> None:
    """Norms may stay in float32, and parameters without a gradient are not touched."""
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    masters = master_weights(model, optimizer, "remainder", keep=["1.*"])
    assert model[1].weight.dtype is WIDE
    set_grads(model, 0)
    model[3].bias.grad = None
    before = bits(dict(model.named_parameters()))
    optimizer.step()
    after = bits(dict(model.named_parameters()))
    assert after["3.bias"] == before["3.bias"]
    assert after["1.weight"] != before["1.weight"]
    assert "1.weight" not in masters.float32_weights()


@pytest.mark.parametrize("storage", STORAGES)
def test_norms_with_running_statistics_train(storage: Any) -> None:
    """The kernel of batch norms refuses bfloat16 weights beside float32 statistics."""
    torch.manual_seed(0)
    instance = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
    free = nn.BatchNorm2d(4, track_running_stats=False)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), instance, free, nn.Conv2d(4, 2, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    masters = master_weights(model, optimizer, storage)
    before = model[1].weight.clone()
    for mode in (True, False):
        with autocast("cpu", dtype=LOW):
            loss = model.train(mode)(torch.randn(2, 3, 9, 9)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert [p.dtype for p in model.parameters()] == [LOW] * 2 + [WIDE] * 4 + [LOW] * 4
    assert not model[1].weight.equal(before)
    assert masters.float32_weights().keys() == {n for n, p in model.named_parameters() if p.dtype is LOW}


def test_the_step_record_has_the_lost_updates() -> None:
    """Each record must keep the counts of its own step, and none if nobody counts."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = GradScaler("cpu", init_scale=1.0)
    for lr, lost_updates in ((1e-12, True), (0.5, True), (0.5, False)):
        optimizer.param_groups[0]["lr"] = lr
        with master_weights(model, optimizer, "stochastic", lost_updates=lost_updates):
            scaler.scale(torch.zeros(1, requires_grad=True))
            set_grads(model, 0)
            scaler.step(optimizer)
            scaler.update()
    first, second, third = scaler.history
    assert set(first.lost_updates) == {name for name, _ in model.named_parameters()}
    assert sum(first.lost_updates.values()) == 0  # below float32's own precision
    assert max(second.lost_updates.values()) < 0.2
    assert third.lost_updates is None
    assert second.as_dict()["lost_updates"] == second.lost_updates


def test_remove_returns_to_the_plain_optimizer() -> None:
    """After it, the step is torch's own on the bfloat16 weights."""
    model, plain = make().to(LOW), make().to(LOW)
    optimizer, reference = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, plain))
    with master_weights(model, optimizer, "kahan"):
        pass
    for m, o in ((model, optimizer), (plain, reference)):
        set_grads(m, 0)
        o.step()
    assert bits(dict(model.named_parameters())) == bits(dict(plain.named_parameters()))


def test_remove_keeps_the_number_of_the_step() -> None:
    """In bfloat16 it stops at 256, so that Adam's corrections of its moments and its decay stay there."""
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with master_weights(model, optimizer, "stochastic"):
        set_grads(model, 0)
        optimizer.step()
        for state in optimizer.state.values():
            state["step"].fill_(257.0)
    for state in optimizer.state.values():
        assert state["step"].dtype is WIDE
        assert state["step"] == 257.0
        assert state["exp_avg"].dtype is LOW


def test_an_optimizer_without_states_has_none() -> None:
    """FSDP1 refuses the state of a parameter that is there and empty."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    master_weights(model, optimizer, "stochastic")
    set_grads(model, 0)
    optimizer.step()
    assert not optimizer.state


def test_a_compiled_model_trains() -> None:
    """A graph must read the bfloat16 weights that the last step wrote."""
    model, eager = make(), make()
    losses = []
    for m, call in ((model, torch.compile(model, backend="aot_eager")), (eager, eager)):
        optimizer = torch.optim.AdamW(m.parameters(), lr=1e-2)
        with master_weights(m, optimizer, "stochastic"):
            for _ in range(3):
                optimizer.zero_grad()
                with autocast("cpu"):
                    loss = call(torch.ones(2, 6)).float().square().mean()
                loss.backward()
                optimizer.step()
        losses.append(loss.item())
    assert losses[0] == losses[1]


def test_bad_calls_say_what_is_wrong() -> None:
    """A wrong argument must not end in training of another precision."""
    model = make()
    optimizer = torch.optim.AdamW(model.parameters())
    other = nn.Linear(2, 2)
    for call, error, text in (
        (lambda: master_weights(model, optimizer, "fp8"), ValueError, "storages are fp32, remainder"),
        (lambda: master_weights(model, None, "kahan"), TypeError, "needs the optimizer, not NoneType"),
        (lambda: master_weights(other, optimizer, "kahan"), ValueError, "No float32 or bfloat16 parameter"),
        (
            lambda: master_weights(model, optimizer, "kahan", state_dtype=torch.float16),
            ValueError,
            "state_dtype must be",
        ),
        (
            lambda: master_weights(model, torch.optim.LBFGS(model.parameters()), "kahan"),
            ValueError,
            "LBFGS",
        ),
    ):
        with pytest.raises(error, match=text):
            call()  # type: ignore[no-untyped-call]
    assert {p.dtype for p in model.parameters()} == {WIDE}
    master_weights(model, optimizer, "kahan")
    with pytest.raises(RuntimeError, match="has replaced optimizer"):
        master_weights(model, optimizer, "kahan")


class OutOfMemory(Tensor):
    """A gradient that cannot be copied."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (Tensor.copy_, Tensor.float):
            raise torch.OutOfMemoryError
        return super().__torch_function__(function, types, args, kwargs or {})


@pytest.mark.parametrize("how", STORAGES)
@pytest.mark.parametrize("begun", [True, False])
def test_a_step_that_runs_out_of_memory_changes_nothing(how: str, begun: bool) -> None:
    """What the weights lack, and the moments, would be lost with the copies that the step had begun."""
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    masters = master_weights(model, optimizer, how)
    if begun:
        set_grads(model, 0)
        optimizer.step()

    def kept() -> Any:
        states = optimizer.state_dict()["state"].items()
        return masters.float32_weights(), {number: state for number, state in states if state}

    before = copy.deepcopy(kept())
    set_grads(model, 1)
    last = [*model.parameters()][-1]
    last.grad = last.grad.as_subclass(OutOfMemory)
    with pytest.raises(torch.OutOfMemoryError):
        optimizer.step()
    torch.testing.assert_close(kept(), before, rtol=0, atol=0)
    set_grads(model, 1)
    optimizer.step()


@pytest.mark.parametrize("how", STORAGES)
@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize("broken_off", [torch.OutOfMemoryError, KeyboardInterrupt])
def test_memory_runs_out_where_the_states_are_rounded(
    how: str, begun: bool, broken_off: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parameters after the first lose their moments, and what their weights lack, in silence."""

    def trained(fails: bool) -> tuple[nn.Module, dict[int, dict[str, Any]]]:
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        master_weights(model, optimizer, how, state_dtype=LOW)
        params, rounded = [*model.parameters()], stored.narrow_state

        def narrow(value: Any, param: Tensor, key: int) -> Any:
            if param is params[1]:
                raise broken_off
            return rounded(value, param, key)

        for number in range(3):
            set_grads(model, number)
            with contextlib.ExitStack() as stack:
                if fails and number == (1 if begun else 0):
                    stack.enter_context(pytest.raises(broken_off))
                    patch = stack.enter_context(monkeypatch.context())
                    patch.setattr(stored, "narrow_state", narrow)
                optimizer.step()
        return model, optimizer.state_dict()["state"]

    (model, wanted), (other, got) = trained(False), trained(True)
    assert [*wanted] == [*got]
    assert all([*wanted[number]] == [*got[number]] for number in wanted)
    for number, (one, two) in enumerate(zip(model.parameters(), other.parameters(), strict=True)):
        if number != 1:
            assert torch.equal(one, two)
            torch.testing.assert_close(got[number], wanted[number], rtol=0, atol=0)


class Sparse(nn.Module):
    def __init__(self, layout: torch.layout) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4).to_sparse(layout=layout))


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(TwoTensor(torch.ones(4, 4), torch.ones(4, 4)))


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize(
    ("last", "reason"),
    [
        (lambda: nn.LazyLinear(2), "has no memory yet"),
        (lambda: nn.Linear(4, 2, device="meta"), "has no memory yet"),
        (lambda: Sparse(torch.sparse_coo), "has the layout torch.sparse_coo"),
        (lambda: Sparse(torch.sparse_csr), "has the layout torch.sparse_csr"),
        (Two, "is a TwoTensor, whose memory only the library"),
    ],
    ids=["lazy", "meta", "coo", "csr", "wrapper"],
)
def test_weights_are_refused_before_others_are_rounded(last: Callable[[], nn.Module], reason: str) -> None:
    """The error comes when the first layers are in bfloat16 already, or is one of a kernel."""
    model = nn.Sequential(nn.Linear(4, 4), last())
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match=rf"1\.weight {reason}"):
        master_weights(model, optimizer, "remainder")
    assert {p.dtype for p in model.parameters()} == {WIDE}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_parameters_with_one_memory_are_refused(dtype: torch.dtype) -> None:
    """Of the updates of both, which plain steps add up, one is lost; or one weight becomes two."""
    model = nn.Sequential(nn.Linear(4, 4, dtype=dtype), nn.Linear(4, 4, dtype=dtype))
    for name in ("empty", "also_empty"):
        model.register_parameter(name, nn.Parameter(torch.empty(0, dtype=dtype)))
    model[1].weight = model[0].weight
    model.load_state_dict(model.state_dict(), assign=True)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match=r"0\.weight and 1\.weight have the same memory"):
        master_weights(model, optimizer, "remainder")
    assert model[0].bias.dtype is dtype
    model[1].weight = model[0].weight
    master_weights(model, torch.optim.AdamW(model.parameters()), "remainder").remove()


def test_parameters_draw_random_bits_of_their_own() -> None:
    """All parameters are rounded in the same direction, so their errors add up."""
    model = nn.ParameterList([nn.Parameter(torch.ones(1000)) for _ in range(2)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with master_weights(model, optimizer, "stochastic"):
        for param in model.parameters():
            param.grad = torch.full((1000,), 2.0**-9, dtype=torch.bfloat16)
        optimizer.step()
    one, other = (param == 1.0 for param in model.parameters())
    assert 350 < int((one != other).sum()) < 650


class Averaging(torch.optim.Optimizer):
    """Keeps the new weight twice in its state."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            param.sub_(param.grad)
            self.state[param].update(first=param.clone(), second=param.clone())


def test_steps_and_states_draw_random_bits_of_their_own() -> None:
    """A step rounds each element as the step before did, or moments as their weight, so errors add up."""
    param = nn.Parameter(torch.ones(1000))
    optimizer = Averaging([param], {})
    model, rounded = nn.ParameterList([param]), []
    with master_weights(model, optimizer, "stochastic", state_dtype=torch.bfloat16):
        for _ in range(2):
            with torch.no_grad():
                param.fill_(1.0)
            param.grad = torch.full((1000,), 2.0**-9, dtype=torch.bfloat16)
            optimizer.step()
            state = optimizer.state[param]
            rounded += [each == 1.0 for each in (param, state["first"], state["second"])]
    for i, one in enumerate(rounded):
        assert 350 < int(one.sum()) < 650
        for other in rounded[:i]:
            assert 350 < int((one != other).sum()) < 650
