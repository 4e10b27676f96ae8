"""Bfloat16 weights of FSDP1: a checkpoint of all ranks goes on in FSDP1 and in one process."""

import copy
import itertools
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, OptimStateKeyType

import amp_core

dist.init_process_group("gloo")


def stored(storage, original, *, sharded):
    """Return a model, its optimizer and its stored weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 5)).bfloat16()
    if sharded:
        model = FullyShardedDataParallel(model, use_orig_params=original, device_id=torch.device("cpu"))
    # On the CPU, torch mixes up several states of one parameter under use_orig_params=True (2.13).
    kind = torch.optim.SGD if original else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=0.01)
    return model, optimizer, amp_core.master_weights(model, optimizer, storage)


def train(model, optimizer, steps):
    for number in steps:
        optimizer.zero_grad()
        model(torch.full((4, 6), 0.5 + number).bfloat16()).float().square().mean().backward()
        optimizer.step()


def assert_same(ours, theirs):
    """Assert that two handles have the same float32 weights."""
    ours, theirs = ours.float32_weights(), theirs.float32_weights()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(weight, theirs[name]) for name, weight in ours.items())


for storage, original in itertools.product(("remainder", "kahan"), (True, False)):
    model, optimizer, masters = stored(storage, original, sharded=True)
    train(model, optimizer, range(3))
    weights = copy.deepcopy(model.state_dict())
    states = FullyShardedDataParallel.optim_state_dict(model, optimizer)
    train(model, optimizer, range(3, 6))

    again, its_optimizer, its_masters = stored(storage, original, sharded=True)
    again.load_state_dict(weights)
    its_states = FullyShardedDataParallel.optim_state_dict_to_load(again, its_optimizer, states)
    its_optimizer.load_state_dict(its_states)
    train(again, its_optimizer, range(3, 6))
    assert_same(its_masters, masters)

    alone, optimizer, masters = stored(storage, original, sharded=False)
    alone.load_state_dict(weights)
    numbered = FullyShardedDataParallel.rekey_optim_state_dict(states, OptimStateKeyType.PARAM_ID, alone)
    for state in numbered["state"].values():  # torch lets the parameters share the count of their steps
        state.update(copy.deepcopy(state))
    optimizer.load_state_dict(numbered)
    train(alone, optimizer, range(3, 6))
    at_once, its_optimizer, its_masters = stored(storage, original, sharded=False)
    train(at_once, its_optimizer, range(6))
    assert_same(masters, its_masters)

print("same", flush=True)
dist.barrier()
os._exit(0)  # gloo's threads let go of tensors while the interpreter ends, and abort it (pytorch#190489)
