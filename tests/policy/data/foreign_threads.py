"""Policies come and go in one thread; others use only torch.autocast. For test_installed_kernels.py."""

from __future__ import annotations

import sys
import threading
import time

import torch

import amp_core

sys.setswitchinterval(1e-5)
torch.set_num_threads(1)
END = time.monotonic() + 4
model = torch.nn.Linear(4, 4)
x = torch.ones(4, 4)
wrong: list[torch.dtype] = []


def only_torch() -> None:
    while time.monotonic() < END:
        with torch.autocast("cpu"):
            for _ in range(50):
                low = x @ x
                if low.dtype is not torch.bfloat16:
                    wrong.append(low.dtype)


threads = [threading.Thread(target=only_torch) for _ in range(3)]
for thread in threads:
    thread.start()
policy = amp_core.OpPolicy.default("cpu").override({"mm": "fp32", "matmul": "fp32"})
while time.monotonic() < END:
    for _ in range(100):
        with amp_core.autocast("cpu", policy=policy):
            pass
    with amp_core.cached_casts(model), amp_core.autocast("cpu"):
        model(x)
for thread in threads:
    thread.join()
assert not wrong, wrong
