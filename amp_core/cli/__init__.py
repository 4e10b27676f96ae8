"""The ``amp`` command. One module per subcommand, imported only when it is asked for.

A subcommand module has ``HELP`` (one line), ``add_arguments(parser)`` and ``run(args) -> int`` (the
exit code). It raises `UsageError` for what a user can mend; that becomes one line and exit code 2.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import NoReturn

# name -> module; a string, because some are not amp_core's own.
COMMANDS = {
    "backends": "amp_core.cli.backends",
    "check": "amp_core.cli.check",
    "demo": "amp_core.cli.demo",
    "migrate": "amp_compat.migrate.cli",
    "new-backend": "amp_core.cli.new_backend",
    "policy": "amp_core.cli.policy",
}


class UsageError(Exception):
    """Something that the user can mend; the text is the whole message."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``amp`` with `argv` (default: the process's own) and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    command = next((w for w in words if not w.startswith("-")), None)
    parser = _parser(command)
    args = parser.parse_args(words)
    if args.command is None:
        parser.print_help()
        return 0
    try:
        code: int = args.run(args)
    except UsageError as error:
        print(f"amp {args.command}: {error}", file=sys.stderr)
        return 2
    return code


def _parser(command: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="amp", description=__doc__.splitlines()[0])
    parser.add_argument("--version", action=_Version, nargs=0, help="print the versions and exit")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, path in COMMANDS.items():
        # Importing a module costs seconds where it needs torch: only the one in use gets its options.
        module = importlib.import_module(path) if name == command else None
        sub = subparsers.add_parser(name, help=_HELP[name], description=_HELP[name])
        if module is not None:
            module.add_arguments(sub)
            sub.set_defaults(run=module.run)
    return parser


_HELP = {
    "backends": "list every device backend: status, reason, dtypes, kernels, origin",
    "check": "run the conformance kit on an installed backend; exit code 1 if a check fails",
    "demo": "train handwritten digits in float32 and in mixed precision, and compare",
    "migrate": "rewrite deprecated mixed-precision calls (torch.cuda.amp, torch.cpu.amp, apex.amp)",
    "new-backend": "write the skeleton of a device backend: package, entry point, conformance tests",
    "policy": "show which op runs in which dtype on a device, and why",
}


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from importlib.metadata import version

        print(f"amp-core {version('amp-core')}, torch {version('torch')}, pluggy {version('pluggy')}")
        parser.exit()
