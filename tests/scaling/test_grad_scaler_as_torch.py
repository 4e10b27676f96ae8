"""GradScaler and torch.amp.GradScaler, driven side by side through random programs."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections import UserList
from collections.abc import Iterator
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import amp_core

from ..drawn import how, seeded

KINDS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {}),
    "sgd fused": (torch.optim.SGD, {"fused": True, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {}),
    "adamw fused": (torch.optim.AdamW, {"fused": True}),
}


class Side:
    """One scaler with two models and optimizers of its own."""

    def __init__(self, scaler: Any, kinds: list[str], options: dict[str, Any]) -> None:
        torch.manual_seed(0)
        self.models = [torch.nn.Linear(3, 2) for _ in kinds]
        self.optimizers = [
            KINDS[kind][0](m.parameters(), lr=0.1, **KINDS[kind][1])
            for kind, m in zip(kinds, self.models, strict=True)
        ]
        for optimizer in self.optimizers:
            if optimizer.defaults.get("momentum"):
                self._begin(optimizer)
        self.scaler = scaler("cpu", **options)
        self.saved: Any = None

    def _begin(self, optimizer: torch.optim.Optimizer) -> None:
        """Take a step, as torch leaves the momentum uninitialised if the first one is skipped."""
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()

    def backward(self, i: int, seed: int, bad: str) -> None:
        self.optimizers[i].zero_grad()
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))
        self.scaler.scale(self.models[i](x).square().mean()).backward()
        if bad:
            self.models[i].bias.grad[0] = float(bad)

    def state(self) -> list[Any]:
        return [self.scaler.get_scale(), self.scaler._get_growth_tracker()]


def attempt(call: Any) -> tuple[Any, ...]:
    try:
        value = call()
    except Exception as error:  # type and text are compared
        return type(error), str(error)
    return "ok", repr(value)


class Program(RuleBasedStateMachine):
    """Each rule is one call on both sides; they must agree on outcome, error, scale and parameters."""

    @initialize(
        kinds=st.lists(st.sampled_from(sorted(KINDS)), min_size=2, max_size=2),
        scale=st.sampled_from([2.0**16, 3000.0, 1.5]),
        growth=st.sampled_from([2.0, 1.1]),
        backoff=st.sampled_from([0.5, 0.3]),
        interval=st.sampled_from([1, 2, 3]),
        enabled=st.sampled_from([True, True, True, False]),
    )
    def start(
        self, kinds: Any, scale: float, growth: float, backoff: float, interval: int, enabled: bool
    ) -> None:
        options = {
            "init_scale": scale,
            "growth_factor": growth,
            "backoff_factor": backoff,
            "growth_interval": interval,
            "enabled": enabled,
        }
        self.sides = [Side(cls, kinds, options) for cls in (torch.amp.GradScaler, amp_core.GradScaler)]

    def both(self, call: Any) -> None:
        theirs, ours = (attempt(lambda side=side: call(side)) for side in self.sides)
        if theirs[0] is AssertionError and "No inf checks" in theirs[1]:
            assert ours[0] is AssertionError
            assert ours[1].startswith(theirs[1])  # ours goes on to say whose and why
        elif theirs == (AttributeError, "'int' object has no attribute 'device'"):  # of a fused one, the same
            assert ours[0] is AssertionError
            assert ours[1].startswith("No inf checks were recorded for this optimizer.")
        else:
            assert ours == theirs

    optimizer = st.integers(0, 1)

    @rule(i=optimizer, seed=st.integers(0, 99), bad=st.sampled_from(["", "", "", "inf", "nan", "-inf"]))
    def backward(self, i: int, seed: int, bad: str) -> None:
        self.both(lambda side: side.backward(i, seed, bad))

    @rule(i=optimizer)
    def unscale(self, i: int) -> None:
        self.both(lambda side: side.scaler.unscale_(side.optimizers[i]))

    @rule(i=optimizer)
    def clip(self, i: int) -> None:
        self.both(lambda side: torch.nn.utils.clip_grad_norm_(side.models[i].parameters(), 0.5))

    @rule(i=optimizer)
    def step(self, i: int) -> None:
        self.both(lambda side: side.scaler.step(side.optimizers[i]))

    @rule()
    def update(self) -> None:
        self.both(lambda side: side.scaler.update())

    @rule(value=st.sampled_from([1024.0, 7.0]))
    def set_scale(self, value: float) -> None:
        self.both(lambda side: side.scaler.update(value))

    @rule()
    def save(self) -> None:
        for side in self.sides:
            side.saved = side.scaler.state_dict()
        assert self.sides[0].saved == self.sides[1].saved

    @rule(crossed=st.booleans())
    def load(self, crossed: bool) -> None:
        states = [copy.deepcopy(side.saved) for side in self.sides]
        if states[0] is not None:
            for side, state in zip(self.sides, reversed(states) if crossed else states, strict=True):
                if side.scaler.is_enabled():
                    side.scaler.load_state_dict(state)

    @rule()
    def pickle(self) -> None:
        def call(side: Side) -> None:
            side.scaler = pickle.loads(pickle.dumps(side.scaler))

        self.both(call)

    @invariant()
    def agree(self) -> None:
        if hasattr(self, "sides"):
            theirs, ours = self.sides
            assert theirs.state() == ours.state()
            for a, b in zip(theirs.models, ours.models, strict=True):
                for p, q in zip(a.parameters(), b.parameters(), strict=True):
                    assert torch.equal(p.nan_to_num(), q.nan_to_num())


seeded(Program).TestCase.settings = how(60, stateful_step_count=25, suppress_health_check=list(HealthCheck))
TestProgram = pytest.mark.filterwarnings("ignore::UserWarning")(Program.TestCase)


@pytest.mark.parametrize(
    "options",
    [{"growth_factor": 1.0}, {"growth_factor": 0.5}, {"backoff_factor": 1.0}, {"backoff_factor": 2.0}],
)
def test_arguments_that_torch_refuses(options: dict[str, float]) -> None:
    """An argument that torch refuses is taken, or refused in other words."""
    theirs, ours = (
        attempt(lambda cls=cls: cls("cpu", **options)) for cls in (torch.amp.GradScaler, amp_core.GradScaler)
    )
    assert theirs == ours


def test_a_scaler_for_cuda_without_cuda() -> None:
    """The warning that the scaler is off differs from torch's in text or line."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    for cls in (torch.amp.GradScaler, amp_core.GradScaler):
        with pytest.warns(
            UserWarning, match="GradScaler is enabled, but CUDA is not available.  Disabling"
        ) as caught:
            scaler = cls()
        assert caught[0].filename == __file__
        assert not scaler.is_enabled()


@pytest.mark.parametrize("outputs", [torch.tensor(2.0), [torch.ones(2), (torch.ones(1),)], torch.tensor(3)])
def test_scaled_outputs(outputs: Any) -> None:
    """A tensor or a nest of lists and tuples is scaled otherwise than by torch."""
    theirs, ours = (cls("cpu", 4.0).scale(outputs) for cls in (torch.amp.GradScaler, amp_core.GradScaler))
    flat, other = torch.utils._pytree.tree_leaves(ours), torch.utils._pytree.tree_leaves(theirs)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(flat, other, strict=True))


@pytest.mark.parametrize(
    "outputs",
    [
        {"a": torch.ones(2), "b": torch.ones(1)}.values(),
        UserList([torch.ones(1)]),
        torch.nn.ParameterList([torch.ones(2)]),
        [{"a": torch.ones(1)}.values(), torch.ones(2)],
    ],
)
def test_iterables_that_are_no_containers(outputs: Any) -> None:
    """The losses of a dict, ``losses.values()``, are refused."""
    theirs, ours = (cls("cpu", 4.0).scale(outputs) for cls in (torch.amp.GradScaler, amp_core.GradScaler))
    assert type(ours) is list if isinstance(outputs, list) else isinstance(ours, Iterator)
    for one, other in zip(ours, theirs, strict=True):
        pairs = [(one, other)] if isinstance(one, torch.Tensor) else zip(one, other, strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("outputs", ["loss", b"loss", 3.0, None, {"a": 1.0}.values(), torch.nn.Linear(1, 1)])
def test_outputs_that_hold_no_tensors(outputs: Any) -> None:
    """Something else than losses is taken, or a string is followed without end."""
    with pytest.raises(ValueError, match="outputs must be a Tensor or an iterable of Tensors"):
        amp_core.GradScaler("cpu").scale(outputs)


def test_signature_begins_as_torchs() -> None:
    """A caller who passes torch's arguments by position gets another scaler."""
    import inspect

    ours = inspect.signature(amp_core.GradScaler).parameters
    theirs = inspect.signature(torch.amp.GradScaler).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    assert all(ours[name].default == theirs[name].default for name in theirs)


def test_sparse_gradients() -> None:
    """A sparse gradient is left scaled, or its overflow missed."""
    results = []
    for cls in (torch.amp.GradScaler, amp_core.GradScaler):
        torch.manual_seed(0)
        table = torch.nn.Embedding(5, 2, sparse=True)
        optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
        scaler = cls("cpu", 8.0)
        scaler.scale(table(torch.tensor([1, 1, 3])).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        results.append(table.weight.detach().clone())
    assert torch.equal(*results)


@pytest.mark.parametrize("unscales", [False, True])
def test_a_divisor_that_the_optimizer_has_already(unscales: bool) -> None:
    """A fused step divides by the scale alone, or by its own divisor a second time at the next step."""
    weights = []
    for cls in (torch.amp.GradScaler, amp_core.GradScaler):
        weight = torch.nn.Parameter(torch.ones(3))
        optimizer: Any = torch.optim.SGD([weight], lr=0.1, fused=True)
        scaler = cls("cpu", 8.0)
        for step in range(3):
            optimizer.zero_grad()
            scaler.scale((weight * torch.arange(3.0)).sum()).backward()
            if step != 1:
                optimizer.grad_scale = torch.tensor(4.0)
            if unscales:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        weights.append(weight.detach())
    assert torch.equal(*weights)
    assert weights[0].tolist() != [1.0, 0.7, 0.4]


def test_optimizer_that_takes_the_scaler_itself() -> None:
    """The old contract (a grad_scaler argument) is no longer served, or without torch's warning."""

    class Old(torch.optim.SGD):
        _step_supports_amp_scaling = True
        given: Any = None

        def step(self, closure: Any = None, *, grad_scaler: Any = None) -> None:
            self.given = grad_scaler

    for cls in (torch.amp.GradScaler, amp_core.GradScaler):
        weight = torch.nn.Parameter(torch.ones(1))
        optimizer, scaler = Old([weight]), cls("cpu")
        scaler.scale(weight.sum()).backward()
        with pytest.warns(FutureWarning, match="going to stop passing itself") as caught:
            scaler.step(optimizer)
        assert caught[0].filename == __file__
        assert optimizer.given is scaler


MISUSE = """
import pickle, torch, amp_core

model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
unused, scaler = amp_core.GradScaler("cpu"), amp_core.GradScaler("cpu")
scaler.scale(model(torch.ones(2)).sum()).backward()
scaler.unscale_(optimizer)
for call in (
    lambda: unused.step(optimizer),
    lambda: unused.unscale_(optimizer),
    lambda: unused.update(),
    lambda: unused.update(1024.0),
    lambda: scaler.update(torch.ones(2)),
    lambda: scaler.update(torch.ones(1, requires_grad=True)),
    lambda: pickle.dumps(scaler),
):
    try:
        call()
    except AssertionError as error:
        print(error)
"""


def test_misuse_is_refused_without_assert_statements() -> None:
    """`python -O` saves a scaler in the middle of a step, or says that None has no attribute."""
    runs = [[sys.executable, *option, "-c", MISUSE] for option in ([], ["-O"])]
    plain, optimized = (subprocess.run(run, capture_output=True, text=True, check=True) for run in runs)
    assert len(plain.stdout.splitlines()) == 7
    assert optimized.stdout == plain.stdout
