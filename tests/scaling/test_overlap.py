"""Gradients read during the backward: the same steps as without, whatever happens to them in between."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import weakref
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import amp_core
from amp_core.kernels import PORTABLE
from amp_core.scaling import overlap
from amp_core.scaling.gradients import Gradients, kernels_of

CPU = torch.device("cpu")


class Net(nn.Module):
    """Layers of several sizes, one that is used twice, and one that gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.twice, self.unused = nn.Linear(8, 32), nn.Linear(32, 32), nn.Linear(3, 3)
        self.last = nn.Linear(32, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.twice(self.twice(self.first(x)).relu()).relu())


Change = Callable[[nn.Module], None]


def nothing(net: nn.Module) -> None:
    pass


def doubled(net: nn.Module) -> None:
    net.first.weight.grad.mul_(2.0)


def replaced(net: nn.Module) -> None:
    net.first.weight.grad = net.first.weight.grad.clone() * 3.0


def spoiled(net: nn.Module) -> None:
    net.twice.bias.grad[3] = math.nan


def dropped(net: nn.Module) -> None:
    net.last.bias.grad = None


CHANGES = [nothing, doubled, replaced, spoiled, dropped]


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "_bucket_nbytes", lambda _: 600)


def trained(
    scaler: amp_core.GradScaler, change: Change, micro_batches: int, fused: bool, norm_type: float = 2.0
):
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, fused=fused)
    seen = []
    for number in range(4):
        optimizer.zero_grad()
        for batch in range(micro_batches):
            x = torch.full((4, 8), 0.1 * (1 + number + batch))
            scaler.scale(net(x).square().mean()).backward()
        if number == 2:
            change(net)
        scaler.step(optimizer, max_norm=0.01, norm_type=norm_type)
        scaler.update()
        record = scaler.last_step[optimizer]
        seen.append((record.skipped, record.total_norm, [b.name for b in record.bad_parameters]))
    return net, seen


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("change", CHANGES)
def test_the_same_steps_as_without(change: Change, micro_batches: int, fused: bool) -> None:
    """A gradient counts as it was before it was accumulated into, changed, replaced or dropped."""
    alone, expected = trained(amp_core.GradScaler("cpu", 8.0), change, micro_batches, fused)
    net, seen = trained(amp_core.GradScaler("cpu", 8.0, overlap=True), change, micro_batches, fused)
    for (skipped, norm, bad), (skips, wanted, blamed) in zip(seen, expected, strict=True):
        assert (skipped, bad) == (skips, blamed)
        assert norm == pytest.approx(wanted, rel=1e-6, nan_ok=True)
    assert expected[2][0] is (change is spoiled)
    for ours, theirs in zip(net.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_old_orders_of_gradients_are_dropped() -> None:
    """Two threads add one at once, the cache is larger than its limit, and it grows for good."""
    reads, device = overlap.Overlap(), torch.device("cpu")
    reads._orders.update({(device, (i,)): torch.tensor([i]) for i in range(overlap._ORDERS + 1)})
    assert reads._on_device((2, 0, 1), device).tolist() == [2, 0, 1]
    assert len(reads._orders) <= overlap._ORDERS


@pytest.mark.parametrize("norm_type", [1.0, math.inf])
def test_other_norms(norm_type: float) -> None:
    """What was read in the backward is the 2-norm; a step that clips by another one takes it."""
    _, expected = trained(amp_core.GradScaler("cpu", 8.0), nothing, 1, True, norm_type)
    _, seen = trained(amp_core.GradScaler("cpu", 8.0, overlap=True), nothing, 1, True, norm_type)
    assert [norm for _, norm, _ in seen] == pytest.approx([norm for _, norm, _ in expected])


def test_a_weight_that_is_frozen_after_its_backward_pass() -> None:
    """The step fails: torch hooks no tensor that requires no gradient."""
    weights = [nn.Parameter(torch.ones(4)) for _ in range(2)]
    optimizer = torch.optim.SGD(weights, lr=0.1)
    scaler = amp_core.GradScaler("cpu", 8.0, overlap=True)
    scaler.scale((weights[0] + weights[1]).sum()).backward()
    weights[1].requires_grad_(False)
    scaler.step(optimizer, max_norm=100.0)
    assert [weight.tolist() for weight in weights] == [pytest.approx([0.9] * 4)] * 2


def test_sparse_gradients_are_read_at_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward pass fails: kernels read no sparse tensor."""
    monkeypatch.setattr(overlap, "_bucket_nbytes", lambda _: 1)
    table = nn.Embedding(8, 4, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    scaler = amp_core.GradScaler("cpu", 8.0, overlap=True)
    for _ in range(2):  # from the second on, a hook sees the gradients
        optimizer.zero_grad()
        scaler.scale(table(torch.tensor([1, 1, 2])).sum()).backward()
        scaler.step(optimizer, max_norm=100.0)
        scaler.update()
    assert scaler.history[-1].total_norm == pytest.approx(20**0.5)


def test_buckets_fill_with_the_gradients_of_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients that the step has read count in the next bucket, which is then read too early."""
    monkeypatch.setattr(overlap, "_bucket_nbytes", lambda _: 10_000)
    net, scaler = Net(), amp_core.GradScaler("cpu", overlap=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        scaler.scale(net(torch.ones(2, 8)).sum()).backward()
        scaler.step(optimizer, max_norm=1.0)
        scaler.update()

    for _ in range(2):  # from then on, hooks see the gradients
        step()
    with mock.patch.object(overlap.Overlap, "_read_pending") as read:
        for _ in range(4):
            step()
    assert not read.called


def test_after_the_backward_only_the_last_bucket_is_read() -> None:
    """All gradients are read again at the step, and nothing is gained."""
    net, scaler = Net(), amp_core.GradScaler("cpu", overlap=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, fused=True)
    kernels = kernels_of(CPU)
    read: list[int] = []

    def grad_stats(grads, norm_type=2.0):
        read.append(sum(g.numel() for g in grads))
        return type(kernels).grad_stats(kernels, grads, norm_type)

    total = sum(p.numel() for name, p in net.named_parameters() if "unused" not in name)
    with mock.patch.object(kernels, "grad_stats", grad_stats):
        for step in range(3):
            optimizer.zero_grad()
            scaler.scale(net(torch.ones(2, 8)).sum()).backward()
            during = sum(read)
            scaler.step(optimizer, max_norm=1.0)
            scaler.update()
            after = sum(read) - during
            assert during + after == total, "each gradient is read once"
            assert (during == 0) if step == 0 else (after < 0.1 * total)
            read.clear()


@pytest.mark.parametrize("norm_type", [None, 1.0])
def test_steps_that_need_no_norm(norm_type: float | None) -> None:
    """Each backward pass reads all gradients, and no step uses what it found."""
    net, scaler = Net(), amp_core.GradScaler("cpu", overlap=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    clipping = {} if norm_type is None else {"max_norm": 1.0, "norm_type": norm_type}
    for _ in range(3):
        net.zero_grad()
        with mock.patch.object(overlap, "kernels_of", side_effect=AssertionError):
            scaler.scale(net(torch.ones(2, 8)).sum()).backward()
        scaler.step(optimizer, **clipping)
        scaler.update()


def after_two_steps() -> tuple[Net, amp_core.GradScaler, torch.optim.Optimizer]:
    """Return what has taken two steps: the second one overlaps."""
    net, scaler = Net(), amp_core.GradScaler("cpu", overlap=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(net(torch.ones(2, 8)).sum()).backward()
        scaler.step(optimizer, max_norm=1.0)
        scaler.update()
    return net, scaler, optimizer


def test_copies_and_ends() -> None:
    """Hooks keep a scaler or its gradients alive, or go along with a copy of the model or a pickle."""
    net, scaler, optimizer = after_two_steps()
    restored = pickle.loads(pickle.dumps(scaler))
    assert restored.get_scale() == scaler.get_scale()
    copy.deepcopy(net)(torch.ones(2, 8)).sum().backward()
    watched = weakref.ref(scaler._unscaler._overlap), weakref.ref(net.first.weight)
    optimizer.zero_grad()
    del scaler
    gc.collect()
    assert watched[0]() is None
    net(torch.ones(2, 8)).sum().backward()  # with the hooks of a scaler that is gone
    del net, optimizer
    gc.collect()
    assert watched[1]() is None


def test_gradients_that_were_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket of gradients stays in memory after zero_grad(), that of a model that is gone for good."""
    monkeypatch.setattr(overlap, "_bucket_nbytes", lambda _: 10**9)
    net, _scaler, optimizer = after_two_steps()
    net(torch.ones(2, 8)).sum().backward()
    gradient = weakref.ref(net.first.weight.grad)
    optimizer.zero_grad()
    assert gradient() is None


class Places(TorchDispatchMode):
    """Notes each operation that is given tensors of two devices: a GPU's host waits to bring one over."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        flat = torch.utils._pytree.tree_leaves((args, kwargs))
        result = func(*args, **(kwargs or {}))
        held = {t.device for t in [*flat, result] if isinstance(t, Tensor)}
        if len(held) > 1:
            self.mixed.append(str(func))
        return result


def test_no_wait_on_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers that lie on the host put in order what the buckets found: every step waits for the GPU."""
    away = torch.device("meta")  # has no memory, so that whatever is brought there shows
    monkeypatch.setattr(overlap, "kernels_of", lambda _: PORTABLE)
    monkeypatch.setattr(overlap, "get_backend", lambda _: amp_core.get_backend("cpu"))
    monkeypatch.setattr(overlap, "_bucket_nbytes", lambda _: 64)
    params: list[Tensor] = [nn.Parameter(torch.empty(n, device=away)) for n in (3, 20, 5, 40)]
    reads = overlap.Overlap()

    def step() -> None:
        for param in reversed(params):
            param.grad = torch.empty_like(param)
            reads._written(param)
        found = reads.grad_stats(Gradients(away, params, [p.grad for p in params], PORTABLE), 2.0)
        assert found.norms.shape == (4,)

    step()
    with Places() as seen:
        step()
    assert seen.mixed == []


def test_backward_passes_of_several_threads(in_threads: Callable[..., None]) -> None:
    """A backward pass ends with "dictionary changed size", or the norm lacks what one thread has added."""
    for _ in range(50):
        net = nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)])
        scaler = amp_core.GradScaler("cpu", 1.0, overlap=True)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.0)

        def backward(net: nn.Module = net, scaler: amp_core.GradScaler = scaler) -> None:
            scaler.scale(net(torch.ones(1, 8)).sum()).backward()

        backward()
        scaler.step(optimizer, max_norm=1.0)  # from here on it reads during the backward
        scaler.update()
        in_threads(*[backward] * 4)
        norm = torch.nn.utils.get_total_norm([p.grad for p in net.parameters()])
        scaler.step(optimizer, max_norm=1e6)
        assert scaler.last_step[optimizer].total_norm == pytest.approx(norm.item())


def test_models_that_are_gone_leave_no_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search over models with one scaler keeps the statistics of all gradients that no step has used."""
    monkeypatch.setattr(overlap, "_bucket_nbytes", lambda _device: 1)
    scaler = amp_core.GradScaler("cpu", overlap=True)
    for _ in range(3):
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler.scale(model(torch.ones(2, 4)).sum()).backward()
        scaler.step(optimizer, max_norm=1.0)
        scaler.update()
        scaler.scale(model(torch.ones(2, 4)).sum()).backward()
        assert len(scaler._unscaler._overlap._reads) == 2
        del model, optimizer
        gc.collect()
        assert not scaler._unscaler._overlap._reads
