"""Optimizers that evaluate the loss themselves work on true gradients, or skip the step whole."""

from __future__ import annotations

import copy
import math
import operator
from typing import Any

import pytest
import torch

from amp_core import AccumulationWindow, GradScaler


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimization (Foret et al. 2021), with its gradients before the step or in it."""

    def __init__(self, params: Any, lr: float, first_from_closure: bool) -> None:
        super().__init__(params, {"lr": lr})
        self.first_from_closure = first_from_closure

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        closure = torch.enable_grad()(closure)
        loss = closure() if self.first_from_closure else None
        params = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        for p in params:
            self.state[p]["before"] = p.clone()
            p.add_(p.grad * (0.05 / norm))
        loss = closure() if loss is None else (closure(), loss)[1]
        for p in params:
            p.copy_(self.state[p]["before"]).sub_(p.grad, alpha=self.param_groups[0]["lr"])
        return loss


def lbfgs(params: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(params, lr=0.5, max_iter=4, history_size=3, line_search_fn="strong_wolfe")


class Wrapping(torch.optim.Optimizer):
    """Lets another optimizer step, which keeps its state to itself."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


class Problem:
    """Fit a small network; `spoil` names the evaluations whose gradients are made NaN."""

    def __init__(self, kind: Any, scaler: GradScaler | None) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
        self.inputs, self.targets = torch.randn(8, 3), torch.randn(8, 1)
        self.optimizer, self.scaler = kind(self.model.parameters()), scaler
        self.evaluations = 0

    def closure(self, spoil: int = -1) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = (self.model(self.inputs) - self.targets).square().mean()
        (self.scaler.scale(loss) if self.scaler else loss).backward()
        if self.evaluations == spoil:
            self.model[0].weight.grad[1, 1] = math.nan
        self.evaluations += 1
        return loss

    def step(self, spoil: int = -1, **options: Any) -> Any:
        self.evaluations = 0
        if self.scaler is None:
            return self.optimizer.step(self.closure)
        loss = self.scaler.step_closure(self.optimizer, lambda: self.closure(spoil), **options)
        self.scaler.update()
        return loss

    def values(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]


KINDS = {
    "lbfgs": lbfgs,
    "sam": lambda params: Sam(params, 0.1, first_from_closure=True),
    "wrapping": lambda params: Wrapping(lbfgs(params)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_as_without_scaling(kind: str) -> None:
    """The optimizer sees scaled gradients, or a scaled loss, and goes elsewhere."""
    plain, scaled = Problem(KINDS[kind], None), Problem(KINDS[kind], GradScaler("cpu", 2.0**10))
    for _ in range(3):
        assert torch.equal(plain.step(), scaled.step())
    assert all(map(torch.equal, plain.values(), scaled.values()))
    assert [r.skipped for r in scaled.scaler.history] == [False] * 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spoil", [0, 1])
def test_an_overflow_in_any_evaluation_skips_the_step_whole(kind: str, spoil: int) -> None:
    """NaN is stepped into the parameters, or they are left where a line search was."""
    scaler = GradScaler("cpu", 2.0**10)
    run = Problem(KINDS[kind], scaler)
    scaler._log.names.update({id(p): name for name, p in run.model.named_parameters()})
    run.step()
    before, state = run.values(), copy.deepcopy(run.optimizer.state_dict()["state"])
    assert run.step(spoil) is None
    assert run.evaluations == spoil + 1
    assert all(map(torch.equal, run.values(), before))
    torch.testing.assert_close(run.optimizer.state_dict()["state"], state, rtol=0, atol=0)
    record = scaler.last_step[run.optimizer]
    assert (record.skipped, record.scale_after) == (True, 2.0**9)
    assert [(b.name, b.nonfinite) for b in record.bad_parameters] == [("0.weight", 1)]
    plain = Problem(KINDS[kind], None)
    plain.step()
    assert torch.equal(plain.step(), run.step())  # as if the step had not been tried
    assert all(map(torch.equal, plain.values(), run.values()))


@pytest.mark.parametrize("spoil", [-1, 0, 1])
def test_gradients_from_before_the_step(spoil: int) -> None:
    """SAM's first gradients, computed before its step, are not unscaled, or not checked."""

    def kind(params: Any) -> torch.optim.Optimizer:
        return Sam(params, 0.1, first_from_closure=False)

    plain, scaled = Problem(kind, None), Problem(kind, GradScaler("cpu", 2.0**10))
    before = plain.values()
    plain.closure()
    plain.optimizer.step(plain.closure)
    scaled.closure(spoil)
    scaled.scaler.unscale_(scaled.optimizer)
    scaled.scaler.step_closure(scaled.optimizer, lambda: scaled.closure(spoil))
    scaled.scaler.update()
    expected = plain.values() if spoil < 0 else before
    assert all(map(torch.equal, scaled.values(), expected))
    assert scaled.scaler.last_step[scaled.optimizer].skipped is (spoil >= 0)


def test_each_evaluation_is_clipped() -> None:
    """max_norm clips the first evaluation only, or does nothing without scaling."""
    runs = [Problem(KINDS["sam"], GradScaler("cpu", 2.0**10, enabled=e)) for e in (True, False)]
    unclipped = Problem(KINDS["sam"], None)
    unclipped.step()
    for run in runs:
        run.step(max_norm=0.01)
        norm = torch.stack([p.grad.norm() for p in run.model.parameters()]).norm()
        assert norm.item() == pytest.approx(0.01, rel=1e-3)
    for ours, theirs, loose in zip(runs[0].values(), runs[1].values(), unclipped.values(), strict=True):
        torch.testing.assert_close(ours, theirs)
        assert not torch.equal(ours, loose)


def test_stages_keys_and_errors() -> None:
    """A second step before update(), or a closure that scales nothing, goes through; a key is lost."""
    run = Problem(lbfgs, GradScaler("cpu"))
    with pytest.raises(AssertionError, match="Attempted step_closure but _scale is None"):
        run.scaler.step_closure(run.optimizer, lambda: torch.zeros(()))
    with pytest.raises(AssertionError, match=r"_scale is None.* No loss was scaled under the key 'typo'"):
        run.scaler.step_closure(run.optimizer, run.closure, key="typo")
    run.optimizer.zero_grad()
    run.scaler.scale(torch.ones(1))
    with pytest.raises(AssertionError, match=r"given to this LBFGS left no gradient: it must call scaler\."):
        run.scaler.step_closure(run.optimizer, lambda: torch.zeros(()))
    run.scaler.step_closure(run.optimizer, run.closure)
    with pytest.raises(RuntimeError, match=r"step\(\) has already been called"):
        run.scaler.step_closure(run.optimizer, run.closure)
    with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
        run.scaler.step(run.optimizer, run.closure)  # torch's contract
    run.scaler.update()

    def keyed() -> torch.Tensor:
        run.optimizer.zero_grad()
        loss = run.model(run.inputs).square().mean()
        run.scaler.scale(loss, key="g").backward()
        return loss

    run.scaler.step_closure(run.optimizer, keyed, key="g")
    run.scaler.update()
    assert run.scaler.last_step[run.optimizer].key == "g"


def test_an_error_in_the_closure_leaves_all_as_it_was() -> None:
    """After an error in the third evaluation the parameters stay where the line search was."""
    run = Problem(lbfgs, GradScaler("cpu"))
    before = run.values()

    def closure() -> torch.Tensor:
        if run.evaluations == 2:
            raise MemoryError
        return run.closure()

    with pytest.raises(MemoryError):
        run.scaler.step_closure(run.optimizer, closure)
    assert all(map(torch.equal, run.values(), before))
    run.step()
    assert not run.scaler.last_step[run.optimizer].skipped


class Careless(torch.optim.SGD):
    """Calls the closure so often, and goes on after an error in it."""

    def __init__(self, params: Any, calls: int) -> None:
        super().__init__(params, lr=0.1)
        self.calls = calls

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for _ in range(self.calls):
            try:
                closure()
            except Exception:
                continue
        return super().step()


@pytest.mark.parametrize("spoil", [0, 1, 2])
def test_an_optimizer_that_catches_the_overflow(spoil: int) -> None:
    """Inf is stepped into the parameters, the scale stays, or the record has another norm."""
    scaler = GradScaler("cpu", 2.0**10)
    run = Problem(lambda params: Careless(params, 3), scaler)
    before = run.values()
    assert run.step(spoil, max_norm=1.0) is None
    assert all(map(torch.equal, run.values(), before))
    record = scaler.last_step[run.optimizer]
    assert (record.skipped, len(record.bad_parameters), scaler.get_scale()) == (True, 1, 2.0**9)
    assert not math.isfinite(record.total_norm)


@pytest.mark.parametrize("calls", [0, 1])
def test_an_optimizer_that_steps_on_scaled_gradients(calls: int) -> None:
    """The closure was not called, or its error was caught: the step is larger by the scale, in silence."""
    run = Problem(lambda params: Careless(params, calls), GradScaler("cpu", 2.0**10))
    before = run.values()

    def closure() -> torch.Tensor:
        run.closure()
        raise MemoryError

    run.closure()
    with pytest.raises(AssertionError, match=r"This Careless has stepped on gradients that were not uns"):
        run.scaler.step_closure(run.optimizer, closure)
    assert all(map(torch.equal, run.values(), before))
    assert run.optimizer not in run.scaler.last_step
    run.optimizer.calls = 1
    run.step()
    assert not run.scaler.last_step[run.optimizer].skipped


def test_a_closure_that_unscales() -> None:
    """A closure cannot clip by value, as a step without one can."""
    plain, scaled = Problem(KINDS["sam"], None), Problem(KINDS["sam"], GradScaler("cpu", 2.0**10))

    def clipped(run: Problem) -> torch.Tensor:
        loss = run.closure()
        if run.scaler is not None:
            run.scaler.unscale_(run.optimizer)
        torch.nn.utils.clip_grad_value_(run.model.parameters(), 0.05)
        return loss

    plain.optimizer.step(lambda: clipped(plain))
    scaled.scaler.step_closure(scaled.optimizer, lambda: clipped(scaled))
    assert all(map(torch.equal, plain.values(), scaled.values()))


def test_a_closure_that_steps() -> None:
    """The optimizer steps twice on the gradients of one evaluation, in silence."""
    scaler = GradScaler("cpu", 2.0**10)
    run = Problem(lambda params: torch.optim.SGD(params, lr=0.1), scaler)
    before = run.values()

    def closure() -> torch.Tensor:
        loss = run.closure()
        scaler.step(run.optimizer)
        return loss

    with pytest.raises(RuntimeError, match=r"unscale_\(\) is being called after step\(\)"):
        scaler.step_closure(run.optimizer, closure)
    assert all(map(torch.equal, run.values(), before))


def test_after_an_error() -> None:
    """Unscaled gradients are unscaled again; a record has the norm of an evaluation before the error."""
    run = Problem(KINDS["sam"], GradScaler("cpu", 2.0**10))
    run.closure()
    run.scaler.unscale_(run.optimizer)
    run.optimizer.step = lambda _: 1 / 0  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        run.scaler.step_closure(run.optimizer, run.closure)
    with pytest.raises(RuntimeError, match=r"unscale_\(\) has already been called"):
        run.scaler.unscale_(run.optimizer)

    def fails(closure: Any) -> None:
        closure()
        raise MemoryError

    run.optimizer.step = fails  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        run.scaler.step_closure(run.optimizer, run.closure, max_norm=1.0)
    del run.optimizer.step
    run.scaler.step_closure(run.optimizer, run.closure)
    assert run.scaler.last_step[run.optimizer].total_norm is None


def test_not_inside_a_window() -> None:
    """The window's parts are stepped on one by one, and it then adds up what is left of them."""
    run = Problem(KINDS["sam"], GradScaler("cpu"))
    window = AccumulationWindow(run.scaler, run.optimizer)
    with window, pytest.raises(RuntimeError, match=r"step_closure\(\) of this Sam was called inside"):
        run.scaler.step_closure(run.optimizer, run.closure)
    assert run.evaluations == 0


def test_the_key_under_which_gradients_were_unscaled() -> None:
    """The flags of SAM's first gradients are under another key than the step, and do not count."""
    run = Problem(lambda params: Sam(params, 0.1, first_from_closure=False), GradScaler("cpu"))
    run.scaler.scale(run.model(run.inputs).square().mean(), key="g").backward()
    run.model[0].bias.grad[0] = math.inf
    run.scaler.unscale_(run.optimizer, key="g")
    with pytest.raises(RuntimeError, match=r"step_closure\(\) was called with the key 'other' for this Sam"):
        run.scaler.step_closure(run.optimizer, run.closure, key="other")
    with pytest.raises(TypeError, match="must be a string, got 3"):
        run.scaler.step_closure(run.optimizer, run.closure, key=3)
    assert set(run.scaler.state_dict()["_keys"]) == {"g"}
    assert run.scaler.step_closure(run.optimizer, run.closure) is None
    assert run.scaler.last_step[run.optimizer].key == "g"
    assert run.evaluations == 0


@pytest.mark.parametrize(
    ("enabled", "clipping"),
    [
        (True, {"max_norm": -1.0}),
        (True, {"max_norm": 1.0, "norm_type": 0}),
        (False, {"max_norm": -1.0}),
        (False, {"max_norm": 1.0, "norm_type": math.nan}),
    ],
)
def test_wrong_clipping(enabled: bool, clipping: dict[str, float]) -> None:
    """The closure runs before the error, and its gradients take the place of those that SAM starts from."""
    run = Problem(
        lambda params: Sam(params, 0.1, first_from_closure=False), GradScaler("cpu", enabled=enabled)
    )
    run.scaler.scale(run.model(run.inputs).square().mean()).backward()
    run.scaler.unscale_(run.optimizer)
    with pytest.raises(ValueError, match=r"max_norm= must be at least 0|norm_type= (must be above 0|is NaN)"):
        run.scaler.step_closure(run.optimizer, run.closure, **clipping)
    assert run.evaluations == 0


class Counting(torch.optim.SGD):
    """Counts its steps in its options, as schedule-free optimizers do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        return super().step(closure)


def test_a_skipped_step_leaves_no_option_behind() -> None:
    """An option that the optimizer sets in its first step counts that step, which was skipped."""
    run = Problem(lambda params: Counting(params, lr=0.1), GradScaler("cpu"))
    run.step(spoil=0)
    assert "k" not in run.optimizer.param_groups[0]
    run.step()
    assert run.optimizer.param_groups[0]["k"] == 1


class Decaying(torch.optim.Adam):
    """Lowers its learning rate itself, in place."""

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["lr"].mul_(0.5)
        return super().step(closure)


def test_a_skipped_step_keeps_the_tensors_of_options() -> None:
    """A learning rate that the program holds and sets has no effect after a skipped step."""
    rate, betas = torch.tensor(0.5), (torch.tensor(0.75), torch.tensor(0.875))
    run = Problem(lambda params: Decaying(params, lr=rate, betas=betas), GradScaler("cpu"))
    run.step(spoil=0)
    (group,) = run.optimizer.param_groups
    assert group["lr"] is rate
    assert all(map(operator.is_, group["betas"], betas))
    assert (rate, *betas) == (0.5, 0.75, 0.875)


def test_an_error_in_inference_mode() -> None:
    """A copy that was made there and restored takes no more writes, so all later steps fail."""
    run = Problem(lambda params: torch.optim.Adam(params), GradScaler("cpu"))
    run.step()
    with torch.inference_mode(), pytest.raises(RuntimeError, match="does not require grad"):
        run.step()
    run.step()
    assert len(run.scaler.history) == 2
