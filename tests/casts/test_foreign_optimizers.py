"""Optimizers of other packages: nested states, counts of their own, parameters that belong together."""

from __future__ import annotations

import contextlib
import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import amp_core
from amp_core import GradScaler, autocast, cached_casts, count_lost_updates, master_weights
from amp_core.common.containers import tensors_in


class Foreign(Optimizer):
    """Momentum in a list, a float32 factor, counts in the group and beside the parameters; steps by pairs."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "total": torch.zeros(())})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.state["calls"] = self.state.get("calls", 0) + 1
        for group in self.param_groups:
            group["total"] += 1
            group["count"] = group.get("count", 0) + 1
            for weight, bias in zip(group["params"][::2], group["params"][1::2], strict=True):
                assert weight.shape[0] == bias.shape[0]
                for param in (weight, bias):
                    if param.grad is not None:
                        self._step(param, group["lr"] / (1 + group["count"]) / (1 + group["total"]))
        if closure is not None:
            with torch.enable_grad():
                closure()
        return loss

    def _step(self, param: Tensor, lr: Any) -> None:
        state = self.state[param]
        if not state:
            state["momentum"] = [torch.zeros_like(param), {"slow": torch.zeros_like(param)}]
            state["factor"] = torch.ones((), dtype=torch.float32)
        fast, slow = state["momentum"][0], state["momentum"][1]["slow"]
        fast.mul_(0.9).add_(param.grad)
        slow.mul_(0.99).add_(param.grad)
        state["factor"].mul_(0.999)
        param.view(-1).sub_((lr * state["factor"] * (fast + slow)).view(-1).to(param.dtype))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for param, number in zip(group["params"], saved["params"], strict=True):
                assert self.state[param].keys() == state_dict["state"].get(number, {}).keys()


class Stateless(Foreign):
    """Keeps nothing for a parameter."""

    def _step(self, param: Tensor, lr: Any) -> None:
        param.sub_(lr * param.grad)


class Restoring(Foreign):
    """Puts integer tensors back as they were saved, as optimizers of pytorch_optimizer do."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for number, param in enumerate(p for group in self.param_groups for p in group["params"]):
            for key, value in state_dict["state"].get(number, {}).items():
                if isinstance(value, Tensor) and not value.is_floating_point():
                    self.state[param][key] = value


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())


def give_gradients(model: nn.Module, number: int) -> None:
    """Give gradients that bfloat16 holds; the first weight has none in some steps."""
    generator = torch.Generator().manual_seed(number)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator).bfloat16().to(param.dtype)
    if number % 2:
        model.first.weight.grad = None


def trained(kind: type[Foreign], storage: str | None, resumed: bool) -> tuple[dict[str, Tensor], Foreign]:
    model = Net()
    optimizer = kind(model.parameters())
    handle = None if storage is None else master_weights(model, optimizer, storage)
    for number in range(6):
        if resumed and number == 3:
            file = io.BytesIO()
            torch.save((model.state_dict(), optimizer.state_dict()), file)
            file.seek(0)
            saved = torch.load(file)
            model = Net()
            optimizer = kind(model.parameters())
            handle = None if storage is None else master_weights(model, optimizer, storage)
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        give_gradients(model, number)
        optimizer.step()
    return dict(model.named_parameters()) if handle is None else handle.float32_weights(), optimizer


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("kind", [Foreign, Stateless, Restoring])
def test_remainder_follows_float32(kind: type[Foreign], resumed: bool) -> None:
    """Nested states come back rounded, the load fails, or parameters without a gradient break the pairs.

    With a class that restores integers itself, the step fails on the bytes of a checkpoint.
    """
    wanted, plain = trained(kind, None, resumed)
    got, stored = trained(kind, "remainder", resumed)
    for name, weight in wanted.items():
        assert torch.equal(weight, got[name])
    params = [each.param_groups[0]["params"] for each in (plain, stored)]
    for one, other in zip(*params, strict=True):
        states = zip(tensors_in(plain.state.get(one)), tensors_in(stored.state[other]), strict=False)
        assert all(torch.equal(mine, theirs) for mine, theirs in states)  # what is kept comes last


class Hoarding(Stateless):
    """Steps on the parameters that it got at first."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.own = [*self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.own:
            self._step(param, 0.05)


@pytest.mark.parametrize("storage", ["remainder", "stochastic", "kahan"])
def test_an_optimizer_that_has_parameters_of_its_own(storage: Any) -> None:
    """Each of its updates is overwritten with the weight from before, and nothing says so."""
    model = Net()
    optimizer = Hoarding(model.parameters())
    masters = master_weights(model, optimizer, storage)
    give_gradients(model, 0)
    before = masters.float32_weights()
    with pytest.raises(RuntimeError, match=r"Hoarding steps on weights that it has kept .* storage='fp32'"):
        optimizer.step()
    assert optimizer.param_groups[0]["params"] == [*model.parameters()]
    if storage != "stochastic":
        torch.testing.assert_close(masters.float32_weights(), before, rtol=0, atol=0)


def test_nested_states_return_to_bfloat16() -> None:
    """After `remove`, an optimizer mixes float32 momentum with bfloat16 gradients."""
    model = Net()
    optimizer = Foreign(model.parameters())
    with master_weights(model, optimizer, "kahan"):
        give_gradients(model, 0)
        optimizer.step()
    momentum = optimizer.state[model.first.weight]["momentum"]
    assert {tensor.dtype for tensor in tensors_in(momentum)} == {torch.bfloat16}


def snapshot(optimizer: Foreign) -> list[Any]:
    groups = [{key: value for key, value in g.items() if key != "params"} for g in optimizer.param_groups]
    return copy.deepcopy([*optimizer.state.values(), groups])


def check_unchanged(before: list[Any], optimizer: Foreign) -> None:
    after = snapshot(optimizer)
    assert str(before) == str(after)
    for one, other in zip(tensors_in(before), tensors_in(after), strict=True):
        assert one.dtype is other.dtype
        assert torch.equal(one, other)


def started() -> tuple[Net, Foreign]:
    """Return a bfloat16 model and its optimizer, whose state has float32 tensors too."""
    model = Net().bfloat16()
    optimizer = Foreign(model.parameters())
    for number in range(2):
        give_gradients(model, number)
        optimizer.step()
    return model, optimizer


class Counting(Optimizer):
    """Counts, for each element, the steps that lowered it."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            lowered = self.state[param].setdefault("lowered", torch.zeros_like(param, dtype=torch.int64))
            lowered += param.grad > 0
            param -= param.grad


def test_whole_numbers_for_each_element_stay_exact() -> None:
    """state_dtype=bfloat16 rounds counts as it rounds moments, or fails on them."""
    model = nn.Linear(3, 2)
    optimizer = Counting(model.parameters())
    with master_weights(model, optimizer, "stochastic", state_dtype=torch.bfloat16):
        for _ in range(300):
            for param in model.parameters():
                param.grad = torch.full_like(param, 2.0**-10)
            optimizer.step()
    for state in optimizer.state.values():
        assert state["lowered"].dtype is torch.int64
        assert torch.equal(state["lowered"], torch.full_like(state["lowered"], 300))


def test_counting_lost_updates_leaves_the_step_as_it_is() -> None:
    """The step on copies moves momenta, sums and counts that the real step then moves again."""
    (model, optimizer), (counted, its_optimizer) = started(), started()
    with count_lost_updates(counted, its_optimizer) as lost:
        for net, each in ((model, optimizer), (counted, its_optimizer)):
            give_gradients(net, 2)
            each.step()
        assert lost.lost_updates()
    check_unchanged(snapshot(optimizer), its_optimizer)
    for one, other in zip(model.parameters(), counted.parameters(), strict=True):
        assert torch.equal(one, other)


class Noisy(Foreign):
    """Adds noise to each step, as Langevin dynamics does."""

    def _step(self, param: Tensor, lr: Any) -> None:
        param.sub_(lr * param.grad + 0.1 * torch.randn(param.shape).to(param.dtype))


class Remembering(Foreign):
    """Counts its steps and keeps its rate in attributes, one of them from the first step on."""

    calls, rate = 0, 1.0

    def _step(self, param: Tensor, lr: Any) -> None:
        self.calls += 1
        self.rate *= 0.5
        super()._step(param, lr * self.rate / self.calls)


def test_counting_lost_updates_leaves_the_attributes_of_the_optimizer() -> None:
    """An optimizer that counts its steps itself counts each twice, and trains in another way."""
    model, plain = Net().bfloat16(), Net().bfloat16()
    optimizers = [Remembering(net.parameters()) for net in (model, plain)]
    with count_lost_updates(model, optimizers[0]) as counted:
        for net, optimizer in [(model, optimizers[0]), (plain, optimizers[1])] * 3:
            for number, param in enumerate(net.parameters()):
                param.grad = torch.full_like(param, 0.1 * number)
            optimizer.step()
    assert counted.lost_updates().keys() == dict(model.named_parameters()).keys()
    assert vars(optimizers[0])["calls"] == vars(optimizers[1])["calls"] == 12
    assert optimizers[0].rate == optimizers[1].rate
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


def test_counting_lost_updates_draws_no_random_numbers() -> None:
    """The step on copies takes the noise of the real step, which makes another training of it."""
    results = []
    for counts in (False, True):
        model = Net().bfloat16()
        optimizer = Noisy(model.parameters())
        torch.manual_seed(1)
        with count_lost_updates(model, optimizer) if counts else contextlib.nullcontext():
            for _ in range(2):
                give_gradients(model, 0)
                optimizer.step()
        results.append([*model.parameters(), torch.rand(3)])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("wide", [False, True])
def test_counting_lost_updates_of_parameters_that_belong_together(wide: bool) -> None:
    """The step on copies misses what has no gradient or is float32: it fails, or is another step."""
    (model, optimizer), (counted, its_optimizer) = started(), started()
    for net in (model, counted):
        net.second.bias.data = net.second.bias.data.to(torch.float32 if wide else torch.bfloat16)
    with count_lost_updates(counted, its_optimizer) as lost:
        for net, each in ((model, optimizer), (counted, its_optimizer)):
            give_gradients(net, 1)
            each.step()
    low = ["first.bias", "second.weight", *([] if wide else ["second.bias"])]
    assert [*lost.lost_updates()] == low
    check_unchanged(snapshot(optimizer), its_optimizer)
    for one, other in zip(model.parameters(), counted.parameters(), strict=True):
        assert torch.equal(one, other)


def test_compare_restores_states_and_weights() -> None:
    """States come back in the dtype of the parameter; weights as a view of them was kept, in mid-step."""
    model, optimizer = started()
    before, weights = snapshot(optimizer), copy.deepcopy(model.state_dict())

    def step() -> Tensor:
        optimizer.zero_grad()
        with autocast("cpu", dtype=torch.bfloat16):
            loss = model(torch.ones(2, 6, dtype=torch.bfloat16)).float().square().mean()
        loss.backward()
        optimizer.step()
        return loss

    amp_core.compare(step, "cpu", model=model)
    check_unchanged(before, optimizer)
    assert all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items())


def test_a_skipped_closure_restores_the_groups() -> None:
    """A step that is skipped in its second evaluation still counts as one in the groups."""
    model = Net()
    optimizer = Foreign(model.parameters())
    scaler = GradScaler("cpu", 4.0)
    losses = iter([1.0, 1.0, 1.0, float("inf")])

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 6)).square().mean() * next(losses)
        scaler.scale(loss).backward()
        return loss

    scaler.step_closure(optimizer, closure)
    scaler.update()
    before = snapshot(optimizer)
    assert scaler.step_closure(optimizer, closure) is None
    check_unchanged(before, optimizer)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad])
def test_an_optimizer_is_copied_after_a_checkpoint(kind: Any) -> None:
    """A checkpoint leaves a state that Adam takes for one that has begun, so no copy can be made."""
    model = Net()
    optimizer = kind(model.parameters())
    with master_weights(model, optimizer, "remainder") as masters:
        saved = optimizer.state_dict()
        assert all("amp_core_kept" in state for state in saved["state"].values())
        wanted = {name: weight.clone() for name, weight in masters.float32_weights().items()}
        assert all(torch.equal(w, wanted[name]) for name, w in masters.float32_weights().items())
        copy.deepcopy((model, optimizer))


def test_wrappers_are_not_counted() -> None:
    """The step on copies of a wrapper steps the real weights."""

    class Wrapper(Optimizer):
        def __init__(self, inner: Optimizer) -> None:
            self.inner = inner
            super().__init__([p for group in inner.param_groups for p in group["params"]], {})

        def step(self, closure: Any = None) -> Any:
            return self.inner.step(closure)

    model = Net().bfloat16()
    with pytest.raises(ValueError, match=r"Pass that one: count_lost_updates\(model, optimizer.inner"):
        count_lost_updates(model, Wrapper(torch.optim.SGD(model.parameters(), lr=0.1)))


class Unseen(Optimizer):
    """Writes to weights without a change of their version counters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.data.sub_(param.grad.data)


@pytest.mark.parametrize("scope", [cached_casts, master_weights])
@pytest.mark.parametrize("fails", [False, True])
def test_hooks_of_an_optimizer_that_torch_cannot_follow(scope: Any, fails: bool) -> None:
    """A hook of the step, or what runs after it has failed, still uses the casts from before."""
    layer, x = nn.Linear(1, 1, bias=False), torch.ones(1, 1)
    nn.init.ones_(layer.weight)
    optimizer = Unseen(layer.parameters())
    seen: list[float] = []

    def forward(*_: object) -> None:
        with autocast("cpu"):
            seen.append(layer(x).item())
        if fails and seen[-1] == 2:
            raise KeyError

    optimizer.register_step_post_hook(forward)
    with scope(layer):
        forward()
        layer.weight.grad = torch.full_like(layer.weight, -1)
        with pytest.raises(KeyError) if fails else contextlib.nullcontext():
            optimizer.step()
    assert seen == [1, 2]


@pytest.mark.parametrize("scope", [cached_casts, master_weights])
@pytest.mark.parametrize("keyword", [False, True])
def test_closures_of_an_optimizer_that_torch_cannot_follow(scope: Any, keyword: bool) -> None:
    """The second evaluation of a step uses the casts of the first."""

    class Twice(Unseen):
        def step(self, closure: Any = None) -> None:
            for _ in range(2):
                closure()
                super().step()

    layer, x = nn.Linear(1, 1, bias=False), torch.ones(1, 1)
    nn.init.ones_(layer.weight)
    optimizer = Twice(layer.parameters())
    seen: list[float] = []

    def closure() -> None:
        with autocast("cpu"):
            seen.append(layer(x).item())
        layer.weight.grad = torch.full_like(layer.weight, -1)

    with scope(layer):
        optimizer.step(closure=closure) if keyword else optimizer.step(closure)
    assert seen == [1, 2]


class Loss:
    """A closure with a method."""

    def __call__(self) -> float:
        return 1.0

    def doubled(self) -> float:
        return 2 * self()


@pytest.mark.parametrize("given", [Loss(), nn.Linear(1, 1), Loss], ids=["closure", "model", "class"])
@pytest.mark.parametrize("keyword", [False, True])
def test_what_else_a_step_takes(given: Any, keyword: bool) -> None:
    """An optimizer gets a function in place of a closure with methods, or of the model."""
    got: list[Any] = []

    class Taking(Unseen):
        def step(self, closure: Any = None) -> None:
            got.append(closure)

    layer = nn.Linear(1, 1)
    optimizer = Taking(layer.parameters())
    with cached_casts(layer):
        optimizer.step(closure=given) if keyword else optimizer.step(given)
    if isinstance(given, Loss):
        assert (got[0](), got[0].doubled()) == (1.0, 2.0)
    else:
        assert got == [given]


@pytest.mark.parametrize("scope", [cached_casts, master_weights])
@pytest.mark.parametrize("flag", [1.0, 2.0])
def test_a_flag_that_torchs_scaler_sums_over_devices(scope: Any, flag: float) -> None:
    """The casts of a fused step that is taken, as torch's kernels skip at 1.0 alone, stay for good."""
    layer, x = nn.Linear(1, 1, bias=False), torch.ones(1, 1)
    nn.init.ones_(layer.weight)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0, fused=True)
    with scope(layer):
        with autocast("cpu"):
            layer(x).backward()
        optimizer.found_inf = torch.tensor(flag)  # type: ignore[attr-defined]
        optimizer.step()
        with autocast("cpu"):
            assert layer(x).item() == layer.weight.item() == (1.0 if flag == 1.0 else 0.0)


class Unrelated:
    """No `torch.optim.Optimizer`, as fastai's are none; it writes as they do."""

    def __init__(self, params: Any) -> None:
        self.param_groups = [{"params": [*params]}]
        self.state: dict[Tensor, Any] = {}

    def step(self, closure: Any = None) -> None:
        if closure is not None:
            closure()
        for param in self.param_groups[0]["params"]:
            param.data.sub_(param.grad.data, alpha=0.5)

    def zero_grad(self) -> None:
        for param in self.param_groups[0]["params"]:
            param.grad = None


@pytest.mark.parametrize("how", ["enabled", "disabled", "closure", "closure, disabled", "fused"])
@pytest.mark.parametrize("scope", [cached_casts, master_weights])
def test_scaler_tells_of_the_steps_of_what_is_no_optimizer(how: str, scope: Any) -> None:
    """A step that neither torch's hooks nor the version counters tell of leaves the old casts in use."""

    def losses(around: Any) -> list[Tensor]:
        model = Net()
        optimizer: Any = Unrelated(model.parameters())
        if how == "fused":
            optimizer._step_supports_amp_scaling = True
        scaler = GradScaler("cpu", init_scale=1.0, enabled="disabled" not in how)
        found = []

        def evaluate() -> Tensor:
            optimizer.zero_grad()
            with autocast("cpu"):
                loss = model(torch.ones(3, 6)).float().square().mean()
            scaler.scale(loss).backward()
            found.append(loss.detach())
            return loss

        with around(model):
            for _ in range(6):
                if "closure" in how:
                    scaler.step_closure(optimizer, evaluate)
                else:
                    evaluate()
                    scaler.step(optimizer)
                scaler.update()
        return found

    wanted = losses(contextlib.nullcontext)
    assert len(set(map(float, wanted))) > 3
    assert losses(scope) == wanted


@pytest.mark.parametrize("enabled", [True, False])
def test_region_around_steps_of_what_is_no_optimizer(enabled: bool) -> None:
    """Later forward passes of a region use the weights of its first step."""
    model = Net()
    optimizer: Any = Unrelated(model.parameters())
    scaler = GradScaler("cpu", init_scale=1.0, enabled=enabled)
    x = torch.ones(3, 6)
    with autocast("cpu"):
        for _ in range(3):
            scaler.scale(model(x).float().square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        got = model(x)
    with autocast("cpu"):
        assert torch.equal(got, model(x))
