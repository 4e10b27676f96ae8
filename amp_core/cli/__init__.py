"""The ``amp`` command: one module per subcommand, imported on use.

A subcommand module has ``add_arguments(parser)`` and ``run(args) -> int`` (the exit code). For user
errors it raises `UsageError`, which becomes one line on stderr and exit code 2.
"""

from __future__ import annotations

import argparse
import importlib
import io
import signal
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from amp_core.common.environment import SettingError
from amp_core.errors import PolicyError

if TYPE_CHECKING:
    from typing_extensions import Buffer


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


def count(text: str) -> int:
    """Return a number of the command line that must be positive."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``amp`` with `argv` (default: the process's own) and return its exit code."""
    with _output() as stream, redirect_stdout(stream) as output:
        try:
            return _flushed(list(sys.argv[1:] if argv is None else argv), output)
        except UsageError as error:
            print(f"amp: {error}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print("amp: interrupted", file=sys.stderr)
            return 128 + signal.SIGINT


class _Output(io.FileIO):
    """Standard output. Once its reader has seen enough, as `head` does, the rest goes nowhere."""

    _is_lost = False

    def write(self, data: Buffer) -> int:
        if not self._is_lost:
            try:
                return super().write(data)
            except BrokenPipeError:
                self._is_lost = True
            except OSError as error:
                self._is_lost = True  # or what is left of the text would raise again at the end
                raise UsageError(f"standard output cannot be written: {error.strerror}.") from error
        return memoryview(data).nbytes


@contextmanager
def _output() -> Iterator[Any]:
    """Provide the stream to print to, which shows as escapes the letters that it lacks."""
    stream = sys.stdout
    if not isinstance(stream, io.TextIOWrapper):
        yield stream
        return
    before = stream.errors
    stream.reconfigure(errors="backslashreplace")  # not every terminal has every letter of a plugin's reason
    try:
        yield stream if stream.isatty() or not _has_file(stream) else _forgiving(stream)
    finally:
        stream.reconfigure(errors=before)  # the program that calls `main` goes on to use it


def _has_file(stream: io.TextIOWrapper) -> bool:
    try:
        stream.fileno()
    except OSError:  # in memory
        return False
    return True


def _forgiving(stream: io.TextIOWrapper) -> io.TextIOWrapper:
    """Return a stream to the file of `stream`, which must not keep what the reader does not want."""
    stream.flush()
    raw = _Output(stream.fileno(), "w", closefd=False)
    return io.TextIOWrapper(
        raw if stream.write_through else io.BufferedWriter(raw),  # as `python -u` does
        stream.encoding,
        stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def _flushed(words: list[str], output: Any) -> int:
    try:
        return _run(words)
    finally:
        if output is not None:  # a program without a console has none
            output.flush()  # not at exit, where an error would be a traceback


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
