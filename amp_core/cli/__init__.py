"""The ``amp`` command: one module per subcommand, imported on use.

A subcommand module has ``add_arguments(parser)`` and ``run(args) -> int`` (the exit code). For user
errors it raises `UsageError`, which becomes one line on stderr and exit code 2.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Collection, Sequence
from typing import NamedTuple, NoReturn

from amp_core.common.environment import SettingError
from amp_core.errors import PolicyError


class Command(NamedTuple):
    """A subcommand's module and its line in ``amp --help``."""

    module: str
    help: str


COMMANDS = {
    "backends": Command(
        "amp_core.cli.backends", "list every device backend: status, reason, dtypes, kernels, origin"
    ),
    "check": Command(
        "amp_core.cli.check", "run the conformance kit on an installed backend; exit code 1 if a check fails"
    ),
    "completion": Command("amp_core.cli.completion", "print a completion script for your shell"),
    "demo": Command(
        "amp_core.cli.demo", "train handwritten digits in float32 and in mixed precision, and compare"
    ),
    "env": Command("amp_core.cli.env", "print versions, devices and settings, for a bug report"),
    "migrate": Command(
        "amp_compat.migrate.cli",
        "rewrite deprecated mixed-precision calls (torch.cuda.amp, torch.cpu.amp, apex.amp)",
    ),
    "new-backend": Command(
        "amp_core.cli.new_backend",
        "write the skeleton of a device backend: package, entry point, conformance tests",
    ),
    "policy": Command("amp_core.cli.policy", "show which op runs in which dtype on a device, and why"),
}


class UsageError(Exception):
    """An error that the user can correct; the text is the whole message."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``amp`` with `argv` (default: the process's own) and return its exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # not every terminal has every letter of a plugin's reason
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = _run(list(sys.argv[1:] if argv is None else argv))
        print(end="", flush=True)
    except BrokenPipeError:  # the reader has seen enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def _run(words: list[str]) -> int:
    # Most subcommands import torch, which takes seconds: only the one in use is imported.
    parser = build_parser({word for word in words if not word.startswith("-")})
    args = parser.parse_args(words)
    if args.command is None:
        parser.print_help()
        return 0
    try:
        code: int = args.run(args)
    except (UsageError, SettingError, PolicyError) as error:
        print(f"amp {args.command}: {error}", file=sys.stderr)
        return 2
    return code


def build_parser(commands: Collection[str] = COMMANDS) -> argparse.ArgumentParser:
    """Build the parser of ``amp``, with only the options of `commands` (default: all)."""
    parser = argparse.ArgumentParser(
        prog="amp",
        description="Mixed precision for every PyTorch device: see what runs where, and what goes wrong.",
        epilog="amp COMMAND --help shows the options of a command.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the versions and exit")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, command in COMMANDS.items():
        sub = subparsers.add_parser(name, help=command.help, description=command.help)
        if name in commands:
            module = importlib.import_module(command.module)
            module.add_arguments(sub)
            sub.set_defaults(run=module.run)
    return parser


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from importlib.metadata import version

        print(f"amp-core {version('amp-core')}, torch {version('torch')}, pluggy {version('pluggy')}")
        parser.exit()
