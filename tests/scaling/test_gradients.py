"""What is remembered of an optimizer's gradients from step to step, against looking at all of them again."""

from __future__ import annotations

import gc
import weakref

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch.testing._internal.two_tensor import TwoTensor

import amp_core
from amp_core.scaling import gradients
from amp_core.scaling.gradients import group_by_device

from ..drawn import examples

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # once a process, before torch 2.12


def parameter(dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    param = torch.nn.Parameter(torch.zeros(2, 3, dtype=dtype))
    param.grad = torch.ones_like(param)
    return param


def fresh(param: torch.nn.Parameter) -> None:
    param.grad = torch.full_like(param, 2.0)


def transposed(param: torch.nn.Parameter) -> None:
    param.grad = torch.ones(3, 2, dtype=param.dtype).t()


def sparse(param: torch.nn.Parameter) -> None:
    param.grad = torch.sparse_coo_tensor(
        torch.tensor([[0, 0]]), torch.ones(2, 3, dtype=param.dtype), (2, 3), check_invariants=False
    )


def negative(param: torch.nn.Parameter) -> None:
    param.grad = torch._neg_view(torch.ones_like(param))


def subclass(param: torch.nn.Parameter) -> None:
    class Mine(torch.Tensor):
        pass

    param.grad = torch.ones_like(param).as_subclass(Mine)


def nothing(param: torch.nn.Parameter) -> None:
    param.grad = None


GRADIENTS = [fresh, transposed, sparse, negative, subclass, nothing]


def seen(optimizer: torch.optim.Optimizer) -> list[tuple[object, ...]]:
    return [
        (
            part.device,
            part.sharding,
            [id(p) for p in part.params],
            [g.to_dense().tolist() for g in part.grads],
        )
        for part in group_by_device(optimizer, allow_fp16=True)
    ]


changes = st.one_of(
    st.tuples(st.sampled_from(GRADIENTS), st.integers(0, 3)),
    st.sampled_from(["add", "replace", "share", "wide"]),
)


@pytest.mark.filterwarnings("ignore:.*contains a parameter with duplicate.*")
@given(st.lists(changes, max_size=8))
@examples(150)
def test_any_change_is_noticed(program: list[tuple[object, int] | str]) -> None:
    """Gradients of an earlier step, or with another layout's addresses, would be scaled."""
    optimizer = torch.optim.SGD([parameter(), parameter(), parameter()], lr=0.1)
    params = optimizer.param_groups[0]["params"]
    for change in program:
        if change == "add":
            optimizer.add_param_group({"params": [parameter()]})
        elif change == "replace":
            params[0] = parameter()
        elif change == "share":
            params.append(params[0])
        elif change == "wide":
            params[1] = parameter(torch.float64)
        else:
            make, index = change
            make(params[index % len(params)])
        remembered = seen(optimizer)
        gradients._groupings.clear()
        assert seen(optimizer) == remembered
        assert seen(optimizer) == remembered


def test_nothing_is_kept_alive() -> None:
    """Memory of gradients that `zero_grad` has let go, or of a model that is gone, would be held."""
    param = parameter()
    optimizer = torch.optim.SGD([param], lr=0.1)
    group_by_device(optimizer, allow_fp16=False)
    grad = weakref.ref(param.grad)
    optimizer.zero_grad()
    assert grad() is None
    watched = weakref.ref(optimizer), weakref.ref(param)
    del optimizer, param
    gc.collect()
    assert [w() for w in watched] == [None, None]


def test_float16_is_refused_though_it_was_seen_with_permission() -> None:
    """A scaler without `allow_fp16_gradients` would unscale float16 because another one had."""
    optimizer = torch.optim.SGD([parameter(torch.float16)], lr=0.1)
    group_by_device(optimizer, allow_fp16=True)
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        group_by_device(optimizer, allow_fp16=False)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("amp", [torch.amp, amp_core])
def test_expanded_gradients_are_refused(amp, fused):
    """Torch's fused kernels read beyond the memory of such a gradient: the weights become garbage."""
    weight = torch.nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([weight], 1.0, fused=fused)
    scaler = amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    weight.grad = torch.ones(4)
    scaler.step(optimizer)
    scaler.update()
    before = weight.tolist()
    weight.grad = torch.ones(1).expand(4)
    with pytest.raises(RuntimeError, match=r"more than one element .* Please clone\(\) the tensor"):
        scaler.step(optimizer)
    assert weight.tolist() == before


@pytest.mark.parametrize("fused", [False, True])
def test_records_of_gradients_of_another_class(fused: bool) -> None:
    """What a record holds of such gradients can be read neither by the user nor by the next step's record."""
    weight = torch.nn.Parameter(TwoTensor(torch.ones(3), torch.ones(3)))
    optimizer = torch.optim.Adam([weight], fused=fused)
    scaler = amp_core.GradScaler("cpu", 1.0, named_parameters=[("weight", weight)])
    for value in (torch.inf, 2.0):
        scaler.scale(torch.ones(()))
        weight.grad = TwoTensor(*(torch.full((3,), value) for _ in range(2)))
        scaler.step(optimizer, max_norm=1.0)
        scaler.update()
    skipped, taken = scaler.history
    assert [bad.name for bad in skipped.bad_parameters] == ["weight"]
    assert (skipped.total_norm, taken.bad_parameters) == (torch.inf, ())
    assert taken.total_norm == pytest.approx(48**0.5)  # at half the scale
