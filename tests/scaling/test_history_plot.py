"""`scaler.history.plot`, from real steps."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from amp_core import GradScaler


def train(overflows: tuple[int, ...], optimizers: int = 1) -> GradScaler:
    """Take six steps; the gradients of the steps in `overflows` are infinite."""
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(optimizers)]
    optims = [torch.optim.SGD([weight], lr=0.1) for weight in weights]
    scaler = GradScaler("cpu", init_scale=64.0)
    for step in range(6):
        for weight in weights:
            scaler.scale(weight.sum()).backward()
            if step in overflows:
                weight.grad.fill_(math.inf)
        for optimizer in optims:
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
    return scaler


@pytest.mark.parametrize("optimizers", [1, 2])
def test_it_shows_scale_and_skips(optimizers: int, tmp_path: Path) -> None:
    """Two optimizers record each step twice: a curve over records would be stretched, its marks doubled."""
    train((1, 3), optimizers).history.plot(tmp_path / "scale.svg")
    (tmp_path / "scale.svg").read_text().index("<svg")
    train((), optimizers).history.plot(str(tmp_path / "scale.png"))
    assert (tmp_path / "scale.png").read_bytes().startswith(b"\x89PNG")


def test_the_curve_is_the_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The picture could show scales of other steps than those that had them."""
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    save = Figure.savefig

    def keep(figure: Figure, *args: Any, **kwargs: Any) -> None:
        drawn.append(figure)
        save(figure, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", keep)
    train((1, 3), optimizers=2).history.plot(tmp_path / "scale.png")
    axes = drawn[0].axes[0]
    assert list(axes.lines[0].get_ydata()) == [64.0, 64.0, 32.0, 32.0, 16.0, 16.0]
    assert axes.collections[0].get_offsets().tolist() == [[1.0, 64.0], [3.0, 32.0]]


def test_an_empty_history_is_refused() -> None:
    """An empty picture would look like a training without overflows."""
    with pytest.raises(ValueError, match="history is empty"):
        GradScaler("cpu").history.plot("never.png")
    assert not Path("never.png").exists()
