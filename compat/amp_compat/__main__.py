"""``python -m amp_compat script.py ...``: run a program with amp-core in place of torch.amp."""

from __future__ import annotations

import argparse
import os
import sys

from amp_compat._install import install
from amp_compat._program import ProgramNotFoundError, run_program
from amp_compat._spawned import Arguments


def main() -> None:
    """Install, then run the program as Python would."""
    parser = argparse.ArgumentParser(prog="python -m amp_compat", description=__doc__)
    parser.add_argument(
        "--deprecated-only",
        action="store_true",
        help="replace torch.cuda.amp and torch.cpu.amp, not torch.amp",
    )
    parser.add_argument("-m", dest="module", action="store_true", help="PROGRAM is a module, not a file")
    parser.add_argument("program", metavar="PROGRAM", help="the file to run, and its arguments")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="...", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.module and not os.path.exists(options.program):
        parser.error(f"there is no file {options.program!r}; to run a module by its name, write -m before it")
    sys.stderr.write(install(deprecated_only=options.deprecated_only) + "\n")
    sys.argv = Arguments([options.program, *options.args], options.deprecated_only)
    try:
        run_program(options.program, module=options.module)
    except ProgramNotFoundError as error:
        parser.error(str(error))


main()
