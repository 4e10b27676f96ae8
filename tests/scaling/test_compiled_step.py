"""A whole training step under torch.compile: one graph where the optimizer can be traced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp_core

pytestmark = pytest.mark.filterwarnings(
    "ignore"
)  # Dynamo warns of its own doings, more so after a graph break


class Traceable(torch.optim.Optimizer):
    """Takes its factor and flag on the device, and has no graph break of its own, as torch's have."""

    _step_supports_amp_scaling = True
    grad_scale: Tensor
    found_inf: Tensor

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                with torch.no_grad():
                    step = torch.where(self.found_inf > 0, 0.0, param.grad / self.grad_scale * group["lr"])
                    param.sub_(step)


@pytest.fixture(autouse=True)
def traced_backward() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        yield


def made(kind: Callable[[Any], torch.optim.Optimizer]) -> tuple[Any, nn.Module, amp_core.GradScaler]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer, scaler = kind(model.parameters()), amp_core.GradScaler("cpu", growth_interval=3)

    def step(x: Tensor) -> Tensor:
        with amp_core.autocast("cpu"):
            loss = model(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer, max_norm=0.5)
        scaler.update()
        return loss.detach()

    return step, model, scaler


BATCHES = [torch.full((4, 8), value) for value in (0.5, 1.0, float("inf"), -1.0, 0.25, 2.0, 0.5)]


@pytest.mark.skipif(torch.__version__ < (2, 12), reason="torch 2.11 cannot trace a write to an optimizer")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_one_graph_and_eager_numbers(backend: str) -> None:
    """A graph break, a new compilation each step, or a skipped step that moves the parameters."""
    eager, eager_model, eager_scaler = made(Traceable)
    step, model, scaler = made(Traceable)
    scaler.scale(torch.ones(()))  # the scale is there before the graph is
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    for batch in BATCHES:
        torch.testing.assert_close(compiled(batch), eager(batch), equal_nan=True)
        model.zero_grad()
        eager_model.zero_grad()
        for ours, theirs in zip(model.parameters(), eager_model.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs)
        assert scaler.get_scale() == eager_scaler.get_scale()
        assert scaler._get_growth_tracker() == eager_scaler._get_growth_tracker()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.skipif(torch.__version__ < (2, 12), reason="torch 2.11 cannot trace a write to an optimizer")
def test_one_graph_beside_stored_weights() -> None:
    """What looks for writes to stored weights breaks the graph of another model's step."""
    other = nn.Linear(4, 4)
    stored = torch.optim.AdamW(other.parameters())
    step, _, scaler = made(Traceable)
    scaler.scale(torch.ones(()))
    with amp_core.master_weights(other, stored, "remainder"):
        torch.compile(step, fullgraph=True, backend="aot_eager")(BATCHES[0])


@pytest.mark.parametrize("fused", [True, False])
def test_eager_numbers_around_the_graph_breaks_of_torchs_optimizers(fused: bool) -> None:
    """Dynamo cannot go on after the break that torch's optimizers make, or loses what the scaler noted."""

    def kind(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1, fused=fused)

    eager, eager_model, eager_scaler = made(kind)
    step, model, scaler = made(kind)
    scaler.scale(torch.ones(()))
    told: list[int] = []
    scaler.register_step_hook(lambda _, record: told.append(record.number))
    compiled = torch.compile(step, backend="eager")
    with torch._dynamo.config.patch(trace_autograd_ops=False, error_on_recompile=True):
        for batch in BATCHES:
            torch.testing.assert_close(compiled(batch), eager(batch), equal_nan=True)
            model.zero_grad()
            eager_model.zero_grad()
    for ours, theirs in zip(model.parameters(), eager_model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert scaler.state_dict() == eager_scaler.state_dict()
    assert told == list(range(len(BATCHES)))
    assert [r.scale_after for r in scaler.history] == [r.scale_after for r in eager_scaler.history]


@pytest.mark.skipif(torch.__version__ < (2, 12), reason="torch 2.11 cannot trace a write to an optimizer")
def test_steps_in_compiled_code_leave_no_record() -> None:
    """A history that grows inside the graph has every step compiled anew."""
    step, _, scaler = made(Traceable)
    scaler.scale(torch.ones(()))
    compiled = torch.compile(step, fullgraph=True, backend="eager")
    compiled(BATCHES[0])
    assert len(scaler.history) == 0
    step(BATCHES[0])
    assert len(scaler.history) == 1


def test_a_window_in_a_compiled_step_is_compiled_once() -> None:
    """Dynamo traces into the kernels, and compiles them anew at each step, up to its limit."""
    compiled_frames: list[int] = []

    def trained(compiled: bool) -> list[Tensor]:
        _, model, scaler = made(torch.optim.SGD)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: Tensor) -> None:
            with amp_core.AccumulationWindow(scaler, optimizer) as window:
                for part in x.chunk(2):
                    with window.micro_batch():
                        with amp_core.autocast("cpu"):
                            loss = model(part).float().square().mean()
                        scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

        held: list[object] = []
        run = torch.compile(step, backend="aot_eager") if compiled else step
        with torch._dynamo.config.patch(trace_autograd_ops=False):
            for number in range(8):
                compiled_frames.append(torch._dynamo.utils.counters["frames"]["total"])
                held.append([p.grad for p in model.parameters()])  # so that the next ones are elsewhere
                optimizer.zero_grad()
                run(torch.full((4, 8), float("inf") if number == 2 else 0.1 * number))
        return [p.detach() for p in model.parameters()]

    expected = trained(False)
    compiled_frames.clear()
    torch._dynamo.reset()  # what earlier tests have compiled may be compiled anew at any step
    torch.testing.assert_close(trained(True), expected)
    assert compiled_frames[-1] == compiled_frames[-3] > 0


def test_a_closure_is_not_compiled_again() -> None:
    """Each step is compiled anew, as the history grows, until Dynamo gives up with a warning."""
    model, scaler = nn.Linear(8, 4), amp_core.GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 8)).square().mean()
        scaler.scale(loss).backward()
        return loss

    @torch.compile(backend="eager")
    def step() -> None:
        scaler.step_closure(optimizer, closure)
        scaler.update()

    with torch._dynamo.config.patch(trace_autograd_ops=False):
        for number in range(6):
            with torch._dynamo.config.patch(error_on_recompile=number > 2):
                step()
    assert [record.skipped for record in scaler.history] == [False] * 6
