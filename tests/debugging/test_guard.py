"""`guard`: stops at the op that makes inf or NaN, and at nothing else."""

from __future__ import annotations

import inspect
import math
import sys
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import amp_core
from amp_core import GradScaler, NonFiniteError, autocast

from ..drawn import TIMES, chance

FP16 = torch.float16


class Root(torch.autograd.Function):
    """An op whose backward pass divides by its result, which is 0."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 0

    @staticmethod
    def backward(ctx, grad):
        return grad / (ctx.saved_tensors[0] * 0)


class Faulty(nn.Module):
    """Correct until `broken` is set."""

    def __init__(self, phase):
        super().__init__()
        self.first, self.last, self.phase, self.broken = nn.Linear(4, 4), nn.Linear(4, 4), phase, False

    def forward(self, x):
        x = self.first(x)
        if self.broken:
            x = torch.exp(x.abs() + 1000) if self.phase == "forward" else Root.apply(x)  # the fault
        return self.last(x)


def line_of(fault):
    file, _, number = fault.line.rpartition(":")
    with open(file, encoding="utf-8") as source:
        return source.readlines()[int(number) - 1]


def train(model, steps, broken_at, scaler=None):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for number in range(steps):
        model.broken = number >= broken_at
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).sum()
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()


@dataclass
class Output:
    logits: torch.Tensor


@pytest.mark.parametrize(
    "wrapped", [lambda y: {"logits": [y]}, lambda y: deque([y]), Output], ids=["dict", "deque", "dataclass"]
)
def test_a_fault_in_a_result_of_several_parts(wrapped):
    """The guard does not look into the container that the model returns."""
    model = Faulty("forward")
    model.broken, plain = True, model.forward
    model.forward = lambda x: wrapped(plain(x))
    with amp_core.guard(model) as guard, pytest.raises(NonFiniteError):
        model(torch.ones(2, 4))
    assert guard.fault.kernel == "aten::exp"


@pytest.mark.parametrize(
    "steps", [None, [3], lambda number: number == 3], ids=["watched", "list", "function"]
)
def test_a_forward_fault_is_named(steps):
    """Training goes on with NaN, or the message names a later op."""
    model = Faulty("forward")
    with amp_core.guard(model, steps=steps) as guard, pytest.raises(NonFiniteError) as caught:
        train(model, 6, broken_at=3)
    fault = caught.value.fault
    assert fault is guard.fault
    assert (fault.step, fault.phase, fault.kernel, str(fault.place)) == (
        3,
        "forward",
        "aten::exp",
        "(Faulty)",
    )
    assert "the fault" in line_of(fault)
    assert fault.result.not_finite == 1
    assert 1000 < fault.inputs[0].largest < 1010
    assert "float32 [2, 4], magnitudes 1e+03 to 1e+03" in str(caught.value)


def test_the_rule_that_chose_the_dtype():
    """An overflow in float16 does not say that autocast chose float16."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    nn.init.constant_(model[1].weight, 6e4)
    nn.init.constant_(model[0].weight, 1.0)
    with amp_core.guard(model), autocast("cpu", dtype=FP16), pytest.raises(NonFiniteError) as caught:
        model(torch.ones(2, 4))
    fault = caught.value.fault
    assert (fault.op, str(fault.place)) == ("aten::linear.default", "1")
    assert fault.rule.startswith("lower_precision_fp (default of cpu")
    assert {tensor.dtype for tensor in fault.inputs} == {FP16}


def test_a_cast_that_overflows():
    """A number above 65504 is cast to float16, and the linear layer is blamed for its inf."""
    model = nn.Sequential(nn.Linear(4, 4))
    with amp_core.guard(model), autocast("cpu", dtype=FP16), pytest.raises(NonFiniteError) as caught:
        model(torch.full((2, 4), 1e5))
    assert caught.value.fault.op == "the cast to float16"
    assert caught.value.fault.inputs[0].largest == 1e5


def test_a_backward_fault_without_a_scaler():
    """NaN reaches the weights; or the op and the line of its forward op are not named in a chosen step."""
    model = Faulty("backward")
    with amp_core.guard(model), pytest.raises(NonFiniteError, match=r"first\.weight.*steps=\[2\]"):
        train(model, 6, broken_at=2)
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    with amp_core.guard(model, steps=[2]), pytest.raises(NonFiniteError) as caught:
        train(model, 6, broken_at=2)
    fault = caught.value.fault
    assert (fault.phase, fault.kernel) == ("backward", "aten::div.Tensor")
    assert "Root.apply" in line_of(fault) or "x * 0" in line_of(fault)


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.LBFGS])
def test_a_backward_fault_in_a_closure(kind, named):
    """NaN reaches the weights of a trainer that steps with a closure before the guard sees it."""
    model = Faulty("backward")
    optimizer = kind(model.parameters(), lr=0.01)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().sum()
        loss.backward()
        return loss

    def step():
        return optimizer.step(closure=closure) if named else optimizer.step(closure)

    with amp_core.guard(model) as guard:
        step()
        model.broken, last = True, guard.step
        with pytest.raises(NonFiniteError, match=rf"step {last + 1} .*first\.weight"):
            step()
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_skipped_steps_stop_after_patience():
    """The guard stops at the first skip, which the scaler handles, or never."""
    model, scaler = Faulty("backward"), GradScaler("cpu")
    with amp_core.guard(model, patience=3) as guard, pytest.raises(NonFiniteError) as caught:
        train(model, 9, broken_at=2, scaler=scaler)
    assert guard.step == 5
    assert caught.value.fault.kernel == "aten::div.Tensor"
    with amp_core.guard(Faulty("backward"), patience=3):
        train(model, 4, broken_at=2, scaler=scaler)  # two skips: not enough


@pytest.mark.parametrize("inplace", [False, True])
def test_masks_are_no_fault(inplace):
    """An attention mask of -inf is taken for an overflow."""

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.q = nn.Linear(4, 4)

        def forward(self, x):
            scores = self.q(x) @ x.T
            mask = torch.full((8, 8), -math.inf).triu_(1)
            hidden = torch.ones(8, 8).triu(1).bool()
            scores = scores.masked_fill_(hidden, -math.inf) if inplace else scores + mask
            return torch.softmax(scores * 0.5, -1)

    model = Masked()
    with amp_core.guard(model, steps=range(2)):
        model(torch.randn(8, 4)).sum().backward()


def test_broken_parameters_are_named():
    """A checkpoint with NaN in it is blamed on the op that uses it."""
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].bias.data[1] = math.nan
    with (
        amp_core.guard(model),
        pytest.raises(NonFiniteError, match=r"step 0 has inf or NaN.*0\.bias") as caught,
    ):
        model(torch.ones(2, 4))
    assert caught.value.fault is None


@pytest.mark.parametrize("place", ["its arguments have them", "perhaps another tensor"])
def test_values_that_no_op_made(place):
    """The search goes on in a model that is right, although its data or its buffers are not."""
    model, x = nn.BatchNorm1d(4).eval(), torch.ones(2, 4)
    (x if "arguments" in place else model.running_mean)[..., 1] = math.nan
    with amp_core.guard(model), pytest.raises(NonFiniteError, match=f"no op made them: {place}"):
        model(x)


class Codebook(nn.Module):
    """Divides by counts of 0 in its first call, as quantizers that keep averages of their input do."""

    def __init__(self):
        super().__init__()
        self.register_buffer("counts", torch.zeros(4))

    def forward(self, x):
        result = x / self.counts
        self.counts += 1
        return result


def test_an_op_that_a_second_forward_pass_does_not_show():
    """The user looks for another tensor that has inf or NaN, and there is none."""
    with (
        amp_core.guard(Codebook()) as guard,
        pytest.raises(NonFiniteError, match=r"changed\..*guard\(model, steps=\[0\]\)"),
    ):
        guard.model(torch.ones(2, 4))
    with (
        amp_core.guard(Codebook(), steps=[0]) as guard,
        pytest.raises(NonFiniteError, match=r"div.*makes inf"),
    ):
        guard.model(torch.ones(2, 4))


class Masked(nn.Linear):
    def forward(self, x):
        return super().forward(x).masked_fill(x < 0, -math.inf)


@pytest.mark.parametrize("steps", [(), range(3)])
def test_masks_in_the_result_are_no_fault(steps):
    """Logits that the model itself sets to -inf (Grounding DINO's) stop training in its first step."""
    model, x = Masked(4, 4), torch.tensor([[1.0, 2.0, -1.0, 3.0]])
    with amp_core.guard(model, steps=steps):
        for _ in range(2):
            model(x)[x > 0].sum().backward()
        with pytest.raises(NonFiniteError, match="its arguments have them"):
            model(torch.full((1, 4), math.nan))


def test_masks_inside_hide_no_overflow():
    """A model with a mask of -inf, as attention has, is no longer checked for inf."""
    model = nn.Sequential(Masked(4, 4), nn.Softmax(-1), nn.Linear(4, 4))
    with amp_core.guard(model, steps=[0]):
        model(torch.tensor([[1.0, -1.0, -1.0, 1.0]]).neg())
        nn.init.constant_(model[2].weight, 3e38)
        nn.init.constant_(model[2].bias, 3e38)
        with pytest.raises(NonFiniteError, match="addmm in 2 makes inf"):
            model(torch.ones(1, 4))


def test_nothing_remains():
    """A removed guard still stops the program, or slows it down."""
    model = Faulty("forward")
    guard = amp_core.guard(model, steps=[0])
    model(torch.ones(2, 4))
    guard.remove()
    guard.remove()
    model.broken = True
    model(torch.ones(2, 4))
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert guard.step == 0


@pytest.mark.parametrize("tool", [amp_core.guard, amp_core.watch])
@pytest.mark.parametrize("interrupted", ["register_forward_hook", "register_forward_pre_hook"])
def test_an_interrupt_while_it_attaches(tool, interrupted, monkeypatch):
    """Ctrl-C leaves a hook of an unfinished tool: every later call of the model raises an AttributeError."""
    model = nn.Linear(4, 4)
    register = getattr(nn.Module, interrupted)

    def stop(*args, **kwargs):
        register(*args, **kwargs)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(nn.Module, interrupted, stop)
        with pytest.raises(KeyboardInterrupt):
            tool(model)
    model(torch.ones(2, 4))
    with tool(model) as attached:
        model(torch.ones(2, 4))
    assert attached.step == 0


@pytest.mark.parametrize("interrupted", ["guard.watch_steps", "tap.Tap._watch", "places.Places._mark"])
def test_an_interrupt_while_a_search_begins(interrupted, monkeypatch):
    """Ctrl-C leaves a guard that cannot be removed, and compiled functions run eagerly for good."""
    model = nn.Linear(4, 4)

    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    with amp_core.guard(model, steps=range(9)):
        for _ in range(2):  # the first search of a guard, and a later one
            with monkeypatch.context() as patch:
                patch.setattr(f"amp_core.debugging.{interrupted}", stop)
                with pytest.raises(KeyboardInterrupt):
                    model(torch.ones(2, 4))
            model(torch.ones(2, 4)).sum().backward()
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    assert torch._dynamo.eval_frame._stance.stance == "default"
    assert not torch.nn.modules.module._global_forward_pre_hooks


def test_a_guard_that_cannot_be_registered_is_off():
    """On a stack that is nearly full, guard() raises, and its guard stays on with nobody to remove it."""
    limit, model, stopped = sys.getrecursionlimit(), nn.Linear(4, 4), 0
    nn.init.constant_(model.weight, torch.inf)
    amp_core.guard(model).remove()
    for room in range(12 if sys.version_info < (3, 12) else 4, 60):  # calls of C counted, too
        sys.setrecursionlimit(len(inspect.stack()) + room)
        try:
            amp_core.guard(model).remove()
        except RecursionError:
            stopped += 1
        finally:
            sys.setrecursionlimit(limit)
        model(torch.ones(2, 4))
    assert stopped > 5


@pytest.mark.parametrize("bad", [{"model": None}, {"model": 1}, {"model": nn.Linear(1, 1), "patience": 0}])
def test_bad_arguments_attach_nothing(bad):
    """A wrong argument surfaces inside a forward pass."""
    with pytest.raises((TypeError, ValueError), match=r"needs a torch\.nn\.Module|patience"):
        amp_core.guard(**bad)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # Dynamo's, after a graph break
@pytest.mark.parametrize("inner", [False, True], ids=["compiled", "before compilation"])
@pytest.mark.parametrize("earlier", [0, 1], ids=["new", "has run"])
def test_a_compiled_model(inner, earlier):
    """Dynamo traces the guard's hooks or does not call them, or a fault in compiled code is not named."""
    torch.compiler.reset()
    model = Faulty("forward")
    compiled = torch.compile(model, backend="eager")
    train(compiled, earlier, broken_at=9)
    with amp_core.guard(model if inner else compiled):
        train(compiled, 2, broken_at=9)
        model.broken = True
        with pytest.raises(NonFiniteError) as caught:
            compiled(torch.ones(2, 4))
    assert caught.value.fault.kernel == "aten::exp"


@pytest.mark.parametrize("seed", range(int(20 * TIMES)))
def test_steps_of_several_threads(seed):
    """The call that ended a step which another thread had begun raised "pop from empty mode stack"."""
    draw, x = chance(seed), torch.ones(2, 4)
    model = Faulty("forward")
    modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack

    def step(backward):
        result = model(x)
        if backward:
            result.sum().backward()
        return result.detach()

    def modes_after_a_recording():
        with amp_core.record():
            pass
        return modes()

    expected = step(False)
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        threads = [one, other]
        guard = amp_core.guard(model, steps=range(draw.randrange(1, 9)))
        for _ in range(8):
            assert torch.equal(draw.choice(threads).submit(step, draw.random() < 0.5).result(), expected)
        model.broken = True
        with pytest.raises(NonFiniteError, match="exp in"):
            draw.choice(threads).submit(step, False).result()
        guard.remove()
        model.broken = False
        for thread in threads:
            assert torch.equal(thread.submit(torch.compile(step, backend="eager"), False).result(), expected)
            assert not thread.submit(modes_after_a_recording).result()


def test_a_program_goes_on_after_the_error():
    """A program that catches the error is stopped again, by ops that are no part of the model."""
    model = Faulty("forward")
    model.broken = True
    with amp_core.guard(model, steps=range(9)) as guard:
        for step in range(2):
            with pytest.raises(NonFiniteError, match=f"exp in .*step {step}"):
                model(torch.ones(2, 4))
            assert torch.log(torch.zeros(3)).isinf().all()
            assert guard.fault.step == step


@pytest.mark.parametrize("steps", [None, range(9)], ids=["watched", "chosen"])
def test_a_rehearsal_is_no_training_step(steps):
    """The guard stops `compare` at the op that it looks for, or its runs count as steps."""
    model = nn.Linear(4, 4)
    nn.init.constant_(model.weight, 6e4)

    def step():
        return model(torch.ones(2, 4)).sum()

    with amp_core.guard(model, steps=steps) as guard, amp_core.watch(model, every=1) as ranges:
        loss = step()
        assert amp_core.compare(step, "cpu", dtype=FP16).first_not_finite is not None
        assert amp_core.advise(step, "cpu", dtype=FP16).modules
        amp_core.advise(step, "cpu", dtype=FP16, goal="speed")
        loss.backward()
        assert guard.step == ranges.step == 0
        assert sorted(e.kind for e in ranges.entries) == sorted(
            ["weight", "weight", "activation", "gradient", "weight gradient", "weight gradient"]
        )
        with autocast("cpu", dtype=FP16), pytest.raises(NonFiniteError):
            step()


def test_what_compare_computes_of_its_values_is_not_the_program_s():
    """The guard stops `compare` at the difference of two NaN, and a recording counts such ops."""
    model = nn.Linear(4, 4)

    def step():
        zero = model(torch.ones(2, 4)) * 0
        return (zero / zero).nan_to_num().sum()

    with amp_core.guard(model, steps=range(9)), amp_core.record() as r:
        model(torch.ones(2, 4))
        amp_core.compare(step, "cpu")
    assert not [op for op in r.ops if "float64" in op.dtypes]


class InAutogradThread(torch.autograd.Function):
    """Calls a function in a thread of autograd's, as on a GPU; on the CPU, nesting so deep takes one."""

    @staticmethod
    def forward(ctx, x, call, depth=70):
        ctx.call, ctx.depth = call, depth
        return x.clone()

    @staticmethod
    def backward(ctx, _grad):
        if ctx.depth == 0:
            ctx.call()
            return None, None, None
        with torch.enable_grad():
            InAutogradThread.apply(torch.ones((), requires_grad=True), ctx.call, ctx.depth - 1).backward()
        return None, None, None


def test_a_rehearsal_whose_backward_pass_runs_in_another_thread():
    """On a GPU, the guard stops `compare` at a gradient, or its gradients count as those of the training."""
    model, threads = nn.Linear(4, 4), {threading.get_ident()}
    optimizer = torch.optim.SGD(model.parameters())

    def step():
        loss = Root.apply(model(torch.ones(2, 4))).sum()

        def train():
            threads.add(threading.get_ident())
            loss.backward()
            optimizer.step()

        InAutogradThread.apply(torch.ones((), requires_grad=True), train).backward()

    with amp_core.guard(model, steps=range(9)) as guard, amp_core.watch(model, every=1) as ranges:
        model(torch.ones(2, 4))
        entries = [*ranges.entries]
        amp_core.compare(step, "cpu", model=model)
        assert (guard.step, ranges.entries) == (0, entries)
        with pytest.raises(NonFiniteError):
            step()
    assert len(threads) > 1


@pytest.mark.parametrize(("zeros", "share"), [(1, "<0.1 %"), (9999, ">99.9 %"), (10_000, "100.0 %")])
def test_a_few_values_that_are_not_finite_or_still_finite_are_told_from_none(zeros, share):
    """The message says that 0.0 % of the result are inf, or all of it where a number is left."""
    x = torch.ones(10_000)
    x[:zeros] = 0
    with amp_core.guard(nn.Identity(), steps=[0]) as guard:
        guard.model(x)
        with pytest.raises(NonFiniteError, match=f", {share} inf or NaN$"):
            x.log()


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_a_model_of_torchscript_is_refused() -> None:
    """The error is torch's, about a hook that the caller has not registered."""
    with pytest.raises(TypeError, match=r"into the model, which TorchScript has compiled"):
        amp_core.guard(torch.jit.script(nn.Linear(2, 2)))
