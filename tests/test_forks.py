"""Children that a process forks while its other threads work with amp-core, as DataLoader workers are."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")

PROGRAM = """
import contextlib, os, signal, sys, threading, time
import torch
import amp_compat, amp_core
from amp_compat import _deprecated, _install
from amp_core import GradScaler, OpPolicy, autocast, cached_casts, master_weights
from amp_core.common import locks

torch.set_num_threads(1)
torch.manual_seed(0)
RULES = OpPolicy.default("cpu").override({"softmax": "lower_precision_fp", "mm": amp_core.Recipe.mxfp8()})
model = torch.nn.Sequential(torch.nn.Linear(1200, 1200), torch.nn.Softmax(-1), torch.nn.Linear(1200, 8))
x = torch.randn(4, 1200)


def infer():
    with torch.no_grad(), autocast("cpu", dtype=torch.bfloat16):
        return model(x)


def train(policy=None):
    own = torch.nn.Linear(8, 8, bias=False)
    scaler, optimizer = GradScaler("cpu", init_scale=64.0), torch.optim.SGD(own.parameters(), lr=0.1)
    with master_weights(own), autocast("cpu", policy=policy):
        loss = own(infer().float()).softmax(-1).square().sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer, max_norm=1.0)
    scaler.update()


def child(program):
    pid = os.fork()
    if not pid:
        with contextlib.suppress(BaseException):
            program()
            os._exit(0)
        os._exit(1)
    end = time.monotonic() + 20
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    print("a child hangs", flush=True)
    os._exit(1)


model.requires_grad_(False)
expected = infer()
casts = cached_casts(model, persistent=True)


def hold():
    with contextlib.ExitStack() as held:
        assert len(locks._locks) > 10
        for lock in [*locks._locks, _deprecated._lock, _install._lock]:
            held.enter_context(lock)
        ready.set()
        done.wait()


def everything():
    for policy in (None, RULES):
        train(policy)
    casts.invalidate()
    assert torch.equal(infer(), expected)
    with amp_core.record():
        infer()
    casts.remove()
    amp_core.backends()
    amp_compat.install()
    torch.cuda.amp.autocast(enabled=False)
    amp_compat.uninstall()


train()
ready, done = threading.Event(), threading.Event()
threading.Thread(target=hold).start()
ready.wait()
print("a thread held every lock:", child(everything))
done.set()

lock = locks.new_lock()
with lock:
    print("the thread held its own:", child(lock.release))

sys.stdout.flush()
os._exit(0)
"""


def test_a_forked_child_waits_for_no_thread_of_its_parent() -> None:
    """A lock that another thread of the parent held stays locked, and a DataLoader worker hangs at a cast."""
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    environment = {**os.environ, "AMP_DEPRECATION": "once"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    lines = done.stdout.splitlines()
    assert len(lines) == 2, done.stderr
    assert {line.rpartition(" ")[2] for line in lines} == {"0"}, done.stdout
