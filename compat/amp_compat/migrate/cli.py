"""The ``amp migrate`` command."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from amp_compat.migrate.files import Discovered, discover, is_candidate, module_stem, names_taken, words_for
from amp_compat.migrate.model import FileReport
from amp_core.cli import UsageError, count
from amp_core.common.text import counted

_INLINE = 8  # starting processes costs more than migrating this many files


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``amp migrate``."""
    add = parser.add_argument
    add("paths", nargs="+", metavar="PATH", help="files, notebooks or folders")
    add(
        "--to",
        choices=("torch.amp", "amp_core"),
        default="torch.amp",
        help="what to migrate to (default: torch.amp)",
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--write", action="store_true", help="write the changes; by default no file is changed")
    mode.add_argument("--check", action="store_true", help="exit with status 1 if a file would change")
    add("--diff", action="store_true", help="print the changes as a unified diff")
    add("--json", action="store_true", help="print the report as JSON")
    add(
        "--untracked",
        action="store_true",
        help="in a git work tree, also migrate files that git does not track",
    )
    add("--jobs", type=count, metavar="N", help="worker processes (default: one per core)")


def run(args: argparse.Namespace) -> int:
    """Migrate and report; return 1 if a file failed or ``--check`` has pending changes, else 0."""
    _require_libcst()
    discovered = discover(args.paths, untracked=args.untracked)
    if discovered.missing:
        raise UsageError(f"no such file or folder: {', '.join(discovered.missing)}")
    reports = _migrate_all(discovered.files, args)
    reports += [FileReport(str(error.filename), error=error.strerror) for error in discovered.unreadable]
    if args.json:
        print(json.dumps(_as_json(discovered, reports, args), indent=2))
    else:
        _print_report(discovered, reports, args)
    pending = args.check and any(report.changed for report in reports)
    return 1 if pending or any(report.error for report in reports) else 0


def _require_libcst() -> None:
    try:
        import libcst  # noqa: F401
    except ImportError as error:
        raise UsageError("needs libcst; install it with: pip install 'amp-core[migrate]'") from error


def _migrate_all(files: list[Path], args: argparse.Namespace) -> list[FileReport]:
    from amp_compat.migrate.worker import Job, migrate_file

    candidates, exported, failed = _candidates(files)
    jobs = [
        Job(path, args.to, frozenset(exported[module_stem(path)]), args.write, args.diff)
        for path in candidates
    ]
    done: list[FileReport] = []
    with _progress(len(jobs)) as advance, _mapper(len(jobs), args.jobs) as mapper:
        for report in mapper(migrate_file, jobs):
            done.append(report)
            advance()
    return sorted([*done, *failed], key=lambda report: report.path)


def _candidates(files: list[Path]) -> tuple[list[Path], dict[str, set[str]], list[FileReport]]:
    """Return the files to parse, the names files import from each other, and the unreadable files."""
    from amp_compat.migrate.prune import names_bound_to

    candidates: list[Path] = []
    names: set[str] = set()
    failed: list[FileReport] = []
    for path in files:
        try:
            data = path.read_bytes()
        except OSError as error:
            failed.append(FileReport(str(path), error=error.strerror or str(error)))
            continue
        if is_candidate(data):
            candidates.append(path)
            names.update(names_bound_to(data.decode("utf-8", "replace")))
    exported: dict[str, set[str]] = defaultdict(set)
    words = words_for(names)
    unreadable = {report.path for report in failed}
    for path in files if candidates else []:
        if str(path) not in unreadable:
            for module, name in names_taken(path, path.read_bytes(), words):
                exported[module].add(name)
    return candidates, exported, failed


@contextmanager
def _mapper(files: int, jobs: int | None) -> Iterator[Callable[..., Any]]:
    """Map over the files, using several processes if there are enough files."""
    workers = min(jobs or os.cpu_count() or 1, files)
    if workers < 2 or files < _INLINE:
        yield map
        return
    # spawn: torch has started threads in the parent, so a forked child can hang.
    context = multiprocessing.get_context("spawn")
    ignored = signal.SIGINT, signal.SIG_IGN  # Ctrl-C reaches every process; one message is enough
    with ProcessPoolExecutor(workers, context, signal.signal, ignored) as pool:
        yield lambda function, items: pool.map(function, items, chunksize=4)


@contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    """Show a progress bar on a terminal, if rich is installed."""
    try:
        from rich.console import Console
        from rich.progress import MofNCompleteColumn, Progress
    except ImportError:
        yield lambda: None
        return
    console = Console(stderr=True)
    columns = (*Progress.get_default_columns(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("migrating", total=total)
        yield lambda: progress.advance(task)


def _summary(discovered: Discovered, reports: list[FileReport]) -> dict[str, int]:
    levels = Counter(
        finding.level
        for report in reports
        for finding in report.findings
        if finding.level == "manual" or not report.error  # else nothing was rewritten
    )
    return {
        "files": len(discovered.files),
        "files_changed": sum(report.changed and not report.error for report in reports),
        "files_written": sum(report.written for report in reports),
        "files_failed": sum(report.error is not None for report in reports),
        "changed": levels["changed"],
        "review": levels["review"],
        "manual": levels["manual"],
        "symlinks_skipped": len(discovered.links),
        "untracked_skipped": discovered.untracked,
    }


def _as_json(discovered: Discovered, reports: list[FileReport], args: argparse.Namespace) -> dict[str, Any]:
    files = [report.as_json() for report in reports if report.findings or report.error]
    return {"to": args.to, "summary": _summary(discovered, reports), "files": files}


def _print_report(discovered: Discovered, reports: list[FileReport], args: argparse.Namespace) -> None:
    for report in reports:
        if report.diff:
            _print_patch(report.diff)
        if report.error:
            print(f"{report.path}: error: {report.error}")
        for finding in report.findings:
            if finding.level != "changed":
                cell = f"cell {finding.cell}:" if finding.cell else ""
                place = f"{report.path}:{cell}{finding.line}:{finding.column + 1}"
                print(f"{place}: {finding.level}: {finding.name}: {finding.message}")
    print(_closing_line(_summary(discovered, reports), args))


def _print_patch(text: str) -> None:
    """Print lines of files as the files have them, which are UTF-8: escapes are for terminals."""
    output = getattr(sys.stdout, "buffer", None)
    if output is None or sys.stdout.isatty():
        print(text, end="")
        return
    sys.stdout.flush()
    output.write(text.encode("utf-8", "surrogateescape"))


def _closing_line(counts: dict[str, int], args: argparse.Namespace) -> str:
    verb = "changed" if args.write else "would change"
    changed = counts["files_written" if args.write else "files_changed"]
    rewritten, manual = counts["changed"] + counts["review"], counts["manual"]
    parts = [
        f"{counted(counts['files'], 'file')}: {changed} {verb}",
        f"{counted(rewritten, 'place')} rewritten, {counts['review']} of them to review",
        f"{manual} {'needs' if manual == 1 else 'need'} a human",
    ]
    if counts["files_failed"]:
        parts.append(f"{counts['files_failed']} failed")
    if counts["symlinks_skipped"]:
        parts.append(f"{counted(counts['symlinks_skipped'], 'symlink')} skipped")
    if counts["untracked_skipped"]:
        parts.append(f"{counts['untracked_skipped']} untracked skipped")
    hint = (
        "" if args.write or args.check or not counts["files_changed"] else " (nothing written; use --write)"
    )
    return ", ".join(parts) + hint
