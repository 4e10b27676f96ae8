"""master_weights: low-precision weights in the ops, float32 everywhere else, the numbers of autocast."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import amp_core
from amp_core import GradScaler, autocast, cached_casts, master_weights
from amp_core.casts import accumulating
from amp_core.kernels import PORTABLE

X = torch.linspace(-1, 1, 24).reshape(4, 6)


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.ReLU(), nn.Linear(5, 3))


def forward(model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    with autocast("cpu", dtype=dtype):
        return model(X)


def grads(
    model: nn.Module, micro_batches: int = 1, dtype: torch.dtype = torch.bfloat16
) -> list[torch.Tensor]:
    model.zero_grad()
    for i in range(micro_batches):
        ((i + 1) * forward(model, dtype).float().square().mean()).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def equal(one: Any, two: Any) -> bool:
    one, two = [*one], [*two]
    return len(one) == len(two) and all(map(torch.equal, one, two))


class Copies(TorchDispatchMode):
    """Counts calls that copy a list of tensors, and weights that are cast one by one."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.weights = {p.data_ptr() for p in model.parameters()}
        self.calls = self.single = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        self.calls += func is aten._foreach_copy_.default
        self.single += func is aten._to_copy.default and args[0].data_ptr() in self.weights
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_gradients_are_bit_equal(dtype: torch.dtype, micro_batches: int) -> None:
    """Gradients, accumulated ones too, are others than plain autocast's, or not in float32."""
    model = make()
    expected = grads(model, micro_batches, dtype)
    with master_weights(model):
        for _ in range(2):
            assert equal(grads(model, micro_batches, dtype), expected)
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    assert equal(grads(model, micro_batches, dtype), expected)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_small_weights_are_cast_by_torch(micro_batches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each small weight costs a deep model more in Python, forward and backward, than its cast takes."""
    monkeypatch.setattr(accumulating, "_BY_AUTOGRAD", 2**18)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 300), nn.ReLU(), nn.Linear(300, 300), nn.Linear(300, 3))
    plain = copy.deepcopy(model)
    with master_weights(model) as masters:
        for model_, steps in ((model, 3), (plain, 3)):
            optimizer = torch.optim.SGD(model_.parameters(), lr=0.1)
            for _ in range(steps):
                grads(model_, micro_batches)
                optimizer.step()
        assert equal(grads(model, micro_batches), grads(plain, micro_batches))
        (large,) = masters._casts.all()
        assert large.shape == (300, 300)
    assert equal(model.parameters(), plain.parameters())
    assert masters.nbytes() == 0


def test_weights_are_copied_in_one_call_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each micro-batch, or each weight by itself, is cast again."""
    monkeypatch.setattr(type(amp_core.get_backend("cpu")), "kernels", lambda _: PORTABLE)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    with master_weights(model):
        grads(model)
        optimizer.step()
        with Copies(model) as seen:
            for _ in range(2):
                for _ in range(3):
                    forward(model)
                optimizer.step()
    # The first forward of all has taught which weights ops want: from then on one call copies all.
    assert (seen.calls, seen.single) == (2, 0)


def train(model: nn.Module, optimizer: Any, dtype: torch.dtype, scaled: bool, steps: int = 5) -> list[float]:
    losses = []
    # The first scale overflows float16: the run begins with skipped steps.
    scaler = GradScaler("cpu", init_scale=2.0**24, growth_interval=2, enabled=scaled)
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(2):
            loss = forward(model, dtype).float().square().mean()
            scaler.scale(loss).backward()
        losses.append(loss.item())
        scaler.step(optimizer, max_norm=0.5)
        scaler.update()
    if scaled and dtype is torch.float16:
        assert any(r.skipped for r in scaler.history)
    return losses


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
        lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
        lambda p: torch.optim.Adafactor(p, lr=0.01),
    ],
    ids=["sgd", "adamw-fused", "adam-foreach", "adafactor"],
)
def test_training_is_the_same(optimizer: Callable[[Any], Any], scaled: bool, dtype: torch.dtype) -> None:
    """With clipping, skipped steps and any optimizer, training goes another way than under autocast."""
    plain, mastered = make(), make()
    expected = train(plain, optimizer(plain.parameters()), dtype, scaled)
    with master_weights(mastered):
        assert train(mastered, optimizer(mastered.parameters()), dtype, scaled) == expected
    assert equal(list(mastered.parameters()), list(plain.parameters()))


def test_torch_clips_and_scales_as_it_does() -> None:
    """The scaler and clipping of torch, `clip_grad_norm_` over model.parameters(), miss the gradients."""
    results = []
    for on in (False, True):
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        handle = master_weights(model) if on else None
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = model(X).float().square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            assert norm > 0.1
            scaler.step(optimizer)
            scaler.update()
        if handle:
            handle.remove()
        results.append([p.detach() for p in model.parameters()])
    assert equal(*results)


def test_a_checkpoint_is_float32_and_resumes_without_it() -> None:
    """A checkpoint holds low-precision weights, or one taken under it cannot go on in plain training."""
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with master_weights(model):
        train(model, optimizer, torch.bfloat16, scaled=False)
        state = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        expected = train(model, optimizer, torch.bfloat16, scaled=False)
    assert {t.dtype for t in state["model"].values()} == {torch.float32}
    for on in (False, True):
        resumed = make()
        again = torch.optim.AdamW(resumed.parameters(), lr=0.01)
        handle = master_weights(resumed) if on else None
        forward(resumed)  # copies of the weights that are about to be replaced
        resumed.load_state_dict(state["model"])
        again.load_state_dict(copy.deepcopy(state["optimizer"]))
        assert train(resumed, again, torch.bfloat16, scaled=False) == expected
        if handle:
            handle.remove()


def test_memory() -> None:
    """Norms are copied too, the count is wrong, or copies outlive the handle or their weight."""
    model = make()
    handle = master_weights(model)
    forward(model)
    linear = [p for layer in (model[0], model[3]) for p in layer.parameters()]
    assert handle.nbytes() == sum(p.nbytes for p in linear) // 2
    old = weakref.ref(model[0].weight)
    model[0].weight = nn.Parameter(torch.ones(5, 6))
    forward(model)
    assert handle.nbytes() == sum(p.nbytes for p in linear) // 2
    del linear
    gc.collect()
    assert old() is None
    handle.remove()
    handle.remove()
    assert handle.nbytes() == 0


@pytest.mark.parametrize("hold", [lambda g: g, torch.Tensor.detach, lambda g: g[:1], torch.Tensor.numpy])
def test_a_gradient_that_is_still_held_is_not_written(hold: Callable[[torch.Tensor], Any]) -> None:
    """A gradient that a user keeps over zero_grad() is overwritten, or one that nobody keeps is not."""
    layer = nn.Linear(300, 300, bias=False)

    def step(factor: float) -> None:
        layer.zero_grad()
        with autocast("cpu"):
            out = layer(torch.ones(2, 300))
        (factor * out.float().sum()).backward()

    with master_weights(layer):
        step(1)
        held = hold(layer.weight.grad)
        place = layer.weight.grad.data_ptr()
        step(2)
        assert float(held[0, 0]) == 2
        assert float(layer.weight.grad[0, 0]) == 4
        assert layer.weight.grad.data_ptr() != place
        held = None
        place = layer.weight.grad.data_ptr()
        step(3)
        assert layer.weight.grad.data_ptr() == place


@pytest.mark.parametrize("channels", [96, 256, 512])
def test_large_gradients_are_bit_equal(channels: int) -> None:
    """What adds up gradients of above 2**16, 2**17 and 2**21 elements gives other sums than autograd."""
    torch.manual_seed(0)
    conv = nn.Conv2d(channels, channels, 3).to(memory_format=torch.channels_last)
    x = torch.randn(2, channels, 4, 4)

    def run() -> torch.Tensor:
        conv.zero_grad()
        for dtype in (torch.bfloat16, torch.float16, torch.bfloat16):
            with autocast("cpu", dtype=dtype):
                conv(x).float().square().sum().backward()
        assert conv.weight.grad.is_contiguous(memory_format=torch.channels_last)
        return conv.weight.grad.clone()

    expected = run()
    with master_weights(conv):
        for _ in range(2):
            assert torch.equal(run(), expected)


def in_place(model: nn.Sequential) -> None:
    with torch.no_grad():
        model[0].weight.mul_(2)


def ema(model: nn.Sequential) -> None:
    average = torch.optim.swa_utils.AveragedModel(make(), multi_avg_fn=None)
    average.update_parameters(make().requires_grad_(False))
    model.load_state_dict(average.module.state_dict())


def swapped(model: nn.Sequential) -> None:
    model[0].weight.data, model[3].weight.data = model[0].weight.data * 2, model[3].weight.data * 3


def replaced(model: nn.Sequential) -> None:
    model[0].weight = nn.Parameter(model[0].weight.detach() * 2)


def frozen(model: nn.Sequential) -> None:
    model[0].requires_grad_(False)


def reshaped(model: nn.Sequential) -> None:
    model[3].weight.data, model[3].bias.data = torch.ones(2, 5), torch.ones(2)


@pytest.mark.parametrize("change", [in_place, ema, swapped, replaced, frozen, reshaped])
def test_a_changed_weight_is_copied_again(change: Callable[[nn.Sequential], None]) -> None:
    """After a change of a weight, its old copy is used, or its gradient goes elsewhere."""
    model = make()
    with master_weights(model):
        grads(model)
        change(model)
        model.zero_grad()
        got = forward(model).detach(), grads(model)
    twin = copy.deepcopy(model)
    assert torch.equal(got[0], forward(twin))
    assert equal(got[1], grads(twin))


def test_two_dtypes_over_one_weight() -> None:
    """The copy in one dtype is used for the other, or one of the two gradients is lost."""
    model = make()

    def run() -> list[torch.Tensor]:
        model.zero_grad()
        with autocast("cpu", dtype=torch.bfloat16):
            first = model(X)
            with autocast("cpu", dtype=torch.float16):
                second = model(X)
        assert (first.dtype, second.dtype) == (torch.bfloat16, torch.float16)
        first.float().sum().backward()
        second.float().sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    expected = run()
    with master_weights(model):
        assert equal(run(), expected)


def test_a_weight_of_both_precisions() -> None:
    """A tied embedding loses the gradient of one of its two uses."""
    torch.manual_seed(0)
    table = nn.Embedding(7, 6)

    def run() -> torch.Tensor:
        table.zero_grad()
        with autocast("cpu"):
            (nn.functional.linear(table(torch.arange(7)), table.weight).float() ** 2).sum().backward()
        return table.weight.grad.clone()

    expected = run()
    with master_weights(table):
        torch.testing.assert_close(run(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool) -> None:
    """A checkpointed block recomputes other values, or is given other tensors to save."""
    model = make()

    def run() -> list[torch.Tensor]:
        model.zero_grad()
        x = X.clone().requires_grad_()
        with autocast("cpu"):
            out = checkpoint(model, x, use_reentrant=reentrant)
        out.float().sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    expected = run()
    with master_weights(model):
        assert equal(run(), expected)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_weights_are_called(register: str) -> None:
    """A step within the backward pass, or a hook that changes a gradient, is not called or goes unnoticed."""
    model = make()
    called: list[torch.Tensor] = []
    getattr(model[0].weight, register)(called.append)
    expected = grads(model)
    with master_weights(model):
        assert equal(grads(model), expected)
        assert len(called) == 2


def test_a_graph_that_outlives_a_step_is_refused() -> None:
    """A backward pass through weights of before the step computes with those of after it."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    with master_weights(model):
        x = X.clone().requires_grad_()
        with autocast("cpu"):
            out = model(x).float().sum()
        out.backward(retain_graph=True)
        optimizer.step()
        forward(model)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.backward()


def test_with_cached_casts_over_the_same_model() -> None:
    """Two scopes over one model drop a gradient or one another's casts."""
    model = make()
    expected = grads(model, 2)
    with cached_casts(model), master_weights(model):
        assert equal(grads(model, 2), expected)
    with master_weights(model):
        grads(model)
        with cached_casts(model):
            assert equal(grads(model, 2), expected)
        assert equal(grads(model, 2), expected)


def test_a_removed_handle_is_not_entered() -> None:
    """A handle that is off is taken for one that is on."""
    handle = master_weights(make())
    handle.remove()
    with pytest.raises(RuntimeError, match=r"Call master_weights\(model\) again"):
        handle.__enter__()


def test_unseen_writes() -> None:
    """The debug mode misses a write through .data."""
    model = make()
    with master_weights(model, debug=True) as handle:
        forward(model)
        model[3].weight.data.mul_(2)
        with pytest.raises(amp_core.StaleCastError, match=r"weight '3\.weight'"):
            forward(model)
        handle.invalidate()
        assert torch.equal(forward(model), forward(copy.deepcopy(model)))


def test_compiled_model_is_untouched() -> None:
    """Under torch.compile it breaks the graph, or gradients are lost."""
    model = make()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    expected = grads(compiled, 2)
    with master_weights(model):
        assert equal(grads(compiled, 2), expected)


@pytest.mark.parametrize("add_first", [False, True])
def test_a_hook_between_two_uses_in_one_graph(add_first: bool) -> None:
    """A hook that comes or goes renews the cast, and the graph of the earlier use cannot run back."""
    model, x, seen = nn.Linear(272, 272), torch.randn(4, 272), []  # 289 KiB: small weights are torch's
    with master_weights(model):
        hook = model.weight.register_hook(seen.append) if add_first else None
        with autocast("cpu", dtype=torch.bfloat16):
            loss = model(x).float().sum()
        if hook is None:
            model.weight.register_hook(seen.append)
        else:
            hook.remove()
        with autocast("cpu", dtype=torch.bfloat16):
            loss = loss + model(x * 2).float().sum()
        loss.backward()
    expected = (3 * x).sum(0).expand(272, 272)
    torch.testing.assert_close(model.weight.grad, expected, rtol=0.05, atol=0.2)
    assert len(seen) == (not add_first)


@pytest.mark.parametrize("micro_batches", [0, 1])
def test_a_weight_frozen_before_the_backward_pass_gets_no_gradient(micro_batches: int) -> None:
    """The optimizer moves a weight that was frozen."""

    def gradients(model: nn.Module) -> list[torch.Tensor | None]:
        model.zero_grad()
        grads(model, micro_batches)
        loss = forward(model).float().square().mean()
        model[0].weight.requires_grad_(False)
        loss.backward()
        model[0].weight.requires_grad_()
        return [None if p.grad is None else p.grad.clone() for p in model.parameters()]

    model = make()
    expected = gradients(model)
    with master_weights(model):
        got = gradients(model)
    assert (got[0] is None, expected[0] is None) == (not micro_batches, not micro_batches)
    assert all(map(torch.equal, got[not micro_batches :], expected[not micro_batches :]))


@pytest.mark.parametrize("between", ["frozen", "another scope"])
def test_a_graph_from_before_something_that_wrote_nothing(between: str) -> None:
    """The second forward pass rewrites the casts of the first, whose backward pass torch then refuses."""
    model, plain = make(), make()

    def gradients(model: nn.Module) -> list[torch.Tensor]:
        first = forward(model).float().square().mean()
        if between == "frozen":
            model.requires_grad_(False)
            forward(model)
            model.requires_grad_()
        else:
            with cached_casts(model):
                forward(model)
        (first + forward(model).float().square().mean()).backward()
        return [p.grad for p in model.parameters()]

    with master_weights(model):
        got = gradients(model)
    torch.testing.assert_close(got, gradients(plain), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("between", ["invalidate", "skipped step"])
def test_a_graph_from_before_weights_are_cast_again(between: str) -> None:
    """The backward pass of the first graph is refused: its casts were rewritten, with the same values."""
    model, plain = make(), make()

    def gradients(model: nn.Module, invalidate: Callable[[], object]) -> list[torch.Tensor]:
        first = forward(model).float().square().mean()
        if between == "invalidate":
            invalidate()
        else:
            scaler = GradScaler("cpu", 1.0)
            scaler.scale(forward(model).float().sum() * torch.inf).backward()
            scaler.step(torch.optim.SGD(model.parameters(), lr=1.0, fused=True))
            model.zero_grad()
        (first + forward(model).float().square().mean()).backward()
        return [p.grad for p in model.parameters()]

    with master_weights(model) as masters:
        got = gradients(model, masters.invalidate)
    torch.testing.assert_close(got, gradients(plain, lambda: None), rtol=0.02, atol=0.02)


def test_a_graph_from_before_an_invalidated_write_keeps_its_values() -> None:
    """The cast of the old graph is rewritten, so that its gradients would be of other weights."""
    model, plain = make(), make()

    def gradients(model: nn.Module, invalidate: Callable[[], object]) -> list[torch.Tensor]:
        first = forward(model).float().square().mean()
        for p in model.parameters():
            p.data.mul_(2)
        invalidate()
        forward(model)
        first.backward()
        return [p.grad for p in model.parameters()]

    with master_weights(model) as masters:
        got = gradients(model, masters.invalidate)
    assert equal(got, gradients(plain, lambda: None))
