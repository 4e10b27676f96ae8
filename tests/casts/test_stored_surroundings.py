"""Stored weights under DDP, after their removal, and where someone else writes to them."""

from __future__ import annotations

import copy
import gc
import math
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from amp_core import GradScaler, master_weights

GRAD_DTYPES = ["default", *([torch.float32, None] if hasattr(torch.Tensor, "grad_dtype") else [])]


@pytest.mark.parametrize("storage", ["remainder", "stochastic", "kahan"])
def test_float32_weights_that_ddp_has_wrapped(storage: Any, one_rank: None) -> None:
    """Gradients are no longer reduced, and DDP blames unused parameters."""
    wrapped = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"module.weight is float32, and DistributedDataParallel"):
        master_weights(wrapped, optimizer, storage)
    assert wrapped.module.weight.dtype is torch.float32

    for first in (nn.Linear(4, 4), nn.Linear(4, 4).bfloat16()):
        stored, steps = first.weight.dtype is torch.float32, torch.optim.SGD(first.parameters(), lr=0.1)
        if stored:
            master_weights(first, steps, storage)
        wrapped = nn.parallel.DistributedDataParallel(first)
        if not stored:
            master_weights(wrapped, steps, storage)
        for _ in range(3):
            wrapped(torch.ones(2, 4).bfloat16()).sum().backward()
            steps.step()


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.Adagrad])
@pytest.mark.parametrize("storage", ["remainder", "kahan"])
@pytest.mark.parametrize("look", ["weights", "state", "step"])
def test_weights_that_are_replaced_before_the_first_step(storage: Any, kind: Any, look: str) -> None:
    """They get the low bits of others, so ranks on which DDP replaces different weights part for good."""
    model, new = nn.Linear(16, 16), nn.Linear(16, 16).bfloat16()
    optimizer = kind(model.parameters(), lr=0.0)
    masters = master_weights(model, optimizer, storage)
    model.load_state_dict(new.state_dict())
    if look == "state":
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    elif look == "step":
        model(torch.ones(2, 16).bfloat16()).sum().backward()
        optimizer.step()
    for name, weight in masters.float32_weights().items():
        assert torch.equal(weight, new.get_parameter(name).float())


def trained(weights: torch.Tensor) -> tuple[nn.ParameterDict, torch.optim.Optimizer]:
    model = nn.ParameterDict({"w": nn.Parameter(weights)})
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


class Lookahead(torch.optim.Optimizer):
    """Steps another optimizer, as wrappers of third parties do; only with `shared` it has the same state."""

    def __init__(self, inner: torch.optim.Optimizer, shared: bool) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self.inner, self.param_groups = inner, inner.param_groups
        if shared:
            self.state = inner.state

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


def sharded_state(params: Any) -> Any:
    from torch.distributed import optim

    return optim.ZeroRedundancyOptimizer(params, optimizer_class=torch.optim.Adam, lr=0.1)


def averaging(params: Any) -> Any:
    from torch.distributed import optim
    from torch.distributed.algorithms.model_averaging import averagers

    averager = averagers.PeriodicModelAverager(period=2)
    return optim.PostLocalSGDOptimizer(torch.optim.Adam(params, lr=0.1), averager)


WRAPPERS = {
    "optim": (sharded_state, averaging),
    "inner": (lambda params: Lookahead(torch.optim.Adam(params, lr=0.1), shared=False),),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_optimizers_that_step_another(one_rank: None) -> None:
    """The inner optimizer does not see the weights, which do not move, or forgets its moments."""
    for name, makers in WRAPPERS.items():
        for make in makers:
            model = nn.Linear(4, 4)
            outer = make([*model.parameters()])
            inner = getattr(outer, name)
            with pytest.raises(ValueError, match=rf"lets another optimizer step, its \.{name}"):
                master_weights(model, outer, "remainder")
            with master_weights(model, inner, "remainder") as masters:
                moved(model, outer, masters)
                assert inner.state[model.weight]["step"] == 3
    model = nn.Linear(4, 4)
    outer = Lookahead(torch.optim.Adam(model.parameters(), lr=0.1), shared=True)
    moved(model, outer, master_weights(model, outer, "remainder"))


def moved(model: nn.Linear, optimizer: Any, masters: Any) -> None:
    before = masters.float32_weights()["weight"]
    for _ in range(3):
        model(torch.ones(2, 4).bfloat16()).sum().backward()
        optimizer.step()
        model.zero_grad()
    assert torch.allclose(masters.float32_weights()["weight"], before - 0.3, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.AdamW, {}),
        (torch.optim.AdamW, {"foreach": True}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.RMSprop, {}),
        (torch.optim.Adagrad, {}),
    ],
    ids=str,
)
def test_the_optimizer_steps_on_after_removal(kind: Any, options: dict[str, Any]) -> None:
    """remove() lets it step on the bfloat16 weights, but its float32 states do not fit their gradients."""
    model = nn.Linear(4, 4)
    optimizer = kind(model.parameters(), lr=0.1, **options)
    with master_weights(model, optimizer, "remainder"):
        model(torch.ones(2, 4).bfloat16()).sum().backward()
        optimizer.step()
    before = model.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(model.weight, before)
    states = [v for state in optimizer.state.values() for k, v in state.items() if k != "step"]
    assert all(value.dtype is torch.bfloat16 for value in states)


def test_removal_leaves_nothing_beside_weights_that_are_float32_by_now() -> None:
    """The optimizer of a model that was cast back keeps remainders, and saves them."""
    model, optimizer = trained(torch.ones(3))
    with master_weights(model, optimizer, "remainder"):
        model["w"].grad = torch.ones(3).bfloat16()
        optimizer.step()
        model.float()
    assert optimizer.state[model["w"]].keys() == {"momentum_buffer"}


@pytest.mark.parametrize("storage", ["remainder", "kahan"])
def test_a_model_that_is_cast_back_before_the_first_step(storage: Any) -> None:
    """The second step clears what it lacks, of which the first has left nothing."""
    torch.manual_seed(0)
    model, optimizer = trained(torch.randn(100))
    masters = master_weights(model, optimizer, storage)
    model.float()
    for _ in range(2):
        model["w"].grad = torch.ones(100)
        optimizer.step()
        assert torch.equal(masters.float32_weights()["w"], model["w"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize("storage", ["remainder", "stochastic", "kahan"])
def test_the_float32_weights_of_a_model_that_was_cast(storage: Any, dtype: torch.dtype) -> None:
    """A checkpoint lacks the weights, or their low bits; steps in between come back with older bits."""
    torch.manual_seed(0)
    model, optimizer = trained(torch.randn(100))
    masters = master_weights(model, optimizer, storage)
    model["w"].grad = torch.randn(100).bfloat16()
    optimizer.step()
    exact = masters.float32_weights()["w"]
    model.to(dtype)
    is_rounded = model["w"].abs() < 2**-14  # by float16
    assert torch.equal(masters.float32_weights()["w"][~is_rounded], exact[~is_rounded])
    with torch.no_grad():
        model["w"][0] = 0.3
    assert masters.float32_weights()["w"][0] == model["w"][0].float()
    if dtype is torch.float16:
        return  # torch mixes it with no float32 state
    model["w"].grad = torch.ones(100, dtype=dtype)
    optimizer.step()
    assert torch.equal(masters.float32_weights()["w"], model["w"].float())
    model.bfloat16()
    assert torch.equal(masters.float32_weights()["w"], model["w"].float())


def load(model: nn.ParameterDict, new: float) -> None:
    model.load_state_dict({"w": torch.full((50,), new)})


def replace_memory(model: nn.ParameterDict, new: float) -> None:
    model["w"].data = torch.full((50,), new, dtype=torch.bfloat16)


def write_under_a_mode(model: nn.ParameterDict, new: float) -> None:
    """Write to the weight as torch's list ops do, which leave version counters under a mode."""
    with torch.no_grad(), FlopCounterMode(display=False):
        torch._foreach_zero_([model["w"]])
        torch._foreach_add_([model["w"]], new)


def step_another(model: nn.ParameterDict, new: float) -> None:
    """Write to the weight in fused steps of another optimizer, which move no version counter."""
    for grad, rate in ((0.0, 1.0), (-1.0, new)):
        model["w"].grad = torch.full_like(model["w"], grad)
        torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=1.0, fused=True).step()


def step_another_with_a_fused_group(model: nn.ParameterDict, new: float) -> None:
    """Do the same by the setting of the parameter group."""
    for grad, rate in ((0.0, 1.0), (-1.0, new)):
        model["w"].grad = torch.full_like(model["w"], grad)
        group = {"params": [model["w"]], "fused": True}
        torch.optim.AdamW([group], lr=rate, weight_decay=1.0).step()


def step_one_that_was_stored(model: nn.ParameterDict, new: float) -> None:
    """Write to the weight in fused steps of an optimizer that it was stored for once."""
    model["w"].grad = torch.zeros_like(model["w"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=1.0, fused=True)
    master_weights(model, optimizer, "remainder").remove()
    optimizer.step()
    model["w"].grad = torch.full_like(model["w"], -1.0)
    optimizer.param_groups[0]["lr"] = new
    optimizer.state.clear()
    optimizer.step()


@pytest.mark.parametrize(
    "write",
    [
        load,
        replace_memory,
        write_under_a_mode,
        step_another,
        step_another_with_a_fused_group,
        step_one_that_was_stored,
    ],
)
@pytest.mark.parametrize("storage", ["remainder", "stochastic", "kahan"])
@pytest.mark.parametrize("new", [0.0, 1e-3])
def test_weights_that_someone_else_wrote(storage: str, new: float, write: Any) -> None:
    """What was kept beside large weights is added to small ones that were loaded; 0 becomes NaN or 1e-41."""
    torch.manual_seed(0)
    model = nn.ParameterDict({"w": nn.Parameter(100 * torch.randn(50).bfloat16())})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with master_weights(model, optimizer, storage) as masters:
        for _ in range(5):
            model["w"].grad = torch.randn(50).bfloat16()
            optimizer.step()
        write(model, new)
        assert (masters.float32_weights()["w"] - new).abs().max() <= new * 2**-7
        model["w"].grad = torch.zeros_like(model["w"])
        optimizer.step()
        assert torch.equal(model["w"], torch.full((50,), new).bfloat16())


@pytest.mark.parametrize("storage", ["remainder", "stochastic", "kahan"])
@pytest.mark.parametrize("new", [math.inf, -math.inf])
def test_infinite_weights_that_someone_else_wrote(storage: Any, new: float) -> None:
    """A mask of -inf in a weight becomes NaN, or a large number, by what was kept beside the weight."""
    torch.manual_seed(0)
    model, optimizer = trained(torch.randn(50))
    with master_weights(model, optimizer, storage) as masters:
        model["w"].grad = torch.randn(50).bfloat16()
        optimizer.step()
        model["w"].detach()[:25] = new
        assert (masters.float32_weights()["w"][:25] == new).all()
        optimizer.step()
        assert (model["w"][:25] == new).all()
        assert model["w"][25:].isfinite().all()


@pytest.mark.parametrize("storage", ["remainder", "stochastic", "kahan"])
def test_weights_at_the_address_of_freed_ones(storage: Any) -> None:
    """Two calls of vector_to_parameters between steps add what was kept beside large weights to small."""
    torch.manual_seed(0)
    place = bytearray(100)

    def put(values: torch.Tensor) -> None:
        weight = torch.frombuffer(place, dtype=torch.bfloat16)
        weight.copy_(values)
        model["w"].data = weight

    model, optimizer = trained(torch.zeros(50).bfloat16())
    with master_weights(model, optimizer, storage):
        put(100 * torch.randn(50))
        model["w"].grad = torch.randn(50).bfloat16()
        optimizer.step()
        model["w"].data = torch.zeros(50).bfloat16()
        put(torch.full((50,), 1e-3))
        optimizer.param_groups[0]["lr"] = 0.0
        optimizer.step()
        assert torch.equal(model["w"], torch.full((50,), 1e-3).bfloat16())


@pytest.mark.parametrize("fused", [False, True])
def test_steps_to_weights_that_are_infinite_or_0_in_bfloat16(fused: bool) -> None:
    """The step after takes them for weights that someone else has written, and drops their low bits."""
    largest = torch.finfo(torch.bfloat16).max
    weights = torch.tensor([largest, -largest, 0.0, 0.0])
    model, wide = (nn.ParameterDict({"w": nn.Parameter(weights.clone())}) for _ in range(2))
    one, other = (torch.optim.SGD(each.parameters(), lr=0.125, fused=fused) for each in (model, wide))
    masters = master_weights(model, one, "remainder")
    for rate in (0.0, 1.0, 0.0, 0.0):
        grad = rate * torch.tensor([-1e37, 1e37, 2.0**-133, -(2.0**-133)]).bfloat16()
        model["w"].grad, wide["w"].grad = grad, grad.float()
        one.step()
        other.step()
        assert torch.equal(masters.float32_weights()["w"], wide["w"])
    assert torch.equal(model["w"], torch.tensor([math.inf, -math.inf, 0.0, 0.0]).bfloat16())
    assert wide["w"].isfinite().all()
    assert (wide["w"] != 0).all()


@pytest.mark.parametrize("end", ["no", "removed", "freed"])
@pytest.mark.parametrize("other", ["remainder", "kahan"])
def test_a_weight_that_is_stored_for_two_optimizers(other: Any, end: str) -> None:
    """Each adds what it has kept to the weight of the other: half of the updates are lost."""
    model, first = trained(torch.ones(3))
    second = torch.optim.SGD(model.parameters(), lr=0.05)
    handles = master_weights(model, first, "remainder"), master_weights(model, second, other)
    model["w"].grad = torch.ones(3).bfloat16()
    first.step()
    second.step()
    second.step()
    before = model["w"].detach().clone(), copy.deepcopy(first.state_dict())
    if end != "no":
        another = nn.Linear(2, 2)
        third = torch.optim.SGD(another.parameters())
        master_weights(another, third, "remainder")
        if end == "removed":
            handles[1].remove()
        else:
            del second, handles
            gc.collect()
        first.step()
        return
    with pytest.raises(RuntimeError, match="'w' is stored for two optimizers, which step it in turn"):
        first.step()
    assert torch.equal(model["w"], before[0])
    assert str(first.state_dict()) == str(before[1])


@pytest.mark.parametrize("storage", ["remainder", "stochastic", "kahan"])
@pytest.mark.parametrize("new", [0.0, 1e-3])
def test_states_that_were_saved_beside_other_weights(storage: str, new: float) -> None:
    """Loading the optimizer alone adds what was kept beside large weights to small ones."""
    torch.manual_seed(0)
    model = nn.ParameterDict({"w": nn.Parameter(100 * torch.randn(50).bfloat16())})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with master_weights(model, optimizer, storage) as masters:
        model["w"].grad = torch.randn(50).bfloat16()
        optimizer.step()
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer.param_groups[0]["lr"] = 0.0
        model.load_state_dict({"w": torch.full((50,), new)})
        optimizer.step()
        optimizer.load_state_dict(saved)
        assert (masters.float32_weights()["w"] - new).abs().max() <= new * 2**-7


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("storage", ["remainder", "kahan"])
def test_states_that_someone_has_cast(storage: Any, dtype: torch.dtype) -> None:
    """Numbers of low bits are added to the weights as they are, as if they were a compensation."""
    torch.manual_seed(0)
    model, optimizer = trained(torch.randn(50))
    with master_weights(model, optimizer, storage) as masters:
        for _ in range(2):
            model["w"].grad = torch.randn(50).bfloat16()
            optimizer.step()
        before = masters.float32_weights()["w"]
        for state in optimizer.state.values():
            state.update({key: value.to(dtype) for key, value in state.items()})
        after = masters.float32_weights()["w"]
        assert ((after - model["w"]).abs() <= model["w"].abs() * 2**-8).all()
        if dtype.itemsize > 2:
            assert torch.equal(after, before)


def match_names(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """Give parameters the states that were saved under their names, as torch's documentation shows."""
    (old,), (new,) = saved["param_groups"], optimizer.param_groups
    number_of = dict(zip(old["param_names"], old["params"], strict=True))
    states = {i: saved["state"][number_of[name]] for i, name in enumerate(new["param_names"])}
    group = {**old, "params": [*range(len(states))], "param_names": new["param_names"]}
    return {"state": states, "param_groups": [group]}


@pytest.mark.parametrize("is_last", [False, True])
def test_a_hook_that_changes_what_is_saved(is_last: bool) -> None:
    """It sees integers that no collective takes, or leaves a number out and the next hook fails."""
    model, optimizer = trained(torch.ones(3))
    seen = []

    def pack(_: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        seen.extend(value.dtype for state in saved["state"].values() for value in state.values())
        groups = [{**group, "params": []} for group in saved["param_groups"]]
        return {"param_groups": groups, "state": saved["state"]}

    if not is_last:
        optimizer.register_state_dict_post_hook(pack)
    with master_weights(model, optimizer, "remainder"):
        if is_last:
            optimizer.register_state_dict_post_hook(pack)
        (state,) = optimizer.state_dict()["state"].values()
    assert [value.dtype for value in state.values()] == seen == [torch.uint8]


@pytest.mark.parametrize("is_last", [False, True])
def test_a_hook_that_changes_what_was_loaded(is_last: bool) -> None:
    """A momentum that it has set to 0 comes back, if it was registered before the storage."""
    model, optimizer = trained(torch.ones(3))

    def forget(optimizer: torch.optim.Optimizer) -> None:
        for state in optimizer.state.values():
            state["momentum_buffer"].zero_()

    if not is_last:
        optimizer.register_load_state_dict_post_hook(forget)
    with master_weights(model, optimizer, "remainder"):
        if is_last:
            optimizer.register_load_state_dict_post_hook(forget)
        model["w"].grad = torch.ones(3).bfloat16()
        optimizer.step()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert not optimizer.state[model["w"]]["momentum_buffer"].any()


@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("storage", ["remainder", "stochastic", "kahan"])
def test_a_hook_that_changes_what_is_loaded(storage: Any, is_last: bool) -> None:
    """Parameters get each other's momentum and low bits, if the hook was registered after the storage."""
    torch.manual_seed(0)
    model = nn.ParameterDict({name: nn.Parameter(torch.randn(50)) for name in "abc"})
    again = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.named_parameters())
    masters = master_weights(model, optimizer, storage)
    for param in model.values():
        param.grad = torch.randn(50).bfloat16()
    optimizer.step()
    optimizer = torch.optim.Adam([*again.named_parameters()][::-1])
    if not is_last:
        optimizer.register_load_state_dict_pre_hook(match_names)
    masters_again = master_weights(again, optimizer, storage)
    if is_last:
        optimizer.register_load_state_dict_pre_hook(match_names)
    again.load_state_dict(model.state_dict())
    optimizer.load_state_dict(masters.optimizer.state_dict())
    for name, weight in masters.float32_weights().items():
        assert torch.equal(masters_again.float32_weights()[name], weight)
        ours, theirs = optimizer.state[again[name]], masters.optimizer.state[model[name]]
        assert torch.equal(ours["exp_avg"], theirs["exp_avg"])
    masters_again.remove()
    assert not {"step", "load_state_dict"} & vars(optimizer).keys()


def test_an_optimizer_that_loads_by_a_method_of_the_program() -> None:
    """The storage replaces the method, or takes it away when it ends."""
    model, optimizer = trained(torch.ones(3))
    loaded: list[dict[str, Any]] = []
    optimizer.load_state_dict = load = loaded.append  # type: ignore[method-assign]
    with master_weights(model, optimizer, "remainder"):
        optimizer.load_state_dict({})
    assert loaded == [{}]
    assert optimizer.load_state_dict is load


def test_a_removed_handle_is_freed() -> None:
    """Hooks keep it while the optimizer trains on, or a load by a method from before adds some again."""
    model, optimizer = trained(torch.ones(3))
    masters = master_weights(model, optimizer, "remainder")
    load = optimizer.load_state_dict
    masters.remove()
    load(optimizer.state_dict())
    handle = weakref.ref(masters)
    del masters, load
    gc.collect()
    assert handle() is None


@pytest.mark.parametrize("begun", [False, True])
def test_a_weight_that_leaves_the_model_is_freed(begun: bool) -> None:
    """Each layer that a program replaces stays in memory until the handle is removed."""
    model = nn.ParameterDict({name: nn.Parameter(torch.randn(3)) for name in "ab"})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    masters = master_weights(model, optimizer, "remainder")
    if begun:
        model["b"].grad = torch.ones(3).bfloat16()
        optimizer.step()
    left = weakref.ref(model.pop("b"))
    param = optimizer.param_groups[0]["params"].pop()
    optimizer.state.pop(param, None)
    del param
    assert masters.float32_weights().keys() == {"a"}
    gc.collect()
    assert left() is None


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_states_that_are_there_before_the_storage(state_dtype: torch.dtype) -> None:
    """DCP loads float32 states into bfloat16 ones, which round them."""
    model = nn.Linear(3, 3).bfloat16()
    optimizer = torch.optim.Adagrad(model.parameters())
    master_weights(model, optimizer, "remainder", state_dtype=state_dtype)
    assert {state["sum"].dtype for state in optimizer.state.values()} == {state_dtype}


def test_a_state_that_the_program_puts_in_before_the_first_step() -> None:
    """A checkpoint takes it out of the optimizer, as it does what is kept until the first step."""
    model, optimizer = trained(torch.randn(3))
    masters = master_weights(model, optimizer, "remainder")
    optimizer.state[model["w"]]["momentum_buffer"] = torch.ones(3)
    exact = masters.float32_weights()["w"]
    assert optimizer.state_dict()["state"][0].keys() == {"momentum_buffer", "amp_core_kept"}
    assert optimizer.state[model["w"]]["momentum_buffer"].equal(torch.ones(3))
    assert masters.float32_weights()["w"].equal(exact)


def test_a_checkpoint_from_before_the_first_step() -> None:
    """DCP takes an optimizer that has loaded it for one that has begun, and loads no moments later."""
    torch.manual_seed(0)
    model, optimizer = trained(torch.randn(3))
    masters = master_weights(model, optimizer, "remainder")
    exact, saved = masters.float32_weights()["w"], copy.deepcopy(optimizer.state_dict())
    assert saved["state"][0].keys() == {"amp_core_kept"}
    model["w"].grad = torch.ones(3).bfloat16()
    optimizer.step()
    optimizer.state.clear()
    optimizer.load_state_dict(saved)
    assert not optimizer.state
    model.load_state_dict({"w": exact})
    assert torch.equal(masters.float32_weights()["w"], exact)


def test_what_fsdp1_has_saved_is_saved_again_as_others_do() -> None:
    """A checkpoint of a model without FSDP1 has the low bits as numbers, which take twice the memory."""
    model, optimizer = trained(torch.randn(3))
    masters = master_weights(model, optimizer, "remainder")
    model["w"].grad = torch.ones(3).bfloat16()
    optimizer.step()
    size, saved = masters.nbytes(), copy.deepcopy(optimizer.state_dict())
    state = saved["state"][0]
    state["amp_core_kept"] = state["amp_core_kept"].view(torch.int16).squeeze(-1).float()
    optimizer.load_state_dict(saved)
    assert masters.nbytes() == size
    assert optimizer.state_dict()["state"][0]["amp_core_kept"].dtype is torch.uint8


def test_states_of_weights_that_stay_as_they_are_are_loaded_by_torch() -> None:
    """The states of weights in `keep` come in the dtype that was saved, which their step does not take."""
    model = nn.ParameterDict({name: nn.Parameter(torch.ones(3)) for name in "ab"})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for param in model.parameters():
        param.grad = torch.ones(3)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        state["momentum_buffer"] = state["momentum_buffer"].double()
    with master_weights(model, optimizer, "remainder", keep=["b"]):
        optimizer.load_state_dict(saved)
    assert optimizer.state[model["b"]]["momentum_buffer"].dtype is torch.float32


@pytest.mark.parametrize("how", ["load", "load too early", "load too early in float32", "copy"])
@pytest.mark.parametrize("new", ["remainder", "stochastic", "kahan"])
@pytest.mark.parametrize("old", ["remainder", "stochastic", "kahan"])
def test_a_checkpoint_of_another_storage(old: Any, new: Any, how: str) -> None:
    """What one storage has kept is lost, or added at each step of the other, which rounds by itself."""
    torch.manual_seed(0)
    model, optimizer = trained(torch.randn(1000))
    masters = master_weights(model, optimizer, old)
    model["w"].grad = torch.randn(1000).bfloat16()
    optimizer.step()
    exact = masters.float32_weights()["w"]
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    if how == "copy":
        model, optimizer = copy.deepcopy((model, optimizer))
    else:
        dtype = torch.float32 if how.endswith("float32") else torch.bfloat16
        model, optimizer = trained(torch.zeros(1000, dtype=dtype))
        masters = master_weights(model, optimizer, new) if how == "load" else masters
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
    masters = masters if how == "load" else master_weights(model, optimizer, new)
    wanted = model["w"].float() if how.endswith("float32") else exact
    assert torch.equal(masters.float32_weights()["w"], wanted)
    optimizer.param_groups[0]["momentum"] = 0.0
    model["w"].grad = torch.zeros_like(model["w"])
    for _ in range(20):
        optimizer.step()
    unit = 2.0**-7 if new == "stochastic" else 2.0**-15
    assert ((masters.float32_weights()["w"] - wanted).abs() <= unit * wanted.abs()).all()


@pytest.mark.parametrize("storage", ["remainder", "stochastic", "kahan"])
@pytest.mark.parametrize("grad_dtype", GRAD_DTYPES)
def test_gradients_from_before(storage: Any, grad_dtype: Any) -> None:
    """A step takes no gradients that were computed before the weights were stored in bfloat16."""
    model = nn.ParameterDict({"w": nn.Parameter(torch.ones(3))})
    if grad_dtype != "default":
        model["w"].grad_dtype = grad_dtype
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model["w"].sum().backward()
    with master_weights(model, optimizer, storage):
        wanted = torch.bfloat16 if grad_dtype == "default" else torch.float32
        assert model["w"].grad.dtype is wanted
        optimizer.step()
        assert torch.equal(model["w"].float(), torch.full((3,), 0.5))


def test_a_compensation_of_other_weights() -> None:
    """A step without an update, such as torch's set_optimizer_state_dict takes, changes loaded weights."""
    torch.manual_seed(0)
    weights = torch.cat([torch.randn(4000), 2.0 ** torch.randn(400).round()])
    model = nn.ParameterDict({"w": nn.Parameter(weights)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with master_weights(model, optimizer, "kahan") as masters:
        model["w"].grad = torch.randn(4400).bfloat16()
        optimizer.step()
        exact = masters.float32_weights()["w"]
        model["w"].detach().mul_(1)  # a write, after which the same weights have what is kept beside them
        assert torch.equal(masters.float32_weights()["w"], exact)
        other = model["w"].detach()[torch.randperm(4400)]
        model.load_state_dict({"w": other})
        model["w"].grad = torch.zeros_like(model["w"])
        optimizer.step()
        assert torch.equal(model["w"], other)


@pytest.mark.parametrize("storage", ["remainder", "stochastic", "kahan"])
def test_a_first_step_in_inference_mode(storage: Any) -> None:
    """The step writes the weights, then raises: what it keeps beside them counts no writes."""
    model = nn.ParameterDict({"w": nn.Parameter(torch.ones(3).bfloat16())})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    with master_weights(model, optimizer, storage):
        for mode in (torch.inference_mode, torch.no_grad):
            model["w"].grad = torch.ones(3).bfloat16()
            with mode():
                optimizer.step()
        assert torch.equal(model["w"].float(), torch.full((3,), 0.5))


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad])
@pytest.mark.parametrize("storage", ["remainder", "stochastic", "kahan"])
def test_a_first_step_that_is_taken_back(storage: Any, kind: Any) -> None:
    """A hook raises after the step, and step_closure() restores the weights without their low 16 bits."""
    torch.manual_seed(0)
    model, scaler = nn.Linear(4, 4), GradScaler("cpu")
    optimizer = kind(model.parameters(), lr=0.1)
    masters = master_weights(model, optimizer, storage)

    def closure() -> torch.Tensor:
        model.zero_grad()
        loss = model(torch.ones(2, 4).bfloat16()).float().sum()
        scaler.scale(loss).backward()
        return loss

    def raising(*_: object) -> None:
        raise KeyError

    before = masters.float32_weights()
    with optimizer.register_step_post_hook(raising), pytest.raises(KeyError):
        scaler.step_closure(optimizer, closure)
    assert all(map(torch.equal, masters.float32_weights().values(), before.values()))
    scaler.step_closure(optimizer, closure)
    after = masters.float32_weights()
    assert not torch.equal(after["weight"], before["weight"])
