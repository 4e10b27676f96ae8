"""cached_casts: when a weight is cast, when again, and that nothing else changes."""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import amp_core
from amp_core import autocast, cached_casts
from amp_core.casts import cache
from amp_core.dispatch import weight_casts
from amp_core.kernels import PORTABLE

X = torch.linspace(-1, 1, 24).reshape(4, 6)


@pytest.fixture(autouse=True)
def small_weights_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch cast small weights here, one by one, but from the first region on."""
    from amp_core.casts import scope

    monkeypatch.setattr(scope, "only_reuse_pays", lambda _weights: False)


def make(frozen: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.ReLU(), nn.Linear(5, 3))
    return model.requires_grad_(not frozen)


class Casts(TorchDispatchMode):
    """Counts the weights that are cast to a lower precision, by copy or by torch's own cast."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.pointers = {p.data_ptr() for p in model.parameters()}
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        sources = {
            aten._to_copy.default: args[:1],
            aten.copy_.default: args[1:2],
            aten._foreach_copy_.default: args[1] if len(args) > 1 else (),
        }.get(func, ())
        self.count += sum(s.dtype is torch.float32 and s.data_ptr() in self.pointers for s in sources)
        return func(*args, **(kwargs or {}))


def casts_of(model: nn.Module, run: Callable[[], Any]) -> int:
    backend = amp_core.get_backend("cpu")
    # The portable kernels cast through torch's dispatcher, where casts can be counted.
    with pytest.MonkeyPatch.context() as patch, Casts(model) as seen:
        patch.setattr(type(backend), "kernels", lambda _: PORTABLE)
        run()
    return seen.count


def forward(model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    with autocast("cpu", dtype=dtype):
        return model(X)


def grads(model: nn.Module, micro_batches: int = 1) -> list[torch.Tensor]:
    model.zero_grad()
    for _ in range(micro_batches):
        forward(model).float().square().mean().backward()
    return [p.grad.clone() for p in model.parameters()]


def test_weights_are_cast_once_over_many_regions() -> None:
    """Each region casts the weights again, as torch's autocast does."""
    model = make()
    assert casts_of(model, lambda: [forward(model) for _ in range(3)]) == 12
    with cached_casts(model):
        assert casts_of(model, lambda: [forward(model) for _ in range(3)]) == 4
    assert casts_of(model, lambda: forward(model)) == 4


def test_frozen_weights_are_cast_once() -> None:
    """A frozen weight is cast at every use, even within one region."""
    model = make(frozen=True)

    def twice() -> None:
        with autocast("cpu"):
            model(X)
            model(X)

    assert casts_of(model, twice) == 8
    with cached_casts(model):
        assert casts_of(model, twice) == 4


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_gradients_are_bit_equal(micro_batches: int) -> None:
    """Training within the scope computes other gradients than plain autocast."""
    model = make()
    expected = grads(model, micro_batches)
    with cached_casts(model):
        for _ in range(2):
            assert all(map(torch.equal, grads(model, micro_batches), expected))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_training_is_the_same(optimizer: Any, fused: bool) -> None:
    """After an optimizer step, a fused one above all, stale casts are used."""
    results = []
    for scope in (False, True):
        model = make()
        opt = optimizer(model.parameters(), lr=0.1, fused=fused)
        handle = cached_casts(model, persistent=True) if scope else None
        for _ in range(4):
            grads(model, 2)
            opt.step()
        if handle:
            handle.remove()
        results.append([p.detach() for p in model.parameters()])
    assert all(map(torch.equal, *results))


def in_place(model: nn.Sequential) -> None:
    with torch.no_grad():
        model[0].weight.mul_(2)


def loaded(model: nn.Sequential) -> None:
    model.load_state_dict({k: v * 2 for k, v in model.state_dict().items()})


def swapped_data(model: nn.Sequential) -> None:
    model[0].weight.data = model[0].weight.data * 2


def replaced(model: nn.Sequential) -> None:
    model[0].weight = nn.Parameter(model[0].weight.detach() * 2)


def averaged(model: nn.Sequential) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.lerp_(torch.ones_like(p), 0.5)


def frozen(model: nn.Sequential) -> None:
    model.requires_grad_(False)
    in_place(model)


def transposed(model: nn.Sequential) -> None:
    model[4].weight.data = model[4].weight.data.t()


def narrowed(model: nn.Sequential) -> None:
    model[4].weight.data, model[4].bias.data = model[4].weight.data[:2], model[4].bias.data[:2]


CHANGES = [in_place, loaded, swapped_data, replaced, averaged, frozen, transposed, narrowed]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("inside", [False, True])
def test_a_changed_weight_is_cast_again(change: Callable[[nn.Sequential], None], inside: bool) -> None:
    """A weight that changed, between regions or within one, is used as it was."""
    model = make().append(nn.Linear(3, 3))
    with cached_casts(model):
        forward(model)
        with autocast("cpu", enabled=inside):
            change(model)
            got = forward(model)
    assert torch.equal(got, forward(copy.deepcopy(model)))


def test_a_weight_at_the_address_of_a_freed_one() -> None:
    """An allocator that hands out freed memory again brings back the cast of what was in it before."""
    model, place = make(), bytearray(4 * 5 * 6)

    def put(value: float) -> None:
        weight = torch.frombuffer(place, dtype=torch.float32).view(5, 6)
        weight.fill_(value)
        model[0].weight.data = weight

    with cached_casts(model):
        for value in (1.0, 2.0):
            put(value)
            assert torch.equal(forward(model), forward(copy.deepcopy(model)))
            model[0].weight.data = torch.zeros(5, 6)


def test_a_hook_is_called_for_its_own_gradient_alone() -> None:
    """The hook of a weight that a step did not use is called with None, as those of its bucket were used."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
    called: list[tuple[int, torch.Tensor]] = []

    def train(count: int) -> None:
        with autocast("cpu"):
            x = X
            for layer in layers[:count]:
                x = layer(x)
        x.float().sum().backward()

    with cached_casts(layers):
        train(3)
        for number, layer in enumerate(layers):
            layer.weight.register_hook(functools.partial(lambda n, g: called.append((n, g)), number))
        torch._foreach_mul_([p.detach() for p in layers.parameters()], 2.0)
        train(3)
        called.clear()
        train(1)
    assert [(n, type(g)) for n, g in called] == [(0, torch.Tensor)]


def test_only_what_changed_is_cast_again() -> None:
    """One changed weight has all of them cast again."""
    model = make()
    with cached_casts(model):
        grads(model, 2)
        in_place(model)
        assert casts_of(model, lambda: forward(model)) == 1


def test_a_fused_step_within_a_region() -> None:
    """A fused step leaves the version counter, and the region goes on with the casts from before."""
    model, plain = make(), make()
    for net in (model, plain):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5, fused=True)
        with cached_casts(model), autocast("cpu"):
            net(X).float().sum().backward()
            optimizer.step()
            torch.clear_autocast_cache()
            net.y = net(X)
    assert torch.equal(model.y, plain.y)


def fused_sgd(model: nn.Module, *, by_group: bool) -> torch.optim.Optimizer:
    """Return an optimizer that is fused, by its argument or by the setting of its parameter group."""
    if by_group:
        return torch.optim.SGD([{"params": list(model.parameters()), "fused": True}], lr=0.5)
    return torch.optim.SGD(model.parameters(), lr=0.5, fused=True)


@pytest.mark.parametrize("by_group", [False, True])
@pytest.mark.parametrize("scope", [cached_casts, amp_core.master_weights])
def test_what_runs_between_a_fused_step_and_its_end(scope: Any, by_group: bool) -> None:
    """A post hook of the optimizer, or what follows a step that raised, gets the casts from before."""

    def outputs(scope: Any) -> list[torch.Tensor]:
        model, seen = make(), []
        optimizer = fused_sgd(model, by_group=by_group)
        with scope(model):
            forward(model).float().square().sum().backward()
            optimizer.register_step_post_hook(lambda *_: seen.append(forward(model)))
            optimizer.step()
            forward(model)
            optimizer.add_param_group({"params": [nn.Parameter(X)], "fused": True})
            optimizer.param_groups[1]["params"][0].grad = torch.ones_like(X)
            optimizer.param_groups[1]["momentum"] = "wrong"
            with pytest.raises((TypeError, RuntimeError)):
                optimizer.step()
            seen.append(forward(model))
        return seen

    assert all(map(torch.equal, outputs(scope), outputs(lambda _: contextlib.nullcontext())))


@pytest.mark.parametrize("by_group", [False, True])
def test_a_compiled_fused_step(by_group: bool) -> None:
    """A region after the step gets the casts from before: no version counter has moved."""

    def output(scope: Any) -> torch.Tensor:
        model = make()
        optimizer = fused_sgd(model, by_group=by_group)
        with scope(model):
            forward(model).float().square().sum().backward()
            torch.compile(lambda: optimizer.step(), backend="eager")()
            return forward(model)

    assert torch.equal(output(cached_casts), output(lambda _: contextlib.nullcontext()))


def test_a_scope_that_ends_while_a_thread_casts() -> None:
    """The cast stays in the table of all scopes for good."""
    model = make()
    scope = cached_casts(model, persistent=True)
    cast_alone, weight = cache.cast_alone, model[0].weight
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "cast_alone", lambda *args: (scope.remove(), cast_alone(*args))[1])
        forward(model)
    assert not any(id(weight) in casts for casts in weight_casts.CASTS.values())


@pytest.mark.parametrize("fused", [True, False])
def test_a_step_while_another_thread_casts(fused: bool) -> None:
    """The thread keeps the cast that it has begun before the step."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, fused=fused)
    grads(model)
    cast_alone = cache.cast_alone

    def slowly(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        cast = cast_alone(weight, dtype)
        thread = threading.Thread(target=optimizer.step)
        thread.start()
        thread.join()
        return cast

    with cached_casts(model), torch.no_grad():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cache, "cast_alone", slowly)
            forward(model)
        ours = forward(model)
    with torch.no_grad():
        assert torch.equal(ours, forward(model))


def test_a_first_use_in_inference_mode_with_gradients() -> None:
    """The region keeps a cast that no training can use."""
    model = make()
    with cached_casts(model), autocast("cpu"):
        with torch.inference_mode(), torch.enable_grad():
            model(X)
        model(X).float().sum().backward()
    assert model[0].weight.grad is not None


def test_threads_keep_their_own_casts_of_a_region() -> None:
    """A region of one thread takes another's cast, and a gradient is the sum of two in place of one."""
    model, inside, go_on = make(), threading.Event(), threading.Event()
    got: list[list[torch.Tensor]] = []

    def twice(pause: Callable[[], object]) -> None:
        with autocast("cpu"):
            first = model(X)
            pause()
            loss = first.float().square().sum() + model(X).float().square().sum()
        got.append([*torch.autograd.grad(loss, list(model.parameters()))])

    twice(lambda: None)
    with cached_casts(model):
        thread = threading.Thread(target=twice, args=(lambda: (inside.set(), go_on.wait(10)),))
        thread.start()
        inside.wait(10)
        twice(lambda: None)
        go_on.set()
        thread.join()
    assert all(map(torch.equal, got[0], got[1]))
    assert all(map(torch.equal, got[0], got[2]))


def test_two_dtypes_over_one_weight() -> None:
    """The cast to one dtype is used for the other."""
    model = make()
    with cached_casts(model):
        for dtype in (torch.bfloat16, torch.float16, torch.bfloat16):
            assert forward(model, dtype).dtype is dtype


def test_inference_mode_first_training_later() -> None:
    """Casts made in inference mode or under no_grad make the training step fail, or lose its gradient."""
    for mode in (torch.inference_mode, torch.no_grad):
        model = make()
        expected = grads(model)
        with cached_casts(model):
            with mode():
                forward(model)
            assert all(map(torch.equal, grads(model), expected))


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
    with cached_casts(model):
        assert all(map(torch.equal, run(), expected))


def test_gradient_of_a_gradient() -> None:
    """A gradient penalty cannot be differentiated through the cast."""
    results = []
    for scope in (False, True):
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
        torch.manual_seed(0)
        for p in model.parameters():
            nn.init.normal_(p)
        handle = cached_casts(model, persistent=True) if scope else None
        (first,) = torch.autograd.grad(forward(model).float().sum(), [model[0].weight], create_graph=True)
        first.square().sum().backward()
        results.append(model[2].weight.grad)
        if handle:
            handle.remove()
    assert torch.equal(*results)


def test_threads_share_the_casts() -> None:
    """A thread that leaves its region drops another's casts, or threads disagree."""
    model = make()
    expected = forward(model)
    got: list[torch.Tensor] = []
    with cached_casts(model):
        threads = [threading.Thread(target=lambda: got.append(forward(model))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert casts_of(model, lambda: forward(model)) == 0
    assert all(torch.equal(g, expected) for g in got)


def test_two_models_and_a_stranger() -> None:
    """One scope drops the casts of another, or casts weights of a model that is in none."""
    one, two, stranger = make(), make(), make()
    with cached_casts(one) as outer:
        grads(one, 2)
        with cached_casts(two):
            forward(two)
        assert casts_of(one, lambda: forward(one)) == 0
        held = outer.nbytes()
        assert torch.equal(forward(stranger), forward(one))
        assert outer.nbytes() == held


JOINS: dict[str, Callable[[nn.Sequential, nn.Linear], Any]] = {
    "a parameter": lambda model, new: setattr(model[0], "weight", new.weight),
    "a registered parameter": lambda model, new: model[0].register_parameter("weight", new.weight),
    "a module": lambda model, new: model.__setitem__(0, new),
    "a module of modules": lambda model, new: model.__setitem__(0, nn.Sequential(new)),
}


@pytest.mark.parametrize("join", JOINS)
def test_a_weight_that_was_used_before_it_joined_the_model(join: str) -> None:
    """A scope that has seen a weight of no model of its own goes on to ignore it."""
    model, new = make(), nn.Linear(6, 5)
    with cached_casts(model):
        with autocast("cpu"):
            new(X)
        JOINS[join](model, new)
        grads(model, 2)
        assert casts_of(model, lambda: forward(model)) == 0


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(6, 6),
    "same padding": lambda: nn.Conv1d(4, 4, 3, padding="same"),
    "valid padding": lambda: nn.Conv1d(4, 4, 3, padding="valid"),
    "numbers as padding": lambda: nn.Conv1d(4, 4, 3, padding=1),
    "LSTM": lambda: nn.LSTM(6, 5),
    "GRU": lambda: nn.GRU(6, 5),
    "LSTM cell": lambda: nn.LSTMCell(6, 5),
    "attention": lambda: nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0),
}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("scope", [cached_casts, amp_core.master_weights])
def test_layers_of_every_kind(scope: Any, layer: str) -> None:
    """A low-precision op takes no casts of scopes: its weights are cast again, or are stale."""
    torch.manual_seed(0)
    model = LAYERS[layer]()

    def run() -> torch.Tensor:
        with autocast("cpu"):
            result = model(X.reshape(2, 2, 6) if layer == "attention" else X)
        return result if isinstance(result, torch.Tensor) else result[0]

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        run().float().square().sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    wanted = gradients()
    with torch.no_grad():
        result = run()
    with scope(model):
        assert all(map(torch.equal, gradients(), wanted))
        assert all(map(torch.equal, gradients(), wanted))
        with torch.no_grad():
            assert torch.equal(run(), result)
            assert casts_of(model, run) == 0
            with autocast("cpu"):
                run()
                torch._foreach_mul_(list(model.parameters()), 0.5)
                changed = run()
    with torch.no_grad():
        assert torch.equal(run(), changed)


def test_nothing_is_left_behind() -> None:
    """After the scope, an error inside it too, ops still go through Python or casts stay in memory."""
    model = make()
    casts = cached_casts(model)

    def fail() -> None:
        with casts:
            forward(model)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert casts.nbytes() == 0
    assert torch._C._dispatch_has_kernel_for_dispatch_key("aten::linear", "AutocastCPU")
    assert casts_of(model, lambda: [forward(model), forward(model)]) == 8


def test_entering_a_scope_that_is_on() -> None:
    """A scope entered twice is left on when it is left."""
    scope = cached_casts(make(), persistent=True)
    with pytest.raises(RuntimeError, match="already active"):
        scope.__enter__()
    scope.remove()
    scope.remove()


def test_writes_that_cannot_be_seen() -> None:
    """The debug mode misses a write through .data, or invalidate() does not help against it."""
    model = make()
    with cached_casts(model, debug=True) as casts:
        forward(model)
        model[3].weight.data.mul_(2)
        with pytest.raises(amp_core.StaleCastError, match=r"weight '3\.weight' no longer agrees"):
            forward(model)
        casts.invalidate([model[3].weight])
        assert torch.equal(forward(model), forward(copy.deepcopy(model)))


def test_layer_norm_stays_in_float32() -> None:
    """A weight that no low-precision op uses is cast as well."""
    model = make()
    with cached_casts(model) as casts:
        grads(model, 2)
        linear = [p for layer in (model[0], model[3]) for p in layer.parameters()]
        assert casts.nbytes() == sum(p.nbytes for p in linear) // 2


def test_compiled_model_is_untouched() -> None:
    """Under torch.compile the scope breaks the graph or changes the result."""
    model = make()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with autocast("cpu"):
        expected = compiled(X)
        with cached_casts(model):
            assert torch.equal(compiled(X), expected)


def shapes_of_casts(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[int, ...]]]:
    """Return a list to which each cast kernel's call adds the shapes of its tensors."""
    kernels, calls = amp_core.get_backend("cpu").kernels(), []
    cast = kernels.cast

    def counted(tensors, dtype, out=None):
        calls.append([tuple(t.shape) for t in tensors])
        return cast(tensors, dtype, out)

    monkeypatch.setattr(kernels, "cast", counted)
    return calls


def casts_of_a_step(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch, *, ended: bool
) -> tuple[list[list[tuple[int, ...]]], list[list[tuple[int, ...]]]]:
    """Return the shapes that each kernel call cast in a forward pass after a step, and in its backward pass.

    `ended` ends the scope before the backward pass. The gradients must be plain autocast's, bit for bit.
    """
    x = torch.randn(3, 8)
    with amp_core.autocast("cpu"):
        model(x).float().sum().backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    calls = shapes_of_casts(monkeypatch)
    with amp_core.cached_casts(model) as scope:
        with amp_core.autocast("cpu"):
            model(x)  # which weights it takes is learnt
        torch._foreach_mul_([p.detach() for p in model.parameters()], 1.0)
        calls.clear()
        with amp_core.autocast("cpu"):
            loss = model(x).float().sum()
        forward = calls[:]
        if ended:
            scope.remove()
        loss.backward()
    for param, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(param.grad, grad, rtol=0, atol=0)
    return forward, calls[len(forward) :]


@pytest.mark.parametrize("ended", [False, True])
def test_one_kernel_call_for_all_weights(ended: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large model costs a launch a bucket; or its buckets get the casts of one another."""
    from amp_core.casts import bulk

    monkeypatch.setattr(bulk, "BUCKET_BYTES", 300)
    monkeypatch.setattr(bulk, "SMALL_ON_HOST", 0)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    forward, backward = casts_of_a_step(model, monkeypatch, ended=ended)
    assert [len(shapes) for shapes in forward] == [8]
    assert sum(map(len, backward)) == 8
    assert len(backward) > 1


@pytest.mark.parametrize("ended", [False, True])
def test_small_weights_are_cast_by_torch(ended: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each small weight costs a deep model more in Python, forward and backward, than its cast takes."""
    model = nn.Sequential(nn.Linear(8, 1100), *[nn.Linear(1100, 1100) for _ in range(2)], nn.Linear(1100, 8))
    forward, backward = casts_of_a_step(model, monkeypatch, ended=ended)
    assert forward == backward == [2 * [(1100, 1100)]]


def test_gradients_are_cast_back_during_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """All gradients are cast back at its end: they wait in memory, and DDP has nothing to overlap."""
    from amp_core.casts import bulk

    monkeypatch.setattr(bulk, "BUCKET_BYTES", 1)
    model = nn.Sequential(*[nn.Linear(6, 6, bias=False) for _ in range(3)])
    events: list[str] = []
    for i, layer in enumerate(model):
        layer.weight.register_post_accumulate_grad_hook(lambda _, i=i: events.append(f"cast {i}"))
    with cached_casts(model), autocast("cpu"):
        y = X
        for i, layer in enumerate(model):
            y = layer(y)
            y.grad_fn.register_prehook(lambda _, i=i: events.append(f"layer {i}"))
        y.float().sum().backward()
    assert events == ["layer 2", "cast 2", "layer 1", "cast 1", "layer 0", "cast 0"]


def test_another_threads_exit_drops_nothing() -> None:
    """A thread that leaves its outermost region clears the casts that this one goes on using."""
    model = make()

    def other() -> None:
        with autocast("cpu"):
            pass

    def twice() -> None:
        with autocast("cpu"):
            model(X)
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
            model(X)

    with cached_casts(model):
        assert casts_of(model, twice) == 4
