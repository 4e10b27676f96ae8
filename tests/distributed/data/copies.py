"""Copies of a scaler that several ranks share: a scene of `ranks.py`."""

from __future__ import annotations

import copy
import math
import pickle

import torch
import torch.distributed as dist
from torch import nn

import amp_core


def copies() -> None:
    """A copy decides with the other ranks; one that was pickled refuses to decide alone."""
    param, group = nn.Parameter(torch.ones(3)), dist.group.WORLD
    optimizer = torch.optim.SGD([param], lr=1.0)
    scaler = amp_core.GradScaler("cpu", 8.0, process_group=group)
    unpickled = pickle.loads(pickle.dumps(scaler))
    for twin in (copy.deepcopy(scaler), copy.copy(scaler), copy.deepcopy([scaler, optimizer])[0]):
        backward(twin, param)
        twin.step(optimizer)
        twin.update()
        assert (twin.last_step[optimizer].skipped, twin.get_scale()) == (True, 4.0)
    for twin in (unpickled, copy.deepcopy(unpickled), pickle.loads(pickle.dumps(unpickled))):
        backward(twin, param)
        before = param.grad.clone()
        for call in (twin.unscale_, twin.step, lambda each, twin=twin: twin.clip_grad_norm_(each, 1.0)):
            try:
                call(optimizer)
            except ValueError as error:
                assert "load its state_dict" in str(error), error
            else:
                raise AssertionError("a rank decides alone")
        assert torch.equal(param.grad, before)
    assert torch.equal(param, torch.ones(3))


def backward(scaler: amp_core.GradScaler, param: nn.Parameter) -> None:
    """Leave gradients with an inf on the last rank."""
    param.grad = None
    factor = math.inf if dist.get_rank() == dist.get_world_size() - 1 else 1.0
    scaler.scale((param * factor).sum()).backward()
