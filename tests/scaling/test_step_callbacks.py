"""Hooks on steps, skips and changes of the scale; plugins; what happens at the floor."""

from __future__ import annotations

import copy
import math
import pickle
import re
import types
from typing import Any, ClassVar

import pluggy
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import amp_core
from amp_core import AtFloor, GradScaler, LossScaleSchedule, ScaleChange, StepRecord, plugin


class Run:
    """A model, an optimizer and a scaler, and steps of which chosen ones overflow."""

    def __init__(self, fused: bool = False, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(2, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.125, fused=fused)
        self.scaler = GradScaler(
            "cpu", **{"init_scale": 8.0, "named_parameters": self.model.named_parameters(), **options}
        )

    def step(self, bad: bool = False) -> None:
        self.optimizer.zero_grad()
        self.scaler.scale(self.model(torch.ones(1, 2)).sum()).backward()
        if bad:
            self.model.bias.grad[1] = math.nan
        self.scaler.step(self.optimizer, max_norm=1.0)
        self.scaler.update()


@pytest.mark.parametrize("fused", [False, True])
def test_hooks_are_told_of_each_event_once_and_in_order(fused: bool) -> None:
    """A step, skip or change of the scale goes unreported, twice, or with a record that is not complete."""
    run, seen = Run(fused, growth_interval=2), []
    run.scaler.register_step_hook(lambda s, r: seen.append(("step", r.number, r.skipped, r.scale_after)))
    run.scaler.register_skip_hook(lambda s, r: seen.append(("skip", r.bad_parameters, s is run.scaler)))
    run.scaler.register_scale_change_hook(lambda s, c: seen.append(c))
    for bad in (False, True, False, False):
        run.step(bad)
    assert seen == [
        ("step", 0, False, 8.0),
        ("step", 1, True, 4.0),
        ("skip", (amp_core.BadParameter("bias", 1, 2),), True),
        ScaleChange(1, 8.0, 4.0),
        ("step", 2, False, 4.0),
        ("step", 3, False, 8.0),
        ScaleChange(3, 4.0, 8.0),
    ]


def test_handles_remove_hooks() -> None:
    """A hook goes on being called after its handle was removed, or takes its neighbours along."""
    run, seen = Run(), []
    first = run.scaler.register_step_hook(lambda s, r: seen.append("first"))
    with run.scaler.register_step_hook(lambda s, r: seen.append("second")):
        run.step()
    first.remove()
    run.step()
    assert seen == ["first", "second"]
    with pytest.raises(TypeError, match="must be callable with two arguments, got int"):
        run.scaler.register_skip_hook(3)


def test_a_hook_may_remove_itself() -> None:
    """A hook that wants one event only breaks the loop over the hooks."""
    run, seen = Run(), []

    def once(scaler: GradScaler, record: StepRecord) -> None:
        seen.append(record.number)
        handle.remove()

    handle = run.scaler.register_step_hook(once)
    run.step()
    run.step()
    assert seen == [0]


def test_a_hook_that_raises_leaves_the_scaler_right() -> None:
    """An error in a hook leaves an update half done: the next step finds wrong stages or a wrong scale."""
    run = Run()
    with (
        run.scaler.register_skip_hook(lambda s, r: 1 / 0),
        pytest.raises(ZeroDivisionError),
    ):
        run.step(bad=True)
    assert run.scaler.get_scale() == 4.0
    run.step()
    assert not run.scaler.last_step[run.optimizer].skipped
    assert [r.scale_after for r in run.scaler.history] == [4.0, 4.0]


def test_the_scale_set_by_hand_is_a_change_too() -> None:
    """update(new_scale) goes unreported where no step was taken."""
    run, seen = Run(), []
    run.scaler.register_scale_change_hook(lambda s, c: seen.append((c.before, c.after)))
    run.scaler.scale(torch.ones(1))
    run.scaler.update(32.0)
    run.scaler.update(32.0)
    assert seen == [(8.0, 32.0)]


def test_a_disabled_scaler_takes_hooks_and_calls_none() -> None:
    """Code with hooks fails when scaling is switched off."""
    scaler = GradScaler("cpu", enabled=False)
    scaler.register_step_hook(lambda s, r: 1 / 0).remove()
    scaler.update()


def test_copies_have_hooks_of_their_own() -> None:
    """A scaler with hooks cannot be copied or pickled, or the copy calls the hooks of its original."""
    run = Run()
    run.scaler.register_step_hook(lambda s, r: 1 / 0)
    for other in (copy.deepcopy(run.scaler), pickle.loads(pickle.dumps(run.scaler))):
        run.scaler = other
        run.step()


class Host(TorchDispatchMode):
    """Counts what brings a device's values to the host; on the CPU `fetch` shows as one call of ``cat``."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = {torch.ops.aten._local_scalar_dense.default: 0, torch.ops.aten.cat.default: 0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.counts:
            self.counts[func] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("listens", "fetches"), [(False, 0), (True, 1)])
@pytest.mark.parametrize(("fused", "waits"), [(True, 0), (False, 1)])
def test_listeners_cost_one_wait_and_nobody_none(
    listens: bool, fetches: int, fused: bool, waits: int
) -> None:
    """Looking for listeners waits for the device, or telling them waits for each value of each record."""
    run, read = Run(fused), []
    if listens:
        run.scaler.register_step_hook(lambda s, r: read.append(r.as_dict()))
        run.scaler.register_scale_change_hook(lambda s, c: read.append(c))
    run.step()
    with Host() as host:
        run.step()
    assert list(host.counts.values()) == [waits, fetches]
    assert len(read) == 2 * listens


def test_plugins_hear_of_every_scaler() -> None:
    """A plugin misses a scaler, or is called after it was unregistered."""

    class Plugin:
        seen: ClassVar[list[Any]] = []

        @plugin.hookimpl
        def amp_skip(self, scaler: GradScaler, record: StepRecord) -> None:
            self.seen.append(record.bad_parameters[0].name)

        @plugin.hookimpl
        def amp_scale_change(self, change: ScaleChange) -> None:
            self.seen.append(change.after)

    listener = Plugin()
    plugin.register(listener)
    try:
        Run().step(bad=True)
        Run(fused=True, init_scale=2.0).step(bad=True)
        with pytest.raises(ValueError, match="already"):
            plugin.register(listener)
    finally:
        plugin.unregister(listener)
    Run().step(bad=True)
    assert listener.seen == ["bias", 4.0, "bias", 1.0]
    with pytest.raises(ValueError, match="is not registered with amp-core"):
        plugin.unregister(listener)


def test_a_wrong_plugin_is_refused_whole() -> None:
    """A misspelt hook is taken in silence and never called, or a refused plugin stays half registered."""

    @plugin.hookimpl
    def amp_skip(scaler: GradScaler, rekord: StepRecord) -> None:
        pass

    @plugin.hookimpl
    def amp_skipped(scaler: GradScaler) -> None:
        pass

    for hook in (amp_skip, amp_skipped):
        module = types.ModuleType("wrong")
        setattr(module, hook.__name__, hook)
        for _ in range(2):
            wrong = r"(rekord|unknown hook 'amp_skipped')[^$]* hooks of amp-core.*amp_skip\(scaler, record\)"
            with pytest.raises(pluggy.PluginValidationError, match=wrong):
                plugin.register(module)
    with pytest.raises(ValueError, match=re.escape("has no hook of amp-core's") + ".*amp_scale_change"):
        plugin.register(types.ModuleType("empty"))
    Run().step(bad=True)


def test_a_class_is_a_plugin_only_if_its_hooks_need_no_instance() -> None:
    """`register(Listener)`, without the parentheses, is found out in the middle of a training."""
    seen = []

    class Listener:
        @plugin.hookimpl
        def amp_skip(self, record: StepRecord) -> None:
            seen.append(record)

    class Static:
        @staticmethod
        @plugin.hookimpl
        def amp_skip(record: StepRecord) -> None:
            seen.append(record)

    with pytest.raises(ValueError, match="is a class whose hooks are methods"):
        plugin.register(Listener)
    plugin.register(Static)
    try:
        Run().step(bad=True)
    finally:
        plugin.unregister(Static)
    assert len(seen) == 1


@pytest.mark.parametrize("fused", [False, True])
def test_rows_of_skips_are_counted_for_each_optimizer(fused: bool) -> None:
    """One of two optimizers skips for ever beside one that does not, and nobody hears of it."""
    good, bad = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, fused=fused) for m in (good, bad)]
    scaler = GradScaler("cpu", warn_after=3, named_parameters=bad.named_parameters())

    def step() -> None:
        scaler.scale(good(torch.ones(2)).sum() + bad(torch.ones(2)).sum()).backward()
        bad.weight.grad[0, 1] = math.inf
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()

    step()
    step()
    with pytest.warns(amp_core.SkippedStepsWarning, match=r"3 steps in a row.*weight \(1 of 2\)") as caught:
        step()
    assert [w.filename for w in caught] == [__file__]


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_lands_ends_a_row_of_skips(fused: bool) -> None:
    """A run that skips a step now and then is reported as one that skips every step."""
    run = Run(fused, warn_after=2)
    for bad in (True, False, True):
        run.step(bad)
    with pytest.warns(amp_core.SkippedStepsWarning, match="2 steps in a row"):
        run.step(True)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("at_floor", [AtFloor.WARN, AtFloor.STOP, AtFloor.RAISE])
def test_a_warning_made_an_error_loses_no_event(at_floor: AtFloor) -> None:
    """With ``-W error``, hooks miss the step that warns, rows are counted short, the scale is not stopped."""
    models = [torch.nn.Linear(2, 1) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    schedule = LossScaleSchedule(min_scale=4.0, at_floor=at_floor)
    scaler, seen = GradScaler("cpu", init_scale=4.0, warn_after=2, schedule=schedule), []
    scaler.register_step_hook(lambda _, record: seen.append(record))

    def step() -> None:
        scaler.scale(sum(model(torch.ones(2)).sum() for model in models)).backward()
        for model, optimizer in zip(models, optimizers, strict=True):
            model.weight.grad[0, 1] = math.inf
            scaler.step(optimizer)
        scaler.update()

    for number in (1, 2):
        wanted = amp_core.ScaleFloorError if at_floor is AtFloor.RAISE else UserWarning
        with pytest.raises(wanted):
            step()
        assert len(seen) == 2 * number
        assert [*scaler._log._skips_in_a_row.values()] == [number, number]
        assert scaler.get_scale() == (1.0 if at_floor is AtFloor.STOP else 4.0)


def test_the_last_steps_are_shown() -> None:
    """A notebook shows `scaler.last_step` as an object at some address."""
    run = Run()
    run.step()
    run.step(bad=True)
    shown = f"{{SGD: {run.scaler.last_step[run.optimizer]!r}}}"
    assert "SGD skipped step 1" in shown
    assert repr(run.scaler.last_step) == shown


def test_fused_steps_name_their_parameters() -> None:
    """A step that the optimizer decided to skip names nobody."""
    run = Run(fused=True)
    run.optimizer.zero_grad()
    run.scaler.scale(run.model(torch.ones(1, 2)).sum()).backward()
    run.model.weight.grad[0, 0] = math.inf
    run.scaler.step(run.optimizer)
    record = run.scaler.last_step[run.optimizer]
    assert record.bad_parameters == (amp_core.BadParameter("weight", 1, 4),)
    assert record.skipped


FLOOR = {"init_scale": 4.0, "warn_after": 0}


@pytest.mark.parametrize("fused", [False, True])
def test_at_the_floor_warn(fused: bool) -> None:
    """Gradients that overflow at the smallest scale go unnoticed, or fill the log."""
    run = Run(fused, **FLOOR, schedule=LossScaleSchedule(min_scale=2.0, growth_interval=1))
    run.step(bad=True)  # 4 -> 2
    with pytest.warns(
        amp_core.ScaleFloorWarning, match=r"of this SGD.*floor, 2 .*: bias \(1 of 2\)"
    ) as caught:
        run.step(bad=True)
    assert [w.filename for w in caught] == [__file__]
    run.step(bad=True)  # told already
    run.step()  # 2 -> 4
    run.step(bad=True)
    with pytest.warns(amp_core.ScaleFloorWarning):
        run.step(bad=True)


def test_a_floor_that_is_no_float32() -> None:
    """The scale, a float32, is never at a floor that lies between two of them."""
    run = Run(init_scale=0.2, warn_after=0, schedule=LossScaleSchedule(min_scale=0.1))
    run.step(bad=True)
    with pytest.warns(amp_core.ScaleFloorWarning, match=r"floor, 0\.1 "):
        run.step(bad=True)


@pytest.mark.parametrize("ceiling", [math.inf, 4.0], ids=["moves", "constant"])
@pytest.mark.parametrize("fused", [False, True])
def test_at_the_floor_raise(fused: bool, ceiling: float) -> None:
    """A run that was to stop goes on, or stops with its state half moved."""
    schedule = LossScaleSchedule(min_scale=4.0, max_scale=ceiling, at_floor=AtFloor.RAISE)
    run = Run(fused, **FLOOR, schedule=schedule)
    with pytest.raises(
        amp_core.ScaleFloorError, match=r"floor, 4 \(LossScaleSchedule.min_scale\): bias \(1 of 2\)"
    ):
        run.step(bad=True)
    run.step()
    assert run.scaler.get_scale() == 4.0


@pytest.mark.parametrize("fused", [False, True])
def test_at_the_floor_stop_scaling(fused: bool) -> None:
    """Scaling goes on, or stops with a step that is no longer checked, or comes back after a resume."""
    run, seen = (
        Run(fused, **FLOOR, schedule=LossScaleSchedule(min_scale=4.0, at_floor="stop", growth_interval=1)),
        [],
    )
    run.scaler.register_scale_change_hook(lambda s, c: seen.append((c.before, c.after)))
    with pytest.warns(amp_core.ScaleFloorWarning, match="The scale is 1 from now on"):
        run.step(bad=True)
    weight = run.model.weight.detach().clone()
    run.step(bad=True)
    assert torch.equal(run.model.weight, weight)
    run.step()
    assert not torch.equal(run.model.weight, weight)
    assert seen == [(4.0, 1.0)]
    resumed = GradScaler("cpu", schedule=LossScaleSchedule(at_floor="stop", growth_interval=1))
    resumed.load_state_dict(run.scaler.state_dict())
    run.scaler = resumed
    run.step()
    assert resumed.get_scale() == 1.0


def test_a_constant_scale_does_not_move() -> None:
    """A static scale grows, falls, starts elsewhere, or warns of its floor."""
    run = Run(schedule=LossScaleSchedule.constant(32.0), init_scale=65536.0, warn_after=0)
    for bad in (False, True, False, True):
        run.step(bad)
    assert {r.scale_before for r in run.scaler.history} == {32.0}


def test_strings_name_what_happens() -> None:
    """A string in the place of an enumeration's member is taken and means something else."""
    assert LossScaleSchedule(hysteresis_kind="every").hysteresis_kind is amp_core.Hysteresis.EVERY
    with pytest.raises(ValueError, match="at_floor must be one of warn, raise, stop, got 'explode'"):
        LossScaleSchedule(at_floor="explode")


def test_a_hook_that_raises_silences_no_other() -> None:
    """A hook's error hides the record from the other hooks, and an overflow at the floor from the user."""
    run, told = Run(schedule=LossScaleSchedule(min_scale=8.0, at_floor=AtFloor.RAISE)), []

    def fail(*_: object) -> None:
        raise KeyError

    run.scaler.register_step_hook(fail)
    run.scaler.register_step_hook(lambda _, record: told.append(record.number))
    run.scaler.register_skip_hook(lambda _, record: told.append(record.number))
    with pytest.raises(KeyError):
        run.step()
    with pytest.raises(amp_core.ScaleFloorError) as caught:
        run.step(bad=True)
    assert isinstance(caught.value.__context__, KeyError)
    assert told == [0, 1, 1]
