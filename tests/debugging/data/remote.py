"""Record a model, a part of which is in another process (here the same one)."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from torch import nn
from torch.distributed import rpc
from torch.distributed.nn.api.remote_module import RemoteModule

import amp_core
from amp_core import autocast


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(8, 8), nn.Linear(8, 2)
        self.remote = RemoteModule("worker/cpu", nn.Linear, (8, 8))

    def forward(self, x: Any) -> Any:
        return self.head(self.remote(self.first(x).float()))


options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{sys.argv[1]}")
rpc.init_rpc("worker", rank=0, world_size=1, rpc_backend_options=options)
net = Net()
for model in (None, net):
    try:
        with amp_core.record(model), autocast("cpu"):
            net(torch.ones(4, 8))
    except amp_core.AmpError as error:
        assert "A part of it is in another process" in str(error)
    else:
        raise AssertionError("the modules have no names")
assert not torch.nn.modules.module._global_forward_pre_hooks
with amp_core.record() as recording, autocast("cpu"):
    net.first(torch.ones(4, 8))
assert recording.ops
assert net(torch.ones(4, 8)).shape == (4, 2)
os._exit(0)
