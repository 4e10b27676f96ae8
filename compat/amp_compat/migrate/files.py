"""Select the files to migrate, and replace them."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

SUFFIXES = (".py", ".pyi", ".ipynb")
_SKIPPED = frozenset({"__pycache__", "node_modules", "site-packages", "__pypackages__"})

# A file that matches none of these cannot contain a deprecated name and is not parsed.
_CANDIDATE = re.compile(
    rb"(?:cuda|cpu)\s*\.\s*amp\b|torch\s*\.\s*(?:cuda|cpu)\s+import|torch\s*\.\s*(?:cuda|cpu)\s+as\b"
    rb"|torch\s+import[^\n]*\b(?:cuda|cpu)\b|(?:cuda|cpu)\s*,\s*\\?[\"']amp|\bapex\b[^\n]*\bamp\b|\bamp\b[^\n]*\bapex\b|\bamp_compat\b[^\n]*\bapex\b"
)
_NAMES = ("autocast", "GradScaler", "custom_fwd", "custom_bwd", "amp")
# In notebooks, lines begin with a quotation mark. Parentheses may hold comments, which may hold parentheses.
_IMPORT = re.compile(
    rb'(?:^|[":;])[ \t]*(?:from\s+(?P<module>[.\w]+)\s+)?import\b\s*'
    rb"(?P<names>\((?:[^)#]|#[^\n]*\n)*\)|(?:\\\r?\n|[^\n;])*)",
    re.MULTILINE,
)
_ITEM = re.compile(rb"([\w.]+)(?:\s+as\s+(\w+))?")
_FOREIGN = frozenset({b"torch", b"apex", b"amp_core"})


@dataclass
class Discovered:
    """The files under the given paths, those skipped, and the errors of folders that cannot be listed."""

    files: list[Path] = field(default_factory=list)
    links: list[Path] = field(default_factory=list)
    untracked: int = 0
    missing: list[str] = field(default_factory=list)
    unreadable: list[OSError] = field(default_factory=list)


def discover(paths: Iterable[str], *, untracked: bool = False) -> Discovered:
    """Collect Python files and notebooks.

    Files passed explicitly are always included. Folders are searched without following symbolic links and
    without hidden folders, virtual environments, caches and (unless `untracked`) files unknown to git.
    """
    discovered = Discovered()
    for text in paths:
        path = Path(text)
        if not text:  # an unset variable in a script, which Path takes for the current folder
            discovered.missing.append("''")
        elif os.path.isdir(path):
            _discover_folder(path, discovered, untracked=untracked)
        elif os.path.isfile(path):
            discovered.files.append(path)
        else:
            discovered.missing.append(str(path))
    unique: dict[Path, Path] = {}
    for path in discovered.files:
        unique.setdefault(path.absolute(), path)
    discovered.files = list(unique.values())
    return discovered


def _discover_folder(folder: Path, discovered: Discovered, *, untracked: bool) -> None:
    tracked = None if untracked else git_files(folder)
    for path in _walk(folder, discovered.unreadable.append):
        if path.is_symlink():
            discovered.links.append(path)
        elif tracked is not None and os.path.abspath(path) not in tracked:
            discovered.untracked += 1
        else:
            discovered.files.append(path)


def _walk(folder: Path, on_error: Callable[[OSError], object]) -> Iterator[Path]:
    for base, folders, names in os.walk(folder, onerror=on_error, followlinks=False):
        folders[:] = sorted(name for name in folders if _should_enter(base, name))
        for name in sorted(names):
            path = Path(base, name)
            if name.endswith(SUFFIXES) and not _is_special(path):
                yield path


def _is_special(path: Path) -> bool:
    """Return whether `path` is no file but a pipe or a device, which may wait for ever when it is read."""
    try:
        return not stat.S_ISREG(path.stat().st_mode)
    except OSError:  # a broken link, or a folder that may not be entered, which is reported
        return False


def _should_enter(base: str, name: str) -> bool:
    hidden = name.startswith(".") or name in _SKIPPED
    return not hidden and not os.path.exists(os.path.join(base, name, "pyvenv.cfg"))


def git_files(folder: Path) -> set[str] | None:
    """Return the absolute paths that git tracks in `folder`; None if there are none."""
    command = ["git", "-C", str(folder), "ls-files", "-z", "--", "."]
    try:
        done = subprocess.run(command, capture_output=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return None
    names = [os.fsdecode(name) for name in done.stdout.split(b"\0") if name]
    return {os.path.abspath(os.path.join(folder, name)) for name in names} or None


def is_candidate(data: bytes) -> bool:
    """Return whether a file with content `data` can contain a deprecated name."""
    return _CANDIDATE.search(data) is not None


def words_for(names: Iterable[str]) -> re.Pattern[bytes]:
    """Return what matches one of `names` or a mixed-precision name."""
    return re.compile(rf"\b(?:{'|'.join(sorted({*_NAMES, *names}))})\b".encode())


def names_taken(path: Path, data: bytes, words: re.Pattern[bytes]) -> set[tuple[str, str]]:
    """Return (module, name) for each of `words` that the file imports, or reads from a module, outside torch.

    `module` is the last part of the module's name. A star import counts as every name the file uses.
    """
    taken: set[tuple[str, str]] = set()
    if words.search(data) is None:
        return taken
    text = data.replace(rb"\n", b"\n")  # the strings of a notebook
    modules: dict[bytes, str] = {}
    for match in _IMPORT.finditer(text):
        module = match["module"] or b""
        names = match["names"]
        if module.partition(b".")[0] in _FOREIGN:
            continue
        if module:
            above = path.absolute().parents[len(module) - 1 :]  # none if these are an ellipsis in a text
            stem = module.rpartition(b".")[2].decode() or "".join(folder.name for folder in above[:1])
            found = words.findall(text if names.strip() == b"*" else names)
            taken.update((stem, word.decode()) for word in found)
        for dotted, alias in _ITEM.findall(names):
            last = dotted.rpartition(b".")[2]
            if dotted.partition(b".")[0] not in _FOREIGN:
                modules[alias or last] = last.decode()
    for base, word in re.findall(rb"\b(\w+)\.(" + words.pattern + rb")", text):
        if base in modules:
            taken.add((modules[base], word.decode()))
    return taken


def module_stem(path: Path) -> str:
    """Return the last part of the module name under which other files import `path`."""
    return path.parent.absolute().name if path.stem == "__init__" else path.stem


def write_whole(path: Path, before: bytes, after: bytes) -> None:
    """Replace the contents of `path` atomically with `after`, keeping its mode.

    Raises:
        OSError: `path` is read-only, changed since it was read, or cannot be replaced.
    """
    path = path.resolve()  # else a link that was named becomes a file
    mode = path.stat().st_mode
    if not mode & 0o222 or not os.access(path, os.W_OK):
        raise PermissionError("the file is read-only")
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".amp-migrate", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(after)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, mode & 0o7777)
        if path.read_bytes() != before:
            raise OSError("the file was changed while it was being migrated")
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
