"""``amp new-backend NAME``: write the skeleton of a backend's distribution."""

from __future__ import annotations

import argparse
import keyword
import os
import re
import shlex
import subprocess
from importlib.resources import files
from pathlib import Path
from string import Template

from amp_core.cli import UsageError

_FILES = {
    "pyproject.toml": "pyproject.toml",
    "README.md": "README.md",
    "amp_backend_{name}/__init__.py": "init.py",
    "amp_backend_{name}/backend.py": "backend.py",
    "amp_backend_{name}/hooks.py": "hooks.py",
    ".github/workflows/conformance.yml": "ci.yml",
    "tests/conftest.py": "conftest.py",
    "tests/test_conformance.py": "test_conformance.py",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``amp new-backend``."""
    parser.add_argument("name", metavar="NAME", help="the device type, such as npu")
    parser.add_argument("--directory", type=Path, default=Path(), help="where to write it (default: here)")


def run(args: argparse.Namespace) -> int:
    """Write the files and print the next steps."""
    _require_usable(args.name)
    folder = args.directory / f"amp-backend-{args.name.replace('_', '-')}"
    try:
        if folder.exists():
            raise UsageError(f"{folder} exists already; remove it or choose another --directory.")
        for target, template in _FILES.items():
            path = folder / target.format(name=args.name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(_filled(template, args.name), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{folder} cannot be written: {error.strerror}.") from error
    word = _word(folder)
    print(f"Wrote {folder}. Fill in what `grep -rn 'FILL IN' {word}` shows, then:")
    print(f"  pip install {word}")
    print(f"  amp check {args.name}")
    return 0


def _word(folder: Path) -> str:
    """Return `folder` as one word of a command line, which pip takes for no package name, and no option."""
    path = str(folder) if folder.is_absolute() else os.curdir + os.sep + str(folder)
    return shlex.quote(path) if os.name == "posix" else subprocess.list2cmdline([path])


def _filled(template: str, name: str) -> str:
    from amp_core.plugin import API_VERSION

    text = (files("amp_core.testing") / "template" / f"{template}.tmpl").read_text(encoding="utf-8")
    class_name = "".join(part.capitalize() for part in name.split("_")) + "Backend"
    values = {"name": name, "dash": name.replace("_", "-"), "class_name": class_name}
    return Template(text).substitute(values, api_version=API_VERSION)


def _require_usable(name: str) -> None:
    import torch

    from amp_core._torch.autocast import autocast_known, is_device_type
    from amp_core.plugin.entry_points import built_in

    if name in built_in():
        raise UsageError(f"amp-core has a backend for {name!r}; see amp_core.plugin.replace_backend.")
    if not re.fullmatch("[a-z]([a-z0-9_]*[a-z0-9])?", name):
        raise UsageError(
            f"{name!r} is not a device type: use lower-case ASCII letters, digits and _, such as 'npu', the "
            f"`type` of the torch.device that your package registers."
        )
    if keyword.iskeyword(name):
        raise UsageError(f"{name!r} is a keyword of Python, so programs could not write torch.{name}.")
    if hasattr(torch, name) and not is_device_type(name):
        raise UsageError(
            f"torch.{name} is something else, so torch would refuse to register the device's module as that."
        )
    if name == "auto":
        raise UsageError("'auto' stands for the device that is present, so no device type can be named so.")
    if is_device_type(name) and not autocast_known(name):
        raise UsageError(
            f"{name!r} is a device type of torch's own that has no autocast, so no backend can serve it. Use "
            f"the name that your package gives to torch.utils.rename_privateuse1_backend()."
        )
