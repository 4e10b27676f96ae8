"""Run scripts on several ranks each: ``python forked.py MODULES "4 script.py --option" "2 other.py"``.

It imports torch and MODULES (separated by commas) once and forks the ranks, so starting four of them costs no
more than one. After each script it prints a line with the exit codes of its ranks.
"""

from __future__ import annotations

import importlib
import os
import runpy
import shlex
import socket
import sys
import traceback

import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.parallel

import amp_core

END = "exit codes of the ranks:"


def run(count: int, script: str, options: list[str]) -> list[int]:
    """Run `script` on `count` ranks; return their exit codes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank in range(count):
        ranks.append(os.fork())
        if not ranks[-1]:
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_PORT": port}
            os.environ.update({key: str(value) for key, value in place.items()}, MASTER_ADDR="127.0.0.1")
            sys.argv, code = [script, *options], 0
            sys.path[0] = os.path.dirname(script)  # as Python has it
            try:
                runpy.run_path(script, run_name="__main__")
            except BaseException:
                traceback.print_exc()
                code = 1
            sys.stdout.flush()
            os._exit(code)  # gloo's threads may abort an interpreter that ends (pytorch#190489)
    return [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]


if __name__ == "__main__":
    amp_core.get_backend("cpu").kernels()
    torch.set_num_threads(1)
    for module in filter(None, sys.argv[1].split(",")):
        importlib.import_module(module)
    for job in sys.argv[2:]:
        count, script, *options = shlex.split(job)
        codes = run(int(count), script, options)
        sys.stdout.write(f"{END} {' '.join(map(str, codes))}\n")
        sys.stdout.flush()
    os._exit(0)  # what was imported may leave threads, which no rank needs any more
