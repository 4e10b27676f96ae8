"""``python -m amp_compat script.py ...``: run a program with the deprecated names served by amp_compat."""

from __future__ import annotations

import argparse
import os
import runpy
import sys

from amp_compat._install import install


def main() -> None:
    """Install, then run the program as if Python had been given it."""
    parser = argparse.ArgumentParser(prog="python -m amp_compat", description=__doc__)
    parser.add_argument("--torch-amp", action="store_true", help="let torch.amp resolve to amp_core too")
    parser.add_argument("-m", dest="module", action="store_true", help="PROGRAM is a module, not a file")
    parser.add_argument("program", metavar="PROGRAM")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="...")
    options = parser.parse_args()
    install(torch_amp=options.torch_amp)
    sys.argv = [options.program, *options.args]
    if options.module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(options.program, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(options.program))
        runpy.run_path(options.program, run_name="__main__")


main()
