"""The compiled CPU kernels in a process that was forked after its parent had used them."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from amp_backend_cpu import kernels as cpu

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system"),
    pytest.mark.skipif(not isinstance(cpu.load(), cpu.Compiled), reason="no compiled kernels"),
]
SETUP = """
import os, sys, torch
import amp_core
torch.set_num_threads(2)
kernels = amp_core.get_backend("cpu").kernels()
grads = [torch.ones(1_000_000), torch.ones(3, dtype=torch.bfloat16)]
expected = kernels.grad_stats(grads).norm.item()
"""
FORK = """
child = os.fork()
if child == 0:
    norm = kernels.grad_stats(grads).norm.item()
    kernels.multiply_(grads, torch.full((), 0.5), torch.zeros(()))
    kernels.cast(grads[:1], torch.bfloat16)
    os._exit(0 if norm == expected and grads[0][-1].item() == 0.5 else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
WORKER = """
class Norms(torch.utils.data.Dataset):
    def __len__(self):
        return 2
    def __getitem__(self, index):
        torch.set_num_threads(2)
        return kernels.grad_stats(grads).norm.item()

loader = torch.utils.data.DataLoader(Norms(), num_workers=1, batch_size=None, multiprocessing_context="fork")
assert list(loader) == [expected] * 2
"""


@pytest.mark.parametrize("use", [FORK, WORKER], ids=["os.fork", "DataLoader worker"])
def test_a_forked_child_does_not_hang(use: str) -> None:
    """A child waits for threads of OpenMP that exist in its parent alone."""
    program = textwrap.dedent(SETUP + use)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
