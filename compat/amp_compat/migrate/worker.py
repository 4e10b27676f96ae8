"""Migrate one file; runs in worker processes."""

from __future__ import annotations

import codecs
import difflib
import io
import json
from dataclasses import dataclass
from pathlib import Path

import libcst as cst

from amp_compat.migrate.files import write_whole
from amp_compat.migrate.model import FileReport, Rewritten
from amp_compat.migrate.names import TARGETS
from amp_compat.migrate.notebook import migrate_notebook, moved_in_notebook
from amp_compat.migrate.positions import moved
from amp_compat.migrate.source import migrate_source
from amp_compat.migrate.tree import syntax_error


@dataclass(frozen=True)
class Job:
    """A file to migrate; `exported` are the names that other files import from it."""

    path: Path
    target: str
    exported: frozenset[str] = frozenset()
    write: bool = False
    diff: bool = False


def migrate_file(job: Job) -> FileReport:
    """Run `job`; errors in the file go into the report."""
    report = FileReport(str(job.path))
    try:
        before = job.path.read_bytes()
        _migrate(job, before, report)
    except UnicodeDecodeError as error:
        report.error = f"not UTF-8: byte {error.start} is {before[error.start]:#04x}"
    except cst.ParserSyntaxError as error:
        report.error = f"does not parse: line {error.raw_line}: {error.message.splitlines()[0]}"
    except json.JSONDecodeError as error:
        report.error = f"not a notebook: line {error.lineno} is no JSON: {error.msg}"
    except (OSError, ValueError) as error:
        report.error = getattr(error, "strerror", None) or str(error) or type(error).__name__
    except (RecursionError, KeyError) as error:
        if not _is_recursion(error):
            raise
        report.error = "nested too deeply: an expression, or a chain of elif, is too long"
    return report


def _is_recursion(error: BaseException | None) -> bool:
    """Return whether the stack was too small; libcst then looks for a position that it never reached."""
    while error is not None and not isinstance(error, RecursionError):
        error = error.__context__
    return error is not None


def _migrate(job: Job, before: bytes, report: FileReport) -> None:
    bom = codecs.BOM_UTF8 if before.startswith(codecs.BOM_UTF8) else b""
    text = before[len(bom) :].decode("utf-8")
    result = _rewrite(job, text)
    report.findings = result.findings
    report.changed = result.text != text
    if not report.changed:
        return
    if job.path.suffix != ".ipynb":
        _check(result.text)
    if job.diff:
        report.diff = _diff(job.path, text, result.text)
    if job.write:
        write_whole(job.path, before, bom + result.text.encode("utf-8"))
        report.written = True
        move = moved_in_notebook if job.path.suffix == ".ipynb" else moved
        report.findings = move(report.findings, text, result.text)


def _rewrite(job: Job, text: str) -> Rewritten:
    migrate = migrate_notebook if job.path.suffix == ".ipynb" else migrate_source
    return migrate(text, TARGETS[job.target], job.exported)


def _check(text: str) -> None:
    """Refuse to write text that Python cannot parse."""
    error = syntax_error(text)
    if error is not None:
        raise ValueError(f"left unchanged: the rewritten file would not parse ({error})") from error


def _diff(path: Path, before: str, after: str) -> str:
    name = path.as_posix().lstrip("/")
    # splitlines() would split at form feeds too, where no line of a patch ends.
    old, new = (io.StringIO(text, newline="\n").readlines() for text in (before, after))
    lines = difflib.unified_diff(old, new, f"a/{name}", f"b/{name}")
    return "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
    )
