"""What torch 2.13's GradScaler gets wrong and amp-core's does not; each test shows both sides."""

from __future__ import annotations

import contextlib
import gc
import math
import pickle
import re
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import amp_core

THEIRS, OURS = torch.amp.GradScaler, amp_core.GradScaler


def weight(value: float = 1.0) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.full((2,), value))


def overflow(scaler: Any, parameter: torch.nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
    scaler.scale(parameter.sum()).backward()
    parameter.grad.fill_(math.inf)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


@pytest.mark.filterwarnings("ignore::amp_core.SkippedStepsWarning")
def test_the_scale_never_reaches_zero() -> None:
    """After many overflows the scale is 0, and the next finite step ruins the parameters in silence."""

    def run(cls: Any) -> torch.Tensor:
        parameter = weight()
        optimizer, scaler = torch.optim.SGD([parameter], lr=1.0), cls("cpu")
        for _ in range(200):
            overflow(scaler, parameter, optimizer)
        scales.append(scaler.get_scale())
        scaler.scale(parameter.sum()).backward()
        scaler.step(optimizer)
        return parameter.detach()

    scales: list[float] = []
    assert not run(THEIRS).isfinite().all()
    assert torch.equal(run(OURS), torch.zeros(2))
    assert scales == [0.0, 2.0**-126]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize(("scale", "gradient"), [(2.0**-100, 1e30), (1e-45, 0.0), (1e-45, 1.0)])
def test_no_nan_that_unscaling_makes_is_stepped(
    scale: float, gradient: float, fused: bool, max_norm: float | None
) -> None:
    """A product that overflows when unscaled, or 0 times inf, is stepped into the parameters."""
    for cls in (THEIRS, OURS):
        parameter = weight()
        optimizer, scaler = torch.optim.SGD([parameter], lr=1.0, fused=fused), cls("cpu", scale)
        if cls is OURS:
            scaler._init_scale = scale  # below the floor, where no schedule leads
        scaler.scale(parameter.sum()).backward()
        parameter.grad.fill_(gradient)
        scaler.step(optimizer, **({"max_norm": max_norm} if cls is OURS else {}))
        if cls is OURS:
            assert torch.equal(parameter, torch.ones(2))
        elif gradient or not fused:  # torch's fused kernel divides 0 by the scale
            assert not parameter.isfinite().all()


@pytest.mark.parametrize("fused", [False, True])
def test_small_scales_do_no_harm(fused: bool) -> None:
    """Gradients that a scale below 1 made small are taken for ones that overflow."""
    parameter = weight()
    optimizer, scaler = torch.optim.SGD([parameter], lr=1.0, fused=fused), OURS("cpu", 2.0**-100)
    scaler.scale(parameter.sum()).backward()
    scaler.step(optimizer)
    assert torch.equal(parameter, torch.zeros(2))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"init_scale": math.inf}, "positive and finite"),
        ({"init_scale": math.nan}, "positive and finite"),
        ({"init_scale": -1.0}, "positive and finite"),
        ({"init_scale": 0.0}, "positive and finite"),
        ({"backoff_factor": -1.0}, "backoff factor must be > 0"),
        ({"growth_factor": math.inf}, "not finite"),
        ({"growth_interval": 0}, "positive number of steps"),
        ({"growth_interval": 1.5}, "positive number of steps"),
    ],
)
def test_arguments_are_checked(options: dict[str, Any], text: str) -> None:
    """An argument that can only do harm is taken, at construction or through a setter."""
    THEIRS("cpu", **options)
    with pytest.raises(ValueError, match=text):
        OURS("cpu", **options)
    ((name, value),) = options.items()
    if name != "init_scale":
        with pytest.raises(ValueError, match=text):
            getattr(OURS("cpu"), f"set_{name}")(value)


@pytest.mark.parametrize("device", ["banana", None, mock.Mock()])
def test_an_unknown_device_is_named(device: Any) -> None:
    """A misspelt device is taken in silence, or one that torch takes is refused."""
    THEIRS(device)
    with pytest.warns(amp_core.errors.AmpWarning, match="banana|None|Mock") as caught:
        scaler = OURS(device)
    assert caught[0].filename == __file__
    parameter = weight()
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler.scale(parameter.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(parameter, torch.zeros(2))
    THEIRS(device, enabled=False)
    OURS(device, enabled=False)


def test_positional_closure() -> None:
    """A closure given by position gets past the guard and runs unscaled."""
    for cls, refused in ((THEIRS, False), (OURS, True)):
        parameter = weight()
        optimizer, scaler = torch.optim.SGD([parameter], lr=1.0), cls("cpu")
        scaler.scale(parameter.sum()).backward()
        if refused:
            with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
                scaler.step(optimizer, lambda: None)
            assert torch.equal(parameter, torch.ones(2))
        else:
            scaler.step(optimizer, lambda: None)


def test_found_inf_is_one_whatever_the_number_of_flags() -> None:
    """Two flags add up to 2, which the fused kernels take for no overflow."""

    def run(cls: Any) -> torch.Tensor:
        parameter = weight()
        optimizer, scaler = torch.optim.Adam([parameter], lr=1.0, fused=True), cls("cpu")
        scaler.scale(parameter.sum()).backward()
        parameter.grad.fill_(math.inf)
        scaler.unscale_(optimizer)
        flags = scaler._found_inf_per_device(optimizer)
        flags[torch.device("meta")] = torch.ones(())  # as from a second device
        scaler.step(optimizer)
        return parameter.detach()

    assert not run(THEIRS).isfinite().all()
    assert torch.equal(run(OURS), torch.ones(2))


def test_a_fused_step_that_raises_can_be_tried_again() -> None:
    """The factor of a step that raised is applied twice at the retry."""

    class Flaky(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if not hasattr(self, "tried"):
                self.tried = True
                raise ConnectionError
            return super().step(closure)

    for cls, moved in ((THEIRS, 0.025), (OURS, 0.1)):
        parameter = torch.nn.Parameter(torch.zeros(1))
        optimizer, scaler = Flaky([parameter], lr=0.1, fused=True), cls("cpu", 4.0)
        scaler.scale(parameter.sum()).backward()
        with pytest.raises(ConnectionError):
            scaler.step(optimizer)
        scaler.step(optimizer)
        assert parameter.item() == pytest.approx(-moved)


def test_state_goes_with_the_optimizer() -> None:
    """A new optimizer at the address of a dead one inherits its state."""

    def errors(cls: Any) -> int:
        parameter, scaler, count = weight(), cls("cpu"), 0
        for _ in range(50):
            optimizer = torch.optim.SGD([parameter], lr=0.0)
            scaler.scale(parameter.sum()).backward()
            try:
                scaler.step(optimizer)
            except RuntimeError:
                count += 1
            del optimizer
            gc.collect(0)
        scaler.update()
        return count

    assert errors(THEIRS) > 0
    assert errors(OURS) == 0


def test_the_overflow_of_a_dead_optimizer_still_counts() -> None:
    """An optimizer that is collected before update() takes its overflow along, or a pickle forgets it."""
    parameter, scaler = weight(), OURS("cpu", 8.0)
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    scaler.scale(parameter.sum()).backward()
    parameter.grad.fill_(math.inf)
    scaler.unscale_(optimizer)
    del optimizer
    gc.collect()
    with pytest.raises(AssertionError, match="may only be pickled at the beginning of an iteration"):
        pickle.dumps(scaler)
    scaler.update()
    assert scaler.get_scale() == 4.0


def test_a_parameter_in_two_groups_is_unscaled_once() -> None:
    """A parameter that two groups share has its gradient divided twice."""
    for cls, expected in ((THEIRS, 0.25), (OURS, 1.0)):
        parameter = weight()
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        optimizer.param_groups.append({**optimizer.param_groups[0]})
        scaler = cls("cpu", 4.0)
        scaler.scale(parameter.sum()).backward()
        scaler.unscale_(optimizer)
        assert parameter.grad[0].item() == expected


def test_scale_of_dicts_and_float16_vectors() -> None:
    """A dict comes back as a lazy map over its keys, a float16 vector as inf."""
    losses = {"a": torch.ones(()), "b": torch.ones(2, dtype=torch.float16)}
    assert not isinstance(THEIRS("cpu").scale(losses), dict)
    assert THEIRS("cpu").scale(losses["b"]).isinf().all()
    scaled = OURS("cpu").scale(losses)
    assert scaled["a"] == 65536.0
    assert scaled["b"].dtype is torch.float32
    assert torch.equal(scaled["b"], torch.full((2,), 65536.0))
    with pytest.raises(ValueError, match="outputs must be a Tensor or an iterable of Tensors"):
        OURS("cpu").scale([3.0])


def test_a_step_without_any_gradient_says_whose() -> None:
    """The error names neither the optimizer nor the reason."""
    parameter, scaler = weight(), OURS("cpu")
    scaler.scale(torch.ones(1))
    with pytest.raises(AssertionError, match=r"This SGD has 1 parameter, none with a gradient"):
        scaler.step(torch.optim.SGD([parameter], lr=1.0))


def test_a_partial_state_changes_nothing() -> None:
    """Loading a state with a missing entry leaves the scaler half loaded."""
    state = {**OURS("cpu").state_dict(), "scale": 2.0, "growth_factor": 3.0}
    del state["_growth_tracker"]
    for cls, kept in ((THEIRS, False), (OURS, True)):
        scaler = cls("cpu")
        with pytest.raises(KeyError):
            scaler.load_state_dict(state)
        assert (scaler.get_growth_factor() == 2.0) is kept


def test_new_scale_may_be_an_int() -> None:
    """update(1024) fails with an AttributeError."""
    for cls in (THEIRS, OURS):
        scaler = cls("cpu")
        scaler.scale(torch.ones(1))
        if cls is THEIRS:
            with pytest.raises(AttributeError):
                scaler.update(1024)
        else:
            scaler.update(1024)
            assert scaler.get_scale() == 1024.0
            with pytest.raises(ValueError, match="positive and finite"):
                scaler.update(0.0)


def test_getters_of_a_disabled_scaler() -> None:
    """A disabled scaler fails when asked for its factors."""
    with pytest.raises(AttributeError):
        THEIRS("cpu", enabled=False).get_growth_factor()
    assert OURS("cpu", enabled=False).get_growth_factor() == 2.0


@contextlib.contextmanager
def nan_in_fresh_memory() -> Iterator[None]:
    """Have torch fill what it leaves uninitialised with NaN, so that a use of it shows."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory  # torch's default
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dampening", [0.0, 0.5])
def test_a_first_step_that_is_skipped_leaves_no_garbage(dampening: float) -> None:
    """Fused SGD allocates its momentum uninitialised, and a skipped first step leaves it so."""

    def run(cls: Any, fused: bool, bad: bool = True) -> torch.Tensor:
        parameter = torch.nn.Parameter(torch.zeros(1000))
        optimizer = torch.optim.SGD([parameter], 0.5, momentum=0.5, dampening=dampening, fused=fused)
        scaler = cls("cpu", 8.0)
        if bad:
            with nan_in_fresh_memory():
                overflow(scaler, parameter, optimizer)
        for _ in range(2):
            optimizer.zero_grad()
            scaler.scale(parameter.sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        return parameter.detach()

    assert not run(THEIRS, fused=True).isfinite().all()
    expected = run(THEIRS, fused=False)
    assert torch.equal(run(OURS, fused=True), expected)
    assert torch.equal(run(OURS, fused=False), expected)
    assert torch.equal(run(OURS, fused=True, bad=False), expected)


@pytest.mark.parametrize("dampening", [0.0, 0.5])
@pytest.mark.parametrize("first_is_bad", [False, True])
def test_a_skipped_step_keeps_momentum_beside_a_parameter_without_gradient(
    first_is_bad: bool, dampening: float
) -> None:
    """The momentum of a fused SGD is taken for uninitialised at each step that is skipped, or it fails."""

    def run(fused: bool) -> torch.Tensor:
        unused, parameter = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
        optimizer = torch.optim.SGD([unused, parameter], 0.5, momentum=0.5, dampening=dampening, fused=fused)
        scaler = OURS("cpu", 8.0)
        for step in range(4):
            optimizer.zero_grad()
            if step == (0 if first_is_bad else 2):
                overflow(scaler, parameter, optimizer)
                continue
            scaler.scale(parameter.sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        return parameter.detach()

    assert torch.equal(run(fused=True), run(fused=False))


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_a_tensor_that_can_be_no_scale_is_refused(value: float) -> None:
    """A scale that ruins the parameters at the next step is taken, where it comes in a tensor."""
    for cls in (THEIRS, OURS):
        scaler = cls("cpu", 8.0)
        scaler.scale(torch.ones(1))
        if cls is THEIRS:
            scaler.update(torch.tensor(value))
            assert scaler.get_scale() != 8.0
        else:
            with pytest.raises(ValueError, match="positive and finite"):
                scaler.update(torch.tensor(value))
            assert scaler.get_scale() == 8.0


def test_bad_rows_of_a_sparse_gradient() -> None:
    """The record gives the number of elements in the rows that were used for that of the parameter."""
    table = torch.nn.Embedding(5, 3, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    scaler = OURS("cpu", init_scale=4.0, named_parameters=table.named_parameters())
    scaler.scale((table(torch.tensor([1, 1, 2])) * torch.tensor([1.0, math.inf, 2.0])).sum()).backward()
    scaler.step(optimizer)
    (bad,) = scaler.last_step[optimizer].bad_parameters
    assert (bad.name, bad.nonfinite, bad.elements) == ("weight", 2, 15)


def test_duplicates_in_a_sparse_gradient() -> None:
    """Entries that overflow when they are added up are taken for finite, and stepped."""
    for cls, finite in ((THEIRS, False), (OURS, True)):
        table = torch.nn.Embedding(2, 1, sparse=True)
        optimizer, scaler = torch.optim.SGD(table.parameters(), lr=1.0), cls("cpu", 1.0)
        scaler.scale(table(torch.tensor([1, 1])).sum() * 3e38).backward()
        scaler.step(optimizer)
        assert bool(table.weight.isfinite().all()) is finite


def test_an_interval_below_the_running_count() -> None:
    """The scale never grows again after the interval was shortened."""
    for cls, grown in ((THEIRS, 8.0), (OURS, 16.0)):
        parameter = weight()
        optimizer, scaler = torch.optim.SGD([parameter], lr=0.0), cls("cpu", 8.0, growth_interval=100)
        for number in range(9):
            if number == 5:
                scaler.set_growth_interval(4)
            scaler.scale(parameter.sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == grown


def test_a_skip_of_a_fused_step_is_seen() -> None:
    """What looks at the optimizer, as trainers do, takes a skipped fused step for one that was taken."""
    for cls in (THEIRS, OURS):
        parameter = weight()
        optimizer, scaler = torch.optim.AdamW([parameter], lr=1.0, fused=True), cls("cpu")
        called: list[bool] = []
        optimizer.register_step_post_hook(lambda *_, called=called: called.append(True))
        overflow(scaler, parameter, optimizer)
        assert called == [True]  # torch's hooks run either way
        if cls is OURS:
            assert scaler.last_step[optimizer].skipped


def test_a_step_past_the_scaler() -> None:
    """Who calls `optimizer.step()` by habit steps on scaled gradients, and the error does not say so."""
    parameter = weight()
    optimizer, scaler = torch.optim.SGD([parameter], lr=1.0), OURS("cpu")
    scaler.scale(parameter.sum()).backward()
    optimizer.step()
    with pytest.raises(AssertionError, match=r"prior to update\. .*scaler\.step\(optimizer\), not optimizer"):
        scaler.update()


@pytest.mark.parametrize("enabled", [True, False])
def test_an_optimizer_without_a_step_is_named(enabled: bool) -> None:
    """A loop that reads `last_step` with its scaler disabled gets a number for an error."""
    parameter = weight()
    optimizer, scaler = torch.optim.SGD([parameter], lr=1.0), OURS("cpu", enabled=enabled)
    if not enabled:
        scaler.scale(parameter.sum()).backward()
        scaler.step(optimizer)
        assert scaler.landed(optimizer)
    with pytest.raises(KeyError, match=r"no step of this SGD.*disabled"):
        _ = scaler.last_step[optimizer]


@pytest.mark.parametrize("dtype", [torch.complex64, torch.bfloat16, torch.float64])
def test_gradients_of_other_dtypes(dtype: torch.dtype) -> None:
    """A complex, bfloat16 or float64 gradient is not unscaled, or its overflow missed."""
    parameter = torch.nn.Parameter(torch.ones(3, dtype=dtype))
    optimizer, scaler = torch.optim.SGD([parameter], lr=1.0), OURS("cpu", 8.0)
    for value, skipped in ((1.0, False), (math.nan, True)):
        scaler.scale(parameter.abs().sum().float()).backward()
        parameter.grad.mul_(value)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.last_step[optimizer].skipped is skipped
        optimizer.zero_grad()
    assert torch.equal(parameter.detach(), torch.zeros(3, dtype=dtype))


def test_float16_gradients_on_request() -> None:
    """float16 gradients cannot be had even by those who ask for them."""
    parameter = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    for cls in (THEIRS, OURS):
        scaler = cls("cpu", 2.0)
        scaler.scale(parameter.sum()).backward()
        with pytest.raises(ValueError, match=r"Attempting to unscale FP16 gradients\."):
            scaler.step(optimizer)
        optimizer.zero_grad()
    scaler = OURS("cpu", 2.0, allow_fp16_gradients=True)
    scaler.scale(parameter.sum()).backward()
    scaler.step(optimizer)
    assert torch.equal(parameter, torch.zeros(2, dtype=torch.float16))


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("also", [False, True])
def test_a_backward_pass_between_a_fused_step_and_the_update(unscales: bool, also: bool) -> None:
    """The record names parameters that were fine: the other loss of a GAN has overflowed in them since."""
    bad, fine = weight(), weight()
    optimizer = torch.optim.SGD([bad, fine], lr=1.0, fused=True)
    scaler = OURS("cpu", 8.0, named_parameters={"bad": bad, "fine": fine}.items())
    scaler.scale(bad.sum() * math.inf + fine.sum()).backward()
    if unscales:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    optimizer.zero_grad()
    scaler.scale(fine.sum() * math.inf + (bad.sum() if also else 0.0)).backward()
    scaler.update()
    assert [each.name for each in scaler.last_step[optimizer].bad_parameters] == ["bad"]


def test_records_print_as_lines() -> None:
    """A user who prints what a record holds meets private tensors instead of what happened."""
    parameter = weight()
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = OURS("cpu", 8.0, named_parameters={"w": parameter}.items())
    overflow(scaler, parameter, optimizer)
    optimizer.zero_grad()
    scaler.scale(parameter.sum()).backward()
    scaler.step(optimizer, max_norm=1.0)
    scaler.update()
    skipped, taken = scaler.history
    assert str(skipped) == "SGD skipped step 0: inf or NaN at scale 8 in w (2 of 2)"
    assert repr(taken) == "<StepRecord: SGD took step 1 at scale 4, norm 1.414>"
    assert str(scaler.history) == f"2 steps, 1 skipped\n{skipped}"
    assert repr(scaler.history) == "<History of 2 steps>"


def test_one_is_written_without_a_plural() -> None:
    """`1 steps, 1 skipped`: what is printed every day reads as if no one had read it."""
    model = torch.nn.Linear(2, 2)
    optimizer, scaler = torch.optim.SGD(model.parameters()), OURS("cpu")
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    scaler.step(optimizer)
    with amp_core.record() as recording, amp_core.autocast("cpu"):
        model(torch.ones(1, 2))
    with amp_core.watch(model, every=1) as watch:
        model(torch.ones(1, 2)).sum().backward()
    applied = amp_core.apply_policy(model, {"": "fp32"})
    shown = (scaler, scaler.history, recording, watch, applied, amp_core.OpPolicy("cpu", {"mm": "fp32"}))
    assert not [text for text in map(repr, shown) if re.search(r"(?<!\d)1 \w+s\b", text)]
    assert str(scaler.history).startswith("1 step, 0 skipped")


def test_skipped_steps_leave_a_record() -> None:
    """Nobody can tell that a step was skipped, or which parameter was to blame."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = OURS("cpu", 8.0, named_parameters=model.named_parameters())
    for bad in (False, True):
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        if bad:
            model.bias.grad[1] = math.inf
        assert scaler.step(optimizer, max_norm=1.0) is None
        scaler.update()
    good, skipped = scaler.history
    assert not good.skipped
    assert good.total_norm == pytest.approx(math.sqrt(4 + 2))
    assert (skipped.skipped, skipped.scale_before, skipped.scale_after) == (True, 8.0, 4.0)
    assert [(b.name, b.nonfinite, b.elements) for b in skipped.bad_parameters] == [("bias", 1, 2)]
    assert scaler.last_step[optimizer] is skipped
    assert scaler.history.skipped == [skipped]


def test_endless_skipping_is_reported() -> None:
    """A run that skips every step goes on in silence."""
    parameter = weight()
    optimizer, scaler = torch.optim.SGD([parameter], lr=1.0), OURS("cpu", warn_after=3)
    overflow(scaler, parameter, optimizer)
    overflow(scaler, parameter, optimizer)
    with pytest.warns(
        amp_core.SkippedStepsWarning, match=r"3 steps in a row.*parameter of shape \(2,\) \(2 of 2\)"
    ):
        overflow(scaler, parameter, optimizer)


class Syncs(TorchDispatchMode):
    """Counts the reads of a device value by the host."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("fused", "syncs"), [(True, 0), (False, 1)])
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_how_often_the_host_waits(fused: bool, syncs: int, max_norm: float | None) -> None:
    """A step with a fused optimizer waits for the device, or one with another waits more than once."""
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    scaler = OURS("cpu")
    loss = model(torch.ones(1, 3)).sum()
    with Syncs() as seen:
        scaler.scale(loss).backward()
        scaler.step(optimizer, max_norm=max_norm)
        scaler.update()
    assert seen.count == syncs


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("how", ["step", "clip_grad_norm_", "unscale_ first"])
def test_clipping_agrees_with_torchs(norm_type: float, fused: bool, how: str) -> None:
    """Unscaling and clipping in two passes moves the parameters elsewhere than torch's five."""
    results = []
    for cls in (THEIRS, OURS):
        torch.manual_seed(0)
        model = torch.nn.Linear(5, 4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
        scaler = cls("cpu", 3000.0)
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(model(torch.randn(6, 5)).square().sum()).backward()
            if cls is THEIRS:
                scaler.unscale_(optimizer)
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.7, norm_type)
                scaler.step(optimizer)
            elif how == "clip_grad_norm_":
                norm = scaler.clip_grad_norm_(optimizer, 0.7, norm_type)
                scaler.step(optimizer)
            else:
                if how == "unscale_ first":
                    scaler.unscale_(optimizer)
                scaler.step(optimizer, max_norm=0.7, norm_type=norm_type)
                norm = torch.tensor(scaler.history[-1].total_norm)
            scaler.update()
            results.append(norm)
        results += [p.detach().clone() for p in model.parameters()]
    half = len(results) // 2
    for theirs, ours in zip(results[:half], results[half:], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("enabled", [True, False], ids=["enabled", "disabled"])
def test_a_norm_that_is_not_finite_is_an_error_on_request(enabled: bool) -> None:
    """error_if_nonfinite=True is ignored, or the error leaves gradients that are unscaled in part."""
    parameter = weight()
    optimizer, scaler = torch.optim.SGD([parameter], lr=1.0), OURS("cpu", 4.0, enabled=enabled)
    scaler.scale(parameter.sum()).backward()
    before, texts = parameter.grad.clone(), []
    parameter.grad[0] = math.inf
    for clip, of in (
        (torch.nn.utils.clip_grad_norm_, [parameter]),
        (scaler.clip_grad_norm_, optimizer),
    ):
        with pytest.raises(RuntimeError, match=r"of order 3\.0 .* is non-finite") as raised:
            clip(of, 1.0, 3.0, error_if_nonfinite=True)
        texts.append(str(raised.value))
        assert torch.equal(parameter.grad[1], before[1])
    assert texts[0] == texts[1]
    parameter.grad.copy_(before)
    norm = scaler.clip_grad_norm_(optimizer, 1e3, 1.0, error_if_nonfinite=True)
    assert norm == 2.0
    assert torch.equal(parameter.grad, torch.ones(2))
