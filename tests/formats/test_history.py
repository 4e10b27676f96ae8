"""Delayed scaling: the history of largest magnitudes."""

from __future__ import annotations

import math

import pytest
import torch

from amp_core import Delayed, Quantization, Recipe, quantize
from amp_core.formats import E4M3, E5M2, AmaxHistory, from_transformer_engine


def run(history: AmaxHistory, batches: list[torch.Tensor]) -> list[torch.Tensor]:
    quantization = Quantization(E4M3, found=history.delayed)
    results = []
    for batch in batches:
        quantized = quantize(batch, quantization, amax=history.amax)
        results += [quantized.values, quantized.scale]
        history.record(quantized.amax)
        history.step()
    return results


def batches(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(20, generator=generator) * 3.0**i for i in range(count)]


def test_a_resumed_history_goes_on_bit_for_bit() -> None:
    """A run that resumes has other scales than one that never stopped."""
    straight = AmaxHistory(Delayed(3), "cpu")
    expected = run(straight, batches(8))
    first = AmaxHistory(Delayed(3), "cpu")
    results = run(first, batches(8)[:5])
    second = AmaxHistory(Delayed(3), "cpu")
    second.load_state_dict(first.state_dict())
    results += run(second, batches(8)[5:])
    assert all(torch.equal(a, b) for a, b in zip(expected, results, strict=True))
    with pytest.raises(ValueError, match=r"has 3 steps, this one 4: .*Delayed\(history=3\)"):
        AmaxHistory(Delayed(4), "cpu").load_state_dict(first.state_dict())


@pytest.mark.parametrize(("algorithm", "expected"), [("max", 8.0), ("most_recent", 2.0)])
def test_the_scale_follows_from_the_window(algorithm: str, expected: float) -> None:
    """A scale follows from steps that have left the history, or forgets the margin."""
    history = AmaxHistory(Delayed(2, margin=1, algorithm=algorithm), "cpu")  # type: ignore[arg-type]
    for amax in (100.0, 4.0, 1.0):
        history.record(torch.tensor(amax / 2))
        history.record(torch.tensor(amax))  # two micro-batches
        assert history.current == amax
        history.step()
    assert history.amax == expected
    quantized = quantize(torch.tensor([0.5]), Quantization(E4M3), amax=history.amax)
    assert quantized.scale == torch.tensor(expected) / 448


def test_an_overflow_does_not_enter_the_history() -> None:
    """One overflow makes every scale NaN for as long as the history is."""
    history = AmaxHistory(Delayed(4), "cpu")
    for bad in (math.inf, math.nan):
        history.record(torch.tensor(bad))
    history.record(torch.tensor(0.5))  # what an overflow counts as must not be larger
    history.step()
    assert history.amax == 0.5


def test_a_margin_beyond_float32_leaves_values_finite() -> None:
    """A large magnitude times the margin is inf, and every step is NaN until it has left the history."""
    delayed = Delayed(4, margin=8)
    history, x = AmaxHistory(delayed, "cpu"), torch.tensor([1e37, -3e36])
    history.record(x.abs().amax())
    history.step()
    quantized = quantize(x, Quantization(E5M2, found=delayed), amax=history.amax)
    assert quantized.counts.tolist() == [0, 0, 0, 0]
    torch.testing.assert_close(quantized.dequantize(), x, rtol=0.2, atol=0)


def test_an_empty_history_uses_the_tensor_itself() -> None:
    """The first step saturates, or divides by zero."""
    quantization = Quantization(E4M3, found=Delayed(4))
    x = torch.tensor([1.0, 1e6])
    first = quantize(x, quantization, amax=AmaxHistory(Delayed(4), "cpu").amax)
    current = quantize(x, Quantization(E4M3))
    assert torch.equal(first.values, current.values)
    assert torch.equal(first.scale, current.scale)


def test_what_exceeds_the_history_saturates_and_is_counted() -> None:
    """A jump beyond earlier steps goes unseen, or its products overflow to NaN."""
    quantization = Quantization(E4M3, found=Delayed(1))
    x = torch.tensor([1.0, -2.0, 3e38, 0.0, 1e-30, math.inf])
    quantized = quantize(x[:5], quantization, amax=torch.tensor(1.0))
    assert quantized.values.tolist() == [448.0, -448.0, 448.0, 0.0, 0.0]
    assert quantized.counts.tolist() == [0, 0, 2, 1]
    tiny = quantize(x, quantization, amax=torch.tensor(1e-37))
    assert tiny.counts.tolist() == [1, 0, 4, 0]
    assert tiny.dequantize().isnan().all()


class Engine:
    """TransformerEngine's update of scales, as its documentation of the C API describes it."""

    def __init__(self, length: int, maxima: list[float], margin: int) -> None:
        self.maxima, self.margin = torch.tensor(maxima), margin
        self.history, self.scale = torch.zeros(length, len(maxima)), torch.ones(len(maxima))

    def step(self, amax: torch.Tensor) -> None:
        self.history[0] = amax
        self.scale = self.maxima / self.history.amax(0) / 2.0**self.margin
        self.history = self.history.roll(-1, 0)
        self.history[0] = 0


def test_a_history_from_inference_mode_goes_on_in_training() -> None:
    """An evaluation before the first step makes that step fail."""
    with torch.inference_mode():
        history = AmaxHistory(Delayed(2), "cpu")
        history.record(torch.tensor(3.0))
        history.step()
    history.record(torch.tensor(2.0))
    history.step()
    assert history.state_dict()["seen"].tolist() == [3.0, 2.0]


def test_what_ranks_settled_on_is_not_mixed_with_later_magnitudes() -> None:
    """A forward pass between decision and step gives ranks different scales."""
    history = AmaxHistory(Delayed(2), "cpu")
    history.record(torch.tensor(1.0))
    history.settle(torch.tensor(2.0))
    history.record(torch.tensor(5.0))
    assert history.current == 5.0
    history.step()
    assert history.state_dict()["seen"].tolist() == [0.0, 2.0]
    history.step()
    assert history.state_dict()["seen"].tolist() == [2.0, 5.0]


def test_a_history_may_settle_on_its_own_magnitude() -> None:
    """The next step begins from zero, and clears the magnitude that was settled on with it."""
    history = AmaxHistory(Delayed(1), "cpu")
    history.record(torch.tensor(3.0))
    history.settle(history.current)
    assert history.current == 3.0
    history.step()
    assert history.amax == 3.0
    history.record(torch.tensor(2.0))
    assert history.current == 2.0
    history.step()
    assert history.amax == 2.0


def test_another_state_of_transformer_engine_is_refused() -> None:
    """The state of the wrong module fails without a hint."""
    with pytest.raises(KeyError, match="has no scale_fwd, scale_bwd, amax_history_fwd, amax_history_bwd"):
        from_transformer_engine({"weight": torch.ones(2)}, Recipe.fp8_delayed())


@pytest.mark.parametrize("margin", [0, 2])
def test_a_run_of_transformer_engine_goes_on_with_its_scales(margin: int) -> None:
    """A converted checkpoint rounds otherwise than the run that wrote it."""
    recipe = Recipe.fp8_delayed(history=4, margin=margin)
    forward, backward = Engine(4, [448.0] * 6, margin), Engine(4, [57344.0] * 4, margin)
    generator = torch.Generator().manual_seed(0)
    for step in range(40):
        state = {"scale_fwd": forward.scale, "amax_history_fwd": forward.history}
        state |= {"scale_bwd": backward.scale, "amax_history_bwd": backward.history}
        converted = from_transformer_engine(state, recipe)
        assert len(converted) == 2
        for number, roles in enumerate(converted if step else []):
            for role, engine, column, element in (
                ("input", forward, 3 * number, E4M3),
                ("weight", forward, 3 * number + 1, E4M3),
                ("grad_output", backward, 2 * number, E5M2),
            ):
                history = AmaxHistory(Delayed(4, margin), "cpu")
                history.load_state_dict(roles[role])
                encode = torch.full((), element.max) / history.amax
                assert encode == engine.scale[column]
        forward.step(torch.rand(6, generator=generator).exp() * 10)
        backward.step(torch.rand(4, generator=generator))
    with pytest.raises(ValueError, match=r"history has 4 steps.*fp8_delayed\(history=4\)"):
        from_transformer_engine(state, Recipe.fp8_delayed(8))
    with pytest.raises(ValueError, match="input of the recipe 'mxfp8' has no delayed scale"):
        from_transformer_engine(state, Recipe.mxfp8())
