"""torch's cache of casts, whose lock and the interpreter's must not wait for each other."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from amp_core import autocast, cached_casts, record
from amp_core._torch import cast_cache
from amp_core.dispatch.weight_casts import replace_weights

THREADS_UNDER_A_MODE = """
import faulthandler, sys, threading
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from amp_core import autocast, cached_casts, record
import torch._dynamo  # a mode of torch imports it, and with other threads that would take long

faulthandler.dump_traceback_later(60, exit=True)  # a hang holds the interpreter's lock


class Looking(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def work():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(10)))
    with Looking():
        for _ in range(4):
            with autocast("cpu"):
                model(torch.ones(2, 4))


sys.setswitchinterval(1e-4)
with cached_casts(nn.Linear(4, 4)), record():
    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        thread.join()
"""


THREADS_THAT_LEAVE_TORCHS_REGIONS = """
import faulthandler, sys, threading
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from amp_core import autocast, cached_casts

import torch._dynamo  # a mode of torch imports it, and with other threads that would take long

faulthandler.dump_traceback_later(60, exit=True)  # a hang holds the interpreter's lock
weight, x, over = nn.Parameter(torch.ones(4, 4)), torch.ones(2, 4), threading.Event()


def watched():
    for _ in range(30):
        with FlopCounterMode(display=False), autocast("cpu"):
            assert (x @ weight).dtype is torch.bfloat16
    over.set()


def plain():
    while not over.is_set():
        with torch.autocast("cpu"):
            assert (x @ weight).dtype is torch.bfloat16


sys.setswitchinterval(1e-4)
with cached_casts(nn.Linear(4, 4)):
    threads = [threading.Thread(target=each) for each in (plain, plain, watched)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""

THREADS_OF_WHICH_ONE_USES_AN_OP_WITHOUT_A_KERNEL = """
import faulthandler, sys, threading
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from amp_core import OpPolicy, autocast
import torch._dynamo  # as above

faulthandler.dump_traceback_later(60, exit=True)  # a hang holds the interpreter's lock
weight, x, over = nn.Parameter(torch.ones(4, 4)), torch.ones(2, 4), threading.Event()
calls = {
    "linear": lambda: nn.functional.linear(x, weight),
    "einsum": lambda: torch.einsum("ij,jk->ik", [x, weight]),  # has its weights in a list
}


class Looking(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def watched():
    for _ in range(300):
        with Looking(), torch.autocast("cpu"):
            assert (x @ weight).dtype is torch.bfloat16
    over.set()


def plain(call):
    while not over.is_set():
        with torch.autocast("cpu"):
            assert call().dtype is torch.bfloat16


with autocast("cpu", policy=OpPolicy.default("cpu").override(dict.fromkeys(calls, "fp32"))):
    assert {call().dtype for call in calls.values()} == {torch.float32}  # they have kernels from now on
sys.setswitchinterval(1e-4)
threads = [threading.Thread(target=watched)]
threads += [threading.Thread(target=plain, args=(call,)) for call in calls.values()]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_regions_end_with_torchs_function() -> None:
    """The end of each region pays for casts that amp-core keeps, though it keeps none."""
    code = (
        "import torch\ntorchs, weight = torch.clear_autocast_cache, torch.ones(2, 2, requires_grad=True)\n"
        "import amp_core\nfrom amp_core._torch import cast_cache\n"
        "with amp_core.autocast('cpu'): weight @ weight\n"
        "assert cast_cache.clear is torch.clear_autocast_cache is torchs\n"
        "with amp_core.record(), amp_core.autocast('cpu'): weight @ weight\n"
        "assert cast_cache.clear is torch.clear_autocast_cache is not torchs\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_threads_under_a_mode() -> None:
    """Two threads wait for torch's cache of casts and for the interpreter, each for what the other has."""
    subprocess.run([sys.executable, "-c", THREADS_UNDER_A_MODE], check=True, timeout=120)


def test_threads_that_leave_torchs_regions() -> None:
    """A region of torch's that frees casts, and a thread that wants one, wait for each other."""
    subprocess.run([sys.executable, "-c", THREADS_THAT_LEAVE_TORCHS_REGIONS], check=True, timeout=120)


def test_threads_of_which_one_uses_an_op_without_a_kernel() -> None:
    """An op without a kernel of ours waits for the interpreter in a cast, one with a kernel for the cast."""
    code = THREADS_OF_WHICH_ONE_USES_AN_OP_WITHOUT_A_KERNEL
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("first_grad", [True, False])
@pytest.mark.parametrize("cache_enabled", [True, False])
def test_recorded_regions_keep_casts_as_torch_does(first_grad: bool, cache_enabled: bool) -> None:
    """A recording gives other numbers: a second use of a weight casts it anew, or gets a detached cast."""

    def results() -> list[torch.Tensor]:
        torch.manual_seed(0)
        weight, x = nn.Parameter(torch.randn(8, 8)), torch.randn(4, 8)
        with autocast("cpu", cache_enabled=cache_enabled):
            with torch.set_grad_enabled(first_grad):
                first = nn.functional.linear(x, weight)
            with torch.no_grad():
                weight.mul_(1.5)
            last = torch.einsum("ij,jk->ik", [x, weight]) + x @ weight
        last.float().square().sum().backward()
        assert weight.grad is not None
        return [first.detach(), last.detach(), weight.grad]

    plain = results()
    with record():
        recorded = results()
    assert all(map(torch.equal, plain, recorded))


def test_weights_in_lists() -> None:
    """The kernels of `chain_matmul` and `lstm_cell` on CUDA lock its cache for weights in a list."""
    weight, x = nn.Parameter(torch.ones(2, 2)), torch.ones(2, 2)
    with autocast("cpu"):
        (first, other), second, sizes = replace_weights(([weight, x], weight, [1, 1]), "cpu")
    assert first is second
    assert first.dtype is torch.bfloat16
    assert other is x
    assert sizes == [1, 1]


def test_torchs_function_stays_in_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled code that clears the cache breaks at a callback, once a scope has been used."""

    def clear(a: torch.Tensor) -> torch.Tensor:
        torch.clear_autocast_cache()
        return a + 1

    def in_one_graph() -> torch.Tensor:
        torch._dynamo.reset()
        return torch.compile(clear, backend="eager", fullgraph=True)(torch.ones(2))  # type: ignore[no-any-return]

    with cached_casts(nn.Linear(2, 2)), autocast("cpu"):
        nn.functional.linear(torch.ones(2, 2), torch.ones(2, 2))
    with monkeypatch.context() as patched:
        patched.setattr(torch, "clear_autocast_cache", cast_cache._torchs_clear)
        try:
            in_one_graph()
        except torch._dynamo.exc.TorchDynamoException:
            pytest.skip("Dynamo of this torch cannot trace torch.clear_autocast_cache, amp-core or not")
    assert in_one_graph().sum() == 4
