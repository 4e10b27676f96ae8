"""``amp check DEVICE``: run the conformance kit on an installed backend."""

from __future__ import annotations

import argparse
import faulthandler
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from amp_core.cli import UsageError
from amp_core.cli.tables import print_table

if TYPE_CHECKING:
    from amp_core.testing.report import Report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``amp check``."""
    parser.add_argument("device", metavar="DEVICE", help="a device type with a backend, such as cpu, or auto")
    parser.add_argument("--area", action="append", default=[], help="run only this area; may be repeated")
    parser.add_argument(
        "-k", dest="keyword", default="", help="a pytest expression that selects checks by name"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON instead of a table")
    parser.add_argument("--junit", metavar="FILE", help="write a JUnit XML file, with tracebacks")
    parser.add_argument("--markdown", metavar="FILE", help="write a report for publication, with versions")
    parser.add_argument(
        "--fixtures", metavar="MODULE:CLASS", help="the BackendFixtures that describe the device"
    )
    parser.add_argument("--badge", metavar="FILE", help="write an SVG badge with the verdict")
    parser.add_argument(
        "--thorough", action="store_true", help="check every combination instead of a sample; takes minutes"
    )


def run(args: argparse.Namespace) -> int:
    """Run the kit; return 0 if no check failed and some passed, else 1."""
    try:
        with _watched() as start:
            report = _check(args, start)
    finally:
        _show_progress("")
    if args.markdown:
        _write(args.markdown, report.to_markdown())
    if args.badge:
        _write(args.badge, report.to_svg())
    if args.json:
        print(report.to_json())
    else:
        _show(report, args.keyword)
    return 0 if report.ok else 1


def _check(args: argparse.Namespace, start: Callable[[str], None]) -> Report:
    try:
        import pytest  # noqa: F401  # check before anything runs
    except ImportError as error:
        raise UsageError("the kit needs pytest: pip install 'amp-core[testing]'") from error
    from amp_core.common.arguments import device_type_of
    from amp_core.errors import BackendError
    from amp_core.plugin import get_backend
    from amp_core.testing.report import require_writable
    from amp_core.testing.runner import load_fixtures, require_present

    try:
        from amp_core.testing import check

        require_writable(path for path in (args.markdown, args.badge, args.junit) if path is not None)
        device = device_type_of("auto") if args.device == "auto" else args.device
        require_present(get_backend(device))
        return check(
            device,
            areas=args.area,
            keyword=args.keyword,
            fixtures=load_fixtures(args.fixtures),
            junit=args.junit,
            thorough=args.thorough,
            progress=start,
        )
    except (BackendError, ImportError, ValueError) as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        if args.junit is None:
            raise
        raise _unwritable(args.junit, error) from error


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: str, error: OSError) -> UsageError:
    """Return the error of a report that could be opened before the run: the disk is full now."""
    return UsageError(f"{path} cannot be written: {error.strerror}.")


_LONG = 600
_STDERR = 2
"""As a number: the stream may be an object without one, or missing."""


@contextmanager
def _watched() -> Iterator[Callable[[str], None]]:
    """Show the stack, which names the check, if the process crashes, or a check takes long because it hangs.

    Yields:
        What is to be called before each check, with its name.
    """
    if faulthandler.is_enabled():  # by the program that calls `main`
        yield _show_progress
        return
    faulthandler.enable(_STDERR)
    try:
        yield _start
    finally:
        faulthandler.cancel_dump_traceback_later()
        faulthandler.disable()


def _start(text: str) -> None:
    _show_progress(text)
    faulthandler.dump_traceback_later(_LONG, file=_STDERR)


def _show_progress(text: str) -> None:
    """Write over the line of the check before, in a terminal."""
    if sys.stderr is not None and sys.stderr.isatty():  # a program without a console has none
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def _show(report: Report, keyword: str) -> None:
    outcomes = ("passed", "failed", "known", "skipped")
    rows = [(area, *(str(counts[o]) for o in outcomes)) for area, counts in report.by_area().items()]
    title = f"{report.device_type}: {report.backend} ({report.availability})"
    print_table(title, ("area", *outcomes), rows)
    for result in report.results:
        if result.outcome != "passed":
            print(f"{result.outcome} {result.check}: {result.message}")
    print(_verdict(report, keyword))


def _verdict(report: Report, keyword: str) -> str:
    if report.ok:
        return report.summary()
    if not report.results:
        return f"does not pass: no check ran; -k {keyword!r} matches none of the chosen areas' checks"
    if not report.failed:
        return "does not pass: no check passed"
    return f"does not pass: {len(report.failed)} of {len(report.results)} checks failed"
