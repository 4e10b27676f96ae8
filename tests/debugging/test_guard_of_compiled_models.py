"""Steps that `guard` checks op by op, of models that compiled functions call in other steps."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amp_core import AmpError, GradScaler, NonFiniteError, autocast, guard

X = torch.ones(2, 4)
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # by torch, when it compiles
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),  # by Dynamo, between graphs
]
if torch.__version__.startswith("2.12."):  # of steps that run uncompiled; plain torch 2.12 gives it too
    _NOT_COMPILED = "ignore:torch.compile with fullgraph=True found no compiled frames:UserWarning"
    pytestmark.append(pytest.mark.filterwarnings(_NOT_COMPILED))


@torch.library.custom_op("amp_core_tests::root", mutates_args=())
def root(x: Tensor) -> Tensor:
    return x.sqrt()


@root.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


root.register_autograd(
    lambda ctx, grad: grad / (2 * ctx.saved_tensors[0]),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
)


class Model(nn.Module):
    """Its backward pass divides by zero once its weights are zero."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(root(self.first(x).square()))


class Training:
    """A model, and steps of it that are compiled in one of several ways."""

    def __init__(self, how: str = "") -> None:
        torch.manual_seed(0)
        torch.compiler.reset()
        self.model = Model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.125)
        self.scaler: GradScaler | None = None
        self.called: Any = self.model
        self.forward = self.plain
        if how == "in place":
            self.model.compile(backend="aot_eager", fullgraph=True)
        elif how == "module":
            self.called = torch.compile(self.model, backend="aot_eager")
        elif how == "function":
            self.forward = torch.compile(self.plain, backend="aot_eager")

    def plain(self, x: Tensor) -> Tensor:
        with autocast("cpu"):
            return self.called(x).float().square().sum()

    def step(self, forward: Any = None) -> Tensor:
        loss = (self.forward if forward is None else forward)(X)
        if self.scaler is None:
            loss.backward()
            self.optimizer.step()
        else:
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad()
        return loss

    def is_compiled(self) -> bool:
        result = self.called(X)
        result.sum().backward()
        self.optimizer.zero_grad()
        return result.grad_fn.name() == "CompiledFunctionBackward"

    def break_backward(self) -> None:
        nn.init.zeros_(self.model.first.weight)
        nn.init.zeros_(self.model.first.bias)


@pytest.mark.parametrize("how", ["module", "in place"])
def test_chosen_steps_of_a_compiled_model(how: str) -> None:
    """The model stays uncompiled after the step, or training ends with an internal error of torch."""
    plain, compiled = Training(), Training(how)
    expected = [plain.step() for _ in range(4)]
    with guard(compiled.called, steps=[1]):
        found = [compiled.step() for _ in range(4)]
        assert compiled.is_compiled()
    assert all(torch.allclose(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("how", ["module", "in place"])
@pytest.mark.parametrize("scaled", [False, True])
def test_a_backward_fault_of_a_compiled_model(scaled: bool, how: str) -> None:
    """The op of the backward pass is not found."""
    training = Training(how)
    if scaled:
        training.scaler = GradScaler("cpu", init_scale=4.0)
    with guard(training.called, steps=[1]) as guarded:
        training.step()
        training.break_backward()
        with pytest.raises(NonFiniteError):
            training.step()
    assert guarded.fault is not None
    assert guarded.fault.phase == "backward"


@pytest.mark.parametrize("how", ["later", "inner", "function"])
def test_a_model_that_a_compiled_function_calls(how: str) -> None:
    """The backward pass goes unchecked, or a later step ends with an internal error of torch."""
    training = Training("module" if how == "inner" else how)
    expected = Training().step()
    with guard(training.model, steps=[1]) as guarded:
        if how == "later":
            training.model.compile(backend="aot_eager")
        assert torch.allclose(training.step(), expected)
        with pytest.raises(AmpError, match=r"step 1 is to be checked.*torch\.compile\(model\)"):
            training.step()
        assert guarded.step == 1
        training.step()
    training.step()
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()


@pytest.mark.parametrize("steps", [None, [0]])
def test_a_forward_fault_of_a_model_compiled_in_place(steps: Any) -> None:
    """Only the result is known to be bad, or the guard breaks the graph."""
    training = Training("in place")
    nn.init.constant_(training.model.first.weight, 1e38)
    with guard(training.model, steps=steps) as guarded, pytest.raises(NonFiniteError):
        training.step()
    assert guarded.fault is not None
    assert guarded.fault.phase == "forward"


def test_guards_of_a_model_compiled_in_place() -> None:
    """One of two sees no call, or the model calls a guard for ever, or a copy has one."""
    training = Training("in place")
    compiled = training.model._compiled_call_impl
    first, second = guard(training.model), guard(training.model, steps=[1])
    copy = pickle.loads(pickle.dumps(training.model))
    for _ in range(3):
        training.step()
    copy(X).sum().backward()
    assert first.step == second.step == 2
    for each in (first, second):
        each.remove()
        training.step()
    assert training.model._compiled_call_impl in (compiled, first._call)
    assert first.step == 2
    assert second.step == 3


def test_a_model_compiled_again_under_a_guard() -> None:
    """The guard sees no call from then on, and says nothing."""
    training = Training("in place")
    with guard(training.model):
        training.step()
        training.model.compile(backend="aot_eager")
        with pytest.raises(AmpError, match="has seen no call since"):
            training.step()
    compiled = training.model._compiled_call_impl
    training.step()
    assert training.model._compiled_call_impl is compiled


@pytest.mark.parametrize("scaled", [False, True])
def test_a_chosen_step_that_runs_uncompiled(scaled: bool) -> None:
    """The search goes on until the next call, in which a compiled function cannot end it."""
    training = Training("function")
    if scaled:
        training.scaler = GradScaler("cpu", init_scale=4.0)
    with guard(training.model, steps=[1]):
        training.step()
        training.step(training.plain)
        training.step()
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()


def test_a_chosen_step_without_an_optimizer() -> None:
    """The error of the next call, which a compiled function makes, names that call and not the step."""
    training = Training("function")
    with guard(training.model, steps=[0]):
        training.plain(X).backward()
        with pytest.raises(AmpError, match="step 0 is to be checked"):
            training.step()
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()


def test_two_optimizers_of_a_chosen_step() -> None:
    """The search ends with the first of them, and what the second one computes goes unchecked."""
    training = Training()
    weights = [training.model.first.weight, training.model.last.weight]
    optimizers = [torch.optim.Adam([weight], lr=0.125, fused=False, foreach=False) for weight in weights]
    with guard(training.model, steps=[0]):
        training.plain(X).backward()
        for optimizer in optimizers:
            assert torch.utils._python_dispatch._get_current_dispatch_mode_stack()
            optimizer.step()


def test_skips_in_a_row_of_a_compiled_step() -> None:
    """The guard says that steps are chosen, or lets the scaler skip steps for ever."""
    training = Training("function")
    training.scaler = GradScaler("cpu", init_scale=2.0**127)
    nn.init.constant_(training.model.last.bias, 8.0)
    with guard(training.model, patience=2):
        for _ in range(2):
            training.step()
        with pytest.raises(NonFiniteError, match="compiled function calls"):
            training.step()


def test_a_guard_that_a_compiled_function_removes() -> None:
    """The next backward pass ends with an internal error of torch."""
    training = Training()
    guarded = guard(training.model, steps=[0])
    remove = torch.compile(lambda x: (guarded.remove(), x + 1), backend="aot_eager")
    loss = training.plain(X)
    with pytest.raises(AmpError, match=r"every op of step 0.*Call remove\(\) there"):
        remove(X)
    loss.backward()
    training.optimizer.step()
    remove(X)
    training.step()
    assert guarded.step == 0


def test_a_copy_in_a_chosen_step() -> None:
    """What ends the search belongs to this process, and cannot be pickled."""
    model = nn.Linear(4, 4)
    with guard(model, steps=[0]) as guarded:
        model(X).sum().backward()
        assert pickle.loads(pickle.dumps(guarded)).step == 0
        torch.optim.SGD(model.parameters(), lr=0.125).step()
        assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
