"""The ready-made listeners: TensorBoard, JSON lines, logging; schedulers and averages that are held back."""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import logging
import math
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

from amp_core import GradScaler, plugin
from amp_core.callbacks import JsonLines, Logging, SkipAwareAverage, SkipAwareScheduler, TensorBoard, WandB


def train(scaler: GradScaler, model: torch.nn.Linear, optimizer: Any, bad: set[int], steps: int = 3) -> None:
    for number in range(steps):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        if number in bad:
            model.bias.grad[1] = math.inf
        scaler.step(optimizer, max_norm=1.0)
        scaler.update()


@pytest.fixture(params=[False, True], ids=["plain", "fused"])
def parts(request: pytest.FixtureRequest) -> tuple[GradScaler, torch.nn.Linear, torch.optim.SGD]:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=request.param)
    return GradScaler("cpu", 8.0, named_parameters=model.named_parameters()), model, optimizer


def test_json_lines(parts: Any, tmp_path: Path) -> None:
    """A line is missing, is no JSON, or does not say which parameter overflowed."""
    path = tmp_path / "scaler.jsonl"
    with JsonLines(path).listen(parts[0]):
        train(*parts, bad={1})
    train(*parts, bad={0})  # nobody listens any more
    lines = [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]
    assert [line["event"] for line in lines] == ["step", "step", "scale_change", "step"]
    skipped, change = lines[1], lines[2]
    assert skipped["bad_parameters"] == [{"name": "bias", "nonfinite": 1, "elements": 2}]
    assert skipped["total_norm"] == "inf"
    assert (skipped["skipped"], skipped["rank"], skipped["scale_after"]) == (True, None, 4.0)
    assert change == {
        "event": "scale_change", "number": 1, "before": 8.0, "after": 4.0, "key": None, "rank": None,
    }  # fmt: skip


def test_json_lines_of_skips_alone_through_a_plugin(parts: Any, tmp_path: Path) -> None:
    """Taken steps are written though they were not wanted, or a registered listener hears nothing."""
    listener = JsonLines(tmp_path / "skips.jsonl", only_skipped=True)
    plugin.register(listener)
    try:
        train(*parts, bad={1})
    finally:
        plugin.unregister(listener)
    lines = (tmp_path / "skips.jsonl").read_text().splitlines()
    assert [json.loads(line)["number"] for line in lines] == [1, 1]
    with pytest.raises(FileNotFoundError):
        JsonLines(tmp_path / "nowhere" / "skips.jsonl")


def test_json_lines_stay_in_their_file(parts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that changes its folder, as Hydra does, goes on in another file, or fails in a step."""
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path)
    with JsonLines("scaler.jsonl").listen(parts[0]):
        monkeypatch.chdir("run")
        train(*parts, bad=set())
    assert (tmp_path / "scaler.jsonl").read_text()
    assert not list((tmp_path / "run").iterdir())


def test_logging(parts: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A skip is not a warning in the log, or does not name its parameter."""
    caplog.set_level(logging.INFO, "amp_core")
    with Logging().listen(parts[0]):
        train(*parts, bad={1})
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        ("WARNING", "SGD skipped step 1: inf or NaN at scale 8 in bias (1 of 2)"),
        ("INFO", "loss scale: 8 -> 4 after step 1"),
    ]
    assert caplog.records[0].amp_record["skipped"] is True


class Written:
    """A writer that keeps what it is given."""

    def __init__(self) -> None:
        self.entries: list[tuple[Any, ...]] = []

    def add_scalar(self, *entry: Any) -> None:
        self.entries.append(entry)

    add_text = add_scalar


@contextlib.contextmanager
def registered(listener: Any, _scaler: GradScaler) -> Iterator[None]:
    plugin.register(listener)
    try:
        yield
    finally:
        plugin.unregister(listener)


@pytest.mark.parametrize("kind", [Logging, TensorBoard])
def test_registered_listeners_hear_what_attached_ones_hear(
    kind: type, parts: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A listener that is registered for all scalers writes no steps, or no changes of the scale."""
    caplog.set_level(logging.DEBUG, "amp_core")
    said = []
    for attach in (kind.listen, registered):
        writer = Written()
        scaler = GradScaler("cpu", 8.0, named_parameters=parts[1].named_parameters())
        with attach(kind() if kind is Logging else kind(writer), scaler):
            train(scaler, *parts[1:], bad={1})
        said.append([*writer.entries, *((r.levelname, r.getMessage()) for r in caplog.records)])
        caplog.clear()
    assert said[0] == said[1]
    assert len(said[0]) > 3


@pytest.mark.parametrize("value", [None, 3, object(), print])
def test_what_is_no_writer_is_refused(value: Any) -> None:
    """The first step ends in an AttributeError, in the middle of the training."""
    with pytest.raises(TypeError, match="writer= must be a SummaryWriter, or a directory for a new one"):
        TensorBoard(value)


@pytest.mark.parametrize("value", ["my-run", "", 0])
def test_what_is_no_run_is_refused(value: Any) -> None:
    """`'str' object has no attribute 'define_metric'`; or the active run is written to instead."""
    with pytest.raises(TypeError, match=r"run= must be what wandb\.init\(\) returned, not "):
        WandB(value)


def test_tensorboard(parts: Any, tmp_path: Path) -> None:
    """What TensorBoard reads back is not what the scaler did."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    listener = TensorBoard(tmp_path)
    with listener.listen(parts[0]):
        train(*parts, bad={1})
    listener.close()
    events = EventAccumulator(str(tmp_path)).Reload()

    def scalars(tag: str) -> list[tuple[int, float]]:
        return [(e.step, e.value) for e in events.Scalars(tag)]

    assert dict(scalars("amp/scale")) == {0: 8.0, 1: 8.0, 2: 4.0}
    assert scalars("amp/SGD/skipped") == [(0, 0.0), (1, 1.0), (2, 0.0)]
    norms = dict(scalars("amp/SGD/total_norm"))
    assert math.isinf(norms[1])
    assert norms[0] == pytest.approx(math.sqrt(6))
    (text,) = events.Tensors("amp/SGD/skips/text_summary")
    assert b"bias (1 of 2)" in text.tensor_proto.string_val[0]


def test_two_optimizers_of_one_class_have_names_of_their_own(tmp_path: Path) -> None:
    """Nobody could tell whose steps were skipped of the two optimizers of a GAN, which had one name."""
    parts = [torch.nn.Linear(2, 2) for _ in range(2)]
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in parts]
    scaler = GradScaler("cpu", 8.0)
    for bad in ([], [1], [], [0]):
        for number, (part, optimizer) in enumerate(zip(parts, optimizers, strict=True)):
            optimizer.zero_grad()
            scaler.scale(part(torch.ones(1, 2)).sum()).backward()
            if number in bad:
                part.bias.grad[1] = math.inf
            scaler.step(optimizer)
        scaler.update()
    skips = [(record.optimizer, record.number) for record in scaler.history.skipped]
    assert skips == [("SGD_2", 1), ("SGD", 3)]
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    listener = TensorBoard(tmp_path)
    for record in scaler.history:
        listener.amp_step(scaler, record)
    listener.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [e.value for e in events.Scalars("amp/SGD/skipped")] == [0.0, 0.0, 0.0, 1.0]
    assert [e.value for e in events.Scalars("amp/SGD_2/skipped")] == [0.0, 1.0, 0.0, 0.0]


def test_optimizers_are_numbered_per_scale_while_they_live() -> None:
    """Names change with optimizers that are gone, or have numbers although their scales tell them apart."""
    scaler = GradScaler("cpu", 8.0)

    def stepped(key: str | None, optimizer: Any = None) -> Any:
        optimizer = optimizer or torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
        loss = optimizer.param_groups[0]["params"][1].sum()
        scaler.scale(loss, key=key).backward()
        scaler.step(optimizer, key=key)
        scaler.update()
        return optimizer

    def name() -> str:
        return scaler.history[-1].optimizer

    first = stepped(None)
    second = stepped(None)
    assert name() == "SGD_2"
    other = stepped("discriminator")
    assert name() == "SGD"
    stepped("discriminator", other)
    assert name() == "SGD"
    stepped(None, second)
    assert name() == "SGD_2"
    del first
    gc.collect()
    third = stepped(None)
    assert name() == "SGD"
    stepped(None, third)
    assert name() == "SGD"


def test_what_cannot_be_held_back(parts: Any) -> None:
    """Who swaps the arguments, or has torch's scaler, is told of an attribute, or only once training runs."""
    scaler, model, optimizer = parts
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    average = torch.optim.swa_utils.AveragedModel(model)
    calls: list[tuple[Any, str]] = [
        (lambda: SkipAwareScheduler(scaler, scheduler), "then the scaler: GradScaler has no optimizer"),
        (lambda: SkipAwareScheduler(optimizer, scaler), "then the scaler: SGD has no optimizer"),
        (lambda: SkipAwareScheduler(scheduler, torch.amp.GradScaler("cpu")), "not torch.amp.grad_scaler"),
        (lambda: SkipAwareAverage(scaler, average), "then the scaler: GradScaler has no update_parameters"),
        (lambda: SkipAwareAverage(average, optimizer), "needs an amp_core.GradScaler, not torch.optim"),
    ]
    for call, words in calls:
        with pytest.raises(TypeError, match=words):
            call()
    assert type(scheduler) is torch.optim.lr_scheduler.StepLR
    assert type(average) is torch.optim.swa_utils.AveragedModel


def test_a_scheduler_is_held_back(parts: Any) -> None:
    """The learning rate moves on skipped steps; torch warns of the order of calls besides."""
    scaler, model, optimizer = parts
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    rates = []
    with SkipAwareScheduler(scheduler, scaler):
        for number in range(4):
            train(scaler, model, optimizer, {0} if number in (0, 2) else set(), steps=1)
            scheduler.step()
            rates.append(scheduler.get_last_lr()[0])
    assert rates == [0.1, 0.05, 0.05, 0.025]
    train(scaler, model, optimizer, {0}, steps=1)
    scheduler.step()
    assert scheduler.get_last_lr() == [0.0125]


SCHEDULERS = {
    "step": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
    "plateau": lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
    "one_cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=9),
    "sequential": lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2),
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        ],
        milestones=[2],
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_that_is_held_back_is_saved_as_any_other(name: str, parts: Any) -> None:
    """The checkpoint holds the scaler besides, ``weights_only`` refuses it, and loading undoes the hold."""
    scaler, model, optimizer = parts
    scheduler = SCHEDULERS[name](optimizer)
    kind, state = type(scheduler), copy.deepcopy(scheduler.state_dict())
    held = SkipAwareScheduler(scheduler, scaler)
    assert isinstance(scheduler, kind)
    assert scheduler.state_dict().keys() == state.keys()
    scheduler.load_state_dict(state)
    train(scaler, model, optimizer, {0}, steps=1)
    before = optimizer.param_groups[0]["lr"]
    for _ in range(3):
        scheduler.step(*[1.0] * (name == "plateau"))
    assert optimizer.param_groups[0]["lr"] == before
    held.remove()
    assert type(scheduler) is kind


def halfway(averaged: torch.Tensor, current: torch.Tensor, _: int) -> torch.Tensor:
    return (averaged + current) / 2


def test_an_average_is_held_back(parts: Any) -> None:
    """Weights that did not move are averaged again; or a copy, or a pickle, still asks the scaler."""
    scaler, model, optimizer = parts
    averaged, expected = (AveragedModel(model, avg_fn=halfway) for _ in range(2))
    names = set(averaged.state_dict())
    with SkipAwareAverage(averaged, scaler):
        for number in range(5):
            bad = number in (0, 2)
            train(scaler, model, optimizer, {0} if bad else set(), steps=1)
            averaged.update_parameters(model)
            if not bad:
                expected.update_parameters(model)
        assert set(averaged.state_dict()) == names
        for again in (copy.deepcopy(averaged), pickle.loads(pickle.dumps(averaged))):
            assert type(again) is AveragedModel
    assert averaged.n_averaged == 3
    for ours, theirs in zip(averaged.parameters(), expected.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    train(scaler, model, optimizer, {0}, steps=1)
    averaged.update_parameters(model)
    assert averaged.n_averaged == 4


def test_an_average_over_several_optimizers(parts: Any) -> None:
    """The answer is that of the optimizer that stepped last, or of one that stepped long ago."""
    scaler, model, _ = parts
    weight, bias = (torch.optim.SGD([p], lr=0.1) for p in (model.weight, model.bias))
    averaged = AveragedModel(model)
    SkipAwareAverage(averaged, scaler)
    of_bias = AveragedModel(model)
    SkipAwareAverage(of_bias, scaler, bias)
    for bad in (None, model.weight, model.bias, None):
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        if bad is not None:
            bad.grad.view(-1)[0] = math.nan
        scaler.step(weight)
        scaler.step(bias)
        assert [bool(scaler.landed(o)) for o in (weight, bias)] == [bad is not p for p in model.parameters()]
        assert bool(scaler.landed()) is (bad is None)
        scaler.update()
        averaged.update_parameters(model)
        of_bias.update_parameters(model)
        model.zero_grad()
    assert (averaged.n_averaged, of_bias.n_averaged) == (2, 3)


def test_a_disabled_scaler_holds_nothing_back() -> None:
    """An average or a schedule stands still for ever when the scaler is turned off."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", enabled=False)
    averaged = AveragedModel(model)
    SkipAwareAverage(averaged, scaler).update_parameters(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    SkipAwareScheduler(scheduler, scaler)
    optimizer.step()
    scheduler.step()
    assert averaged.n_averaged == 1
    assert scheduler.get_last_lr() == [0.05]
    assert scaler.landed(optimizer).item() is True


def test_before_the_first_step_nothing_has_landed(parts: Any) -> None:
    """An answer is made up, or the error does not say whose step it misses."""
    scaler, model, optimizer = parts
    with pytest.raises(RuntimeError, match="has recorded no step yet"):
        scaler.landed()
    train(*parts, bad=set(), steps=1)
    with pytest.raises(RuntimeError, match="has recorded no step of this Adam yet"):
        scaler.landed(torch.optim.Adam(model.parameters()))
    assert scaler.landed(optimizer)


def test_records_carry_the_rank(parts: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In the logs of many processes nobody can tell whose a skip was."""
    caplog.set_level(logging.INFO, "amp_core")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        with JsonLines(tmp_path / "0.jsonl").listen(parts[0]), Logging().listen(parts[0]):
            train(*parts, bad={0}, steps=1)
    finally:
        torch.distributed.destroy_process_group()
    lines = [json.loads(line) for line in (tmp_path / "0.jsonl").read_text().splitlines()]
    assert [line["rank"] for line in lines] == [0, 0]
    assert caplog.messages[0].startswith("SGD on rank 0 skipped step 0")
    assert parts[0].history[-1].rank == 0  # known although the group is gone
