"""`guard`: what it says of the op at which it stops is true."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import amp_core


def fault_of(model: nn.Module, *inputs: torch.Tensor) -> amp_core.debugging.OpFault:
    """Return where the guard stops in a step of `model`."""
    with amp_core.guard(model, steps=[0]), pytest.raises(amp_core.NonFiniteError) as caught:
        model(*inputs).sum().backward()
    assert caught.value.fault is not None, caught.value
    return caught.value.fault


def test_ranges_of_float64_numbers_that_float32_does_not_hold() -> None:
    """Finite inputs are said to be inf, and the smallest magnitude to be 0."""
    model = nn.Linear(2, 1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1e200, 1e-200]], dtype=torch.float64))
    fault = fault_of(model, torch.full((1, 2), 1e150, dtype=torch.float64))
    given, weight = fault.inputs
    assert (given.largest, given.not_finite) == (1e150, 0.0)
    assert (weight.smallest, weight.largest, weight.not_finite) == (1e-200, 1e200, 0.0)


class Sums(nn.Module):
    """A layer whose weights have large gradients, and are so small that its input has a small one."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.first, self.layer = nn.Conv1d(4, 4, 1), layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(self.first(x))
        return y.float() * 1000


@pytest.mark.parametrize(
    ("layer", "op"),
    [
        (nn.Conv1d(4, 4, 1, bias=False), "aten::convolution_backward"),
        (nn.GroupNorm(1, 4), "aten::native_group_norm_backward"),
        (nn.LayerNorm(512), "aten::native_layer_norm_backward"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_gradients_of_weights_that_overflow(layer: nn.Module, op: str) -> None:
    """A chosen step looks at the first result of a kernel only, and not at the gradients of the weights."""
    torch.manual_seed(0)
    for parameter in layer.parameters():
        nn.init.constant_(parameter, 2**-10)
    fault = fault_of(Sums(layer).half(), torch.randn(64, 4, 512, dtype=torch.float16))
    assert (fault.kernel, fault.phase, fault.place.module) == (op, "backward", "layer")
    assert fault.result.not_finite > 0


class Calling(nn.Module):
    """Calls a function."""

    def __init__(self, call: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(x)


def doubled(x: torch.Tensor) -> torch.Tensor:
    small, large = torch._foreach_mul([x * 1e-3, x], 2.0)
    return small + large


def doubled_in_place(x: torch.Tensor) -> torch.Tensor:
    parts = [x * 1e-3, x + 0]
    torch._foreach_mul_(parts, 2.0)
    return parts[0] + parts[1]


def log_of_a_volume(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.slogdet(x - x)[1]


@pytest.mark.parametrize(
    ("call", "kernel"),
    [
        (doubled, "aten::_foreach_mul.Scalar"),
        (doubled_in_place, "aten::_foreach_mul_.Scalar"),
        (log_of_a_volume, "aten::_linalg_slogdet"),
    ],
)
@pytest.mark.parametrize("steps", [None, [0]])
def test_results_after_the_first(
    call: Callable[[torch.Tensor], torch.Tensor], kernel: str, steps: list[int] | None
) -> None:
    """The guard says that no op made the inf that an op has in its second result."""
    with amp_core.guard(Calling(call), steps=steps) as guard, pytest.raises(amp_core.NonFiniteError):
        guard.model(torch.full((2, 2), 3e38))
    assert guard.fault is not None
    assert guard.fault.kernel == kernel


def attention_of_nothing(x: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(2, 2, dtype=torch.bool).tril(-1)  # its first row has nothing to attend to
    return torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask).nan_to_num()


def alignments(x: torch.Tensor) -> torch.Tensor:
    lengths = torch.tensor([2, 2])
    return torch.nn.functional.ctc_loss(
        x.log_softmax(-1), torch.tensor([[1], [1]]), lengths, torch.tensor([1, 1])
    )


@pytest.mark.parametrize("call", [attention_of_nothing, alignments])
def test_what_only_gradients_need_is_no_result(call: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Training stops at a logarithm of 0 that a kernel keeps for the backward pass."""
    torch.manual_seed(0)
    x = torch.randn(2, 2, 2, 4)[0 if call is alignments else slice(None)].requires_grad_()
    with amp_core.guard(Calling(call), steps=[0]) as guard:
        assert guard.model(x).sum().isfinite()


def maximum_in_place(x: torch.Tensor) -> torch.Tensor:
    largest = torch.full_like(x, -torch.inf)
    torch.maximum(largest, x, out=largest)
    return largest.mul_(10)


def sum_in_place(x: torch.Tensor) -> torch.Tensor:
    total = torch.full_like(x, -torch.inf)
    total.zero_().add_(x)
    return total.mul_(10)


def copied_over(x: torch.Tensor) -> torch.Tensor:
    return torch.full_like(x, torch.inf).copy_(x).mul_(10)


@pytest.mark.parametrize("call", [maximum_in_place, sum_in_place, copied_over])
@pytest.mark.parametrize("steps", [None, [0]])
def test_memory_that_had_inf_before(
    call: Callable[[torch.Tensor], torch.Tensor], steps: list[int] | None
) -> None:
    """The guard says that no op made inf, as the op wrote it where inf had been and gone."""
    model = Calling(call)
    with amp_core.guard(model, steps=steps) as guard, pytest.raises(amp_core.NonFiniteError) as caught:
        model(torch.full((2, 2), 1e38))
    assert guard.fault is not None, caught.value
    assert guard.fault.op == "aten::mul_.Tensor"


def to_memory_with_inf(x: torch.Tensor) -> torch.Tensor:
    memory = torch.full_like(x, -torch.inf)
    torch.mul(x, x, out=memory)
    return memory


def squared_in_place(x: torch.Tensor) -> torch.Tensor:
    return x.clone().mul_(x)


@pytest.mark.parametrize("call", [to_memory_with_inf, squared_in_place])
def test_the_range_of_memory_that_an_op_has_written_is_no_input(
    call: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """The inf that the op wrote is shown as its input, or hides the op."""
    fault = fault_of(Calling(call), torch.full((2, 2), 1e30))
    assert "mul" in fault.op
    assert all((given.largest, given.not_finite) == (pytest.approx(1e30), 0.0) for given in fault.inputs)
    assert fault.result.not_finite == 1.0


class Stepped(torch.autograd.Function):
    """An op whose gradient is inf where it is told so."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, broken: bool) -> torch.Tensor:
        ctx.broken = broken
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient / (0.0 if ctx.broken else 1.0), None


def accumulate(model: nn.Linear, broken: int, micro_batches: int) -> None:
    """Step after so many calls of the model, one of which is broken, in turn with another optimizer."""
    of_weight, of_bias = (torch.optim.SGD([p], lr=0.0) for p in (model.weight, model.bias))
    model.zero_grad()
    for call in range(broken + micro_batches):
        Stepped.apply(model(torch.ones(1, 2)), call == broken).sum().backward()  # type: ignore[no-untyped-call]
        if (call + 1) % micro_batches == 0:
            of_bias.step()
            of_weight.step()
            model.zero_grad()


@pytest.mark.parametrize("micro_batches", [1, 2, 3])
@pytest.mark.parametrize("broken", range(5))
def test_the_steps_to_check_for_gradients_that_were_accumulated(micro_batches: int, broken: int) -> None:
    """The message asks for checks of the last micro-batch, in which there is nothing to find."""
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    with amp_core.guard(model), pytest.raises(amp_core.NonFiniteError) as caught:
        accumulate(model, broken, micro_batches)
    named = str(caught.value).partition("steps=")[2].removesuffix(").")
    steps = eval(named)
    first = broken // micro_batches * micro_batches
    assert [*steps] == [*range(first, first + micro_batches)]
    with amp_core.guard(model, steps=steps), pytest.raises(amp_core.NonFiniteError) as caught:
        accumulate(model, broken, micro_batches)
    assert caught.value.fault is not None
    assert (caught.value.fault.step, caught.value.fault.phase) == (broken, "backward")


def jagged(x: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 1, 3]))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse CSR tensor")
@pytest.mark.parametrize(
    ("call", "kernel"),
    [
        (lambda x: (x.to_sparse() * 3e38).to_dense(), "aten::mul.Tensor"),
        (lambda x: (x.to_sparse_csr() * 3e38).to_dense(), "aten::mul.Tensor"),
        (lambda x: x.to_sparse().mul_(3e38).to_dense(), "aten::mul_.Tensor"),
        (lambda x: (jagged(x) * 3e38).values(), "aten::mul.Tensor"),
        (lambda x: jagged(x * 1e4).half().values().float(), "aten::_to_copy"),
        (
            lambda x: (torch.nested.as_nested_tensor([x, x[:1]]) * 3e38).to_padded_tensor(0.0),
            "aten::mul.Tensor",
        ),
    ],
    ids=["sparse", "csr", "in place", "jagged", "cast", "nested"],
)
def test_values_of_sparse_and_nested_tensors(call: Callable[[torch.Tensor], Any], kernel: str) -> None:
    """The op that makes a sparse tensor dense is said to make its inf, and that in a nested one has no op."""

    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = call(x * 10)
            return y + 0

    fault = fault_of(Model(), torch.ones(3, 4, requires_grad=True))
    assert fault.kernel == kernel
    assert (fault.result.not_finite, [each.not_finite for each in fault.inputs[:1]]) == (
        1.0,
        [] if "_." in kernel else [0.0],
    )
