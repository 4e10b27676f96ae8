"""Every example in a docstring of the public API runs."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
import runpy
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import amp_core
from amp_core.plugin.default_manager import manager

# Objects whose docstrings have an example, and where those names are: the ones that most scripts use.
MOST_USED = [
    "AccumulationWindow",
    "AtFloor",
    "GradScaler",
    "GradScaler.clip_grad_norm_",
    "GradScaler.history",
    "GradScaler.last_step",
    "GradScaler.register_scale_change_hook",
    "GradScaler.register_skip_hook",
    "GradScaler.register_step_hook",
    "GradScaler.scale",
    "GradScaler.state_dict",
    "GradScaler.step",
    "GradScaler.step_closure",
    "GradScaler.unscale_",
    "GradScaler.update",
    "Hysteresis",
    "LossScaleSchedule",
    "OpPolicy",
    "OpPolicy.override",
    "OpPolicy.to_toml",
    "advise",
    "apply_policy",
    "autocast",
    "autocast_decorator",
    "backends",
    "cached_casts",
    "checkpoint_contexts",
    "compare",
    "convert_scaler_state",
    "custom_bwd",
    "custom_fwd",
    "disable",
    "get_backend",
    "guard",
    "master_weights",
    "record",
    "script",
    "watch",
]


def examples(text: str) -> Iterator[str]:
    """Yield each example: an indented block after ``Example::``, or a session with ``>>>``."""
    for block in re.findall(r"Example.*::\n\n((?:(?:    .*)?\n)+)", text + "\n"):
        yield textwrap.dedent(block)
    if ">>> " in text:
        yield text


def public() -> Iterator[tuple[str, Any]]:
    """Yield every public name, and the members of every public class, with its docstring."""
    for module in ("", *sorted(amp_core._SUBMODULES)):
        home = importlib.import_module(f"amp_core.{module}") if module else amp_core
        own = [k for k, v in vars(home).items() if getattr(v, "__module__", "") == home.__name__]
        for name in getattr(home, "__all__", own):
            value = getattr(home, name)
            if not getattr(value, "__module__", "amp_core").startswith("amp_core"):  # OptState is torch's
                continue
            path = f"{module}.{name}".lstrip(".")
            yield path, value
            if inspect.isclass(value):
                for member, attribute in inspect.getmembers(value):
                    if not member.startswith("_"):
                        yield f"{path}.{member}", attribute


DOCUMENTED = {name: list(examples(inspect.getdoc(value) or "")) for name, value in public()}


@pytest.fixture
def names(tmp_path: Path) -> dict[str, Any]:
    """What an example may use without a definition: the objects of a training script."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    inputs, targets = torch.randn(16, 4), torch.randint(2, (16,))
    loss_fn, scaler = torch.nn.CrossEntropyLoss(), amp_core.GradScaler("cpu", init_scale=8.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> torch.Tensor:
        loss: torch.Tensor = loss_fn(model(inputs), targets)
        loss.backward()
        return loss

    found = {name: getattr(amp_core, name) for name in amp_core.__all__}
    scaler.scale(loss_fn(model(inputs), targets)).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    scaler.scale(loss_fn(model(inputs), targets)).backward()
    generator_loss = loss_fn(model(inputs), targets)
    return {
        **found,
        "torch": torch,
        "amp_core": amp_core,
        "nn": torch.nn,
        "math": __import__("math"),
        "model": model,
        "inputs": inputs,
        "targets": targets,
        "batches": [(inputs, targets)] * 3,
        "loss_fn": loss_fn,
        "optimizer": optimizer,
        "scaler": scaler,
        "step": step,
        "path": tmp_path / "file",
        "generator_loss": generator_loss,
        "micro_batches": [(inputs, targets)],
        "loss": loss_fn(model(inputs), targets),
    }


@pytest.mark.parametrize("name", [name for name, found in DOCUMENTED.items() if found])
def test_an_example_of_a_docstring_runs(
    name: str, names: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader who types in the example of a name meets an error or a warning."""
    monkeypatch.chdir(tmp_path)
    with manager().registry.serving(amp_core.get_backend("cpu")):  # an example replaces it
        for example in DOCUMENTED[name]:
            if ">>> " in example:
                session = doctest.DocTestParser().get_doctest(example, dict(names), name, None, None)
                outcome = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(session)
                assert outcome.failed == 0
            else:
                file = tmp_path / "example.py"  # TorchScript reads the source
                file.write_text(example)
                runpy.run_path(str(file), names)


@pytest.mark.parametrize("name", MOST_USED)
def test_the_names_most_used_have_an_example(name: str) -> None:
    """A user learns the arguments of a name but not what a call looks like."""
    assert DOCUMENTED[name], f"the docstring of {name} has no example"
