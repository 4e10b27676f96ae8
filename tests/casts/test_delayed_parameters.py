"""Delayed scales of models whose parameters are replaced or added."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.testing import assert_close as assert_same

from amp_core import AmpWarning, OpPolicy, PolicyError, Recipe, autocast, delayed_scales


def test_delayed_scales_follow_the_parameters_of_the_model() -> None:
    """Parameters that are replaced by a load, or that a model grows, count as those of no model."""
    policy = OpPolicy.default("cpu").override({"linear": Recipe.fp8_delayed(history=2)})
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.ones(2, 4)
    with delayed_scales(model) as scales:

        def amax(name: str) -> float:
            with autocast("cpu", torch.bfloat16, policy=policy):
                model(x).sum().backward()
            return float(scales.state_dict()[name]["weight"]["current"])

        assert amax("0.weight") == model[0].weight.bfloat16().abs().max()
        model.load_state_dict({k: 2 * v for k, v in model.state_dict().items()}, assign=True)
        assert amax("0.weight") == model[0].weight.bfloat16().abs().max()
        model.append(nn.Linear(4, 3))
        assert amax("1.weight") == model[1].weight.bfloat16().abs().max()
        other = nn.Linear(4, 4)
        with (
            autocast("cpu", torch.bfloat16, policy=policy),
            pytest.raises(PolicyError, match="not a parameter of a model"),
        ):
            other(x)


def test_histories_move_with_their_weights() -> None:
    """A layer that is inserted takes over the history of the one behind it, and is clipped to its range."""
    policy = OpPolicy.default("cpu").override({"linear": Recipe.fp8_delayed(history=2)})
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.ones(2, 4)
    new = nn.Linear(4, 4)
    nn.init.constant_(new.weight, 64.0)

    def run() -> torch.Tensor:
        with autocast("cpu", torch.bfloat16, policy=policy):
            return model(x)

    with delayed_scales(model) as scales:
        run()
        scales.step()
        before = scales.state_dict()
        model.insert(1, new)
        fresh = delayed_scales(model)
        fresh.load_state_dict({"0.weight": before["0.weight"], "2.weight": before["1.weight"]})
        y, after = run(), scales.state_dict()
    with fresh:
        assert torch.equal(run(), y)
    assert after["1.weight"]["weight"]["current"] == 64
    assert torch.equal(after["2.weight"]["weight"]["seen"], before["1.weight"]["weight"]["seen"])


def test_histories_of_weights_that_leave_or_are_replaced_while_others_move() -> None:
    """A weight that has left keeps its name from the one that has it now, or one that is new starts anew."""
    policy = OpPolicy.default("cpu").override({"linear": Recipe.fp8_delayed(history=2)})
    model, x = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4))), torch.ones(2, 4)
    with delayed_scales(model) as scales, autocast("cpu", torch.bfloat16, policy=policy):
        model(x)
        before = scales.state_dict()
        model[0], model[1] = model[1], model[0]
        model[2].weight = nn.Parameter(torch.ones(4, 4))
        names = ["1.weight", "0.weight", "2.weight", "3.weight"]
        assert_same(scales.state_dict(), {name: before[old] for name, old in zip(before, names, strict=True)})
        model.pop(0)
        names = ["0.weight", "2.weight", "3.weight"]
        assert_same([*scales.state_dict().values()], [before[old] for old in names])


def test_loaded_histories_move_with_weights_that_wait_for_a_product() -> None:
    """A layer that is inserted after a load takes over the history of the one behind it."""
    policy = OpPolicy.default("cpu").override({"linear": Recipe.fp8_delayed(history=2)})
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.ones(2, 4)
    with delayed_scales(model) as scales, autocast("cpu", torch.bfloat16, policy=policy):
        model(x)
        before = scales.state_dict()
    with delayed_scales(model) as scales:
        scales.load_state_dict(before)
        model.insert(1, nn.Linear(4, 4))
        assert_same(scales.state_dict(), {"0.weight": before["0.weight"], "2.weight": before["1.weight"]})


def test_what_ranks_agreed_on_moves_with_its_weight(one_rank: None) -> None:
    """A layer that is inserted starts with what other ranks have seen of the one behind it."""
    policy = OpPolicy.default("cpu").override({"linear": Recipe.fp8_delayed(history=2)})
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with delayed_scales(model, process_group=torch.distributed.group.WORLD) as scales:
        scales.settle(torch.full((3,), 7.0), [optimizer])
        scales.step(optimizer)
        model.insert(0, nn.Linear(4, 4, bias=False))
        with autocast("cpu", torch.bfloat16, policy=policy):
            model(torch.ones(2, 4))
        states = scales.state_dict()
    assert [states[name]["input"]["seen"].tolist() for name in states] == [[0.0, 0.0], [0.0, 7.0]]


def test_saved_histories_have_the_names_of_the_model_now() -> None:
    """A checkpoint names the histories of layers that moved or left as they were before."""
    policy = OpPolicy.default("cpu").override({"linear": Recipe.fp8_delayed(history=2)})
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)), torch.ones(2, 4)
    with delayed_scales(model) as scales, autocast("cpu", torch.bfloat16, policy=policy):
        model(x)
        before = scales.state_dict()
        model[0], model[1] = model[1], model[0]
        model.pop(2)
        model.append(nn.Tanh())
        after = scales.state_dict()
        assert_same(after["0.weight"], before["1.weight"])
        assert_same(after["1.weight"], before["0.weight"])
        assert after.keys() == {"0.weight", "1.weight"}
        model.append(nn.Linear(4, 4))
        scales.load_state_dict({**after, "3.weight": before["2.weight"]})
        assert_same(scales.state_dict()["3.weight"], before["2.weight"])


def test_a_weight_at_the_address_of_another_has_its_own_history() -> None:
    """A weight that Python puts where one of the model was counts as that one, under its name."""
    policy = OpPolicy.default("cpu").override({"linear": Recipe.fp8_delayed(history=2)})
    model, x = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(50))), torch.ones(2, 4)
    with delayed_scales(model) as scales:
        earlier = {id(layer.weight) for layer in model[1:]}
        del model[1:]
        others = [nn.Parameter(torch.ones(4, 4)) for _ in range(1000)]
        model[0].weight = next((each for each in others if id(each) in earlier), others[0])
        with autocast("cpu", torch.bfloat16, policy=policy):
            model(x)
        assert scales.state_dict()["0.weight"]["weight"]["current"] == 1


def test_a_weight_that_other_ranks_have_used_for_long(one_rank: None) -> None:
    """Ranks that use it later look back on less: on a part of the steps of each optimizer, or on 1024."""
    policy = OpPolicy.default("cpu").override({"linear": Recipe.fp8_delayed(history=1200)})
    model, x = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(2))), torch.ones(2, 4)
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.0) for layer in model]
    with delayed_scales(model, process_group=torch.distributed.group.WORLD) as scales:
        with autocast("cpu", torch.bfloat16, policy=policy):
            model[0](x)
        for step in range(1100):
            scales.settle(torch.full((6,), 1.0 if step else 7.0), optimizers)
            for optimizer in optimizers:
                scales.step(optimizer)
        with autocast("cpu", torch.bfloat16, policy=policy):
            model(x)
        states = scales.state_dict()
    assert states["1.weight"]["input"]["seen"].tolist() == [0.0] * 100 + [7.0] + [1.0] * 1099
    assert_same(states["1.weight"]["input"]["seen"], states["0.weight"]["input"]["seen"])


@pytest.mark.parametrize("steps", [False, True])
def test_a_state_is_loaded_over_what_ranks_agreed_on(steps: bool, one_rank: None) -> None:
    """A weight that the state does not know gets a history of steps from before it, or of a skipped one."""
    policy = OpPolicy.default("cpu").override({"linear": Recipe.fp8_delayed(history=2)})
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with delayed_scales(model, process_group=torch.distributed.group.WORLD) as scales:
        scales.settle(torch.full((3,), 7.0), [optimizer])
        if steps:
            scales.step(optimizer)
        with pytest.warns(AmpWarning, match="is empty"):
            scales.load_state_dict({})
        scales.step(optimizer)
        with autocast("cpu", torch.bfloat16, policy=policy):
            model(torch.ones(2, 4))
        assert scales.state_dict()["0.weight"]["input"]["seen"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("units", ["whole", "layers"])
def test_weights_that_are_gathered_while_a_module_runs(units: str, one_rank: None) -> None:
    """Under FSDP2 no step ends that of the histories, and every scale is that of the current tensor."""
    policy = OpPolicy.default("cpu").override({"linear": Recipe.fp8_delayed(history=2)})

    def losses(shards: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
        if shards:
            mesh = init_device_mesh("cpu", (1,))
            for unit in (model[0], model[2], model) if units == "layers" else (model,):
                fully_shard(unit, mesh=mesh)
        optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
        with delayed_scales(model) as scales:
            for step in range(4):
                with autocast("cpu", torch.bfloat16, policy=policy):
                    loss = model(torch.randn(8, 16) * (1 + step)).float().square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.detach())
            seen = scales.state_dict()["0.weight"]["weight"]["seen"]
        assert seen.all()
        return found

    assert_same(losses(shards=True), losses(shards=False), rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:FSDP is")
def test_weights_that_fsdp1_hides(one_rank: None) -> None:
    """The error says to enter a scope that is entered already."""
    policy = OpPolicy.default("cpu").override({"linear": Recipe.fp8_delayed(history=2)})
    model = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"), use_orig_params=True)
    with (
        delayed_scales(model),
        autocast("cpu", torch.bfloat16, policy=policy),
        pytest.raises(PolicyError, match="FullyShardedDataParallel hides the parameters"),
    ):
        model(torch.ones(2, 4))
