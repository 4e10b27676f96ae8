"""``amp completion SHELL``: print the completion script of a shell."""

from __future__ import annotations

import argparse

from amp_core.cli import UsageError, build_parser

SHELLS = ("bash", "zsh", "tcsh")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``amp completion``."""
    parser.add_argument("shell", choices=SHELLS, help="the shell to complete in")


def run(args: argparse.Namespace) -> int:
    """Print the script, which the shell's start-up file evaluates or sources."""
    try:
        import shtab
    except ImportError:
        raise UsageError("needs shtab; install it with: pip install 'amp-core[cli]'") from None
    print(shtab.complete(build_parser(), shell=args.shell))
    return 0
