"""Run a program as Python would: in a ``__main__`` that stays, unlike that of the functions of ``runpy``."""

from __future__ import annotations

import builtins
import os
import sys
import zipfile
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader, SourcelessFileLoader
from importlib.util import find_spec
from types import CodeType, ModuleType
from typing import cast


class ProgramNotFoundError(ImportError):
    """There is no such module, or no ``__main__.py`` in what is to run."""


def run_program(program: str, *, module: bool) -> None:
    """Run `program` with ``sys.argv`` as it is.

    Threads and exit handlers of the program still need its ``__main__`` when this has returned, or raised:
    to pickle its classes, for example.

    Args:
        program: the path of a file, of a folder or archive with a ``__main__.py``, or the name of a module.
        module: `program` is the name of a module.

    Raises:
        ProgramNotFoundError: there is no such module, or no ``__main__.py``.
    """
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    path = os.path.abspath(program)
    if module:
        sys.path.insert(0, os.getcwd())
        spec = _module(program)
        sys.argv[0] = spec.origin or program
        _run(spec, main)
    elif os.path.isdir(path) or zipfile.is_zipfile(path):
        sys.path[0] = path
        _run(_present(PathFinder.find_spec("__main__", [path]), f"__main__.py in {program!r}"), main)
    else:
        sys.path[0] = os.path.dirname(path)
        _run_file(path, main)


def _module(name: str) -> ModuleSpec:
    spec = _spec_of(name)
    return _spec_of(f"{name}.__main__") if spec.submodule_search_locations is not None else spec


def _spec_of(name: str) -> ModuleSpec:
    try:
        spec = find_spec(name)
    except ImportError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # a package that is there, and whose own imports fail
        spec = None
    return _present(spec, f"module {name!r}")


def _present(spec: ModuleSpec | None, what: str) -> ModuleSpec:
    if spec is None:
        raise ProgramNotFoundError(f"there is no {what}")
    return spec


def _run(spec: ModuleSpec, main: ModuleType) -> None:
    code = cast("InspectLoader", spec.loader).get_code(spec.name)
    if code is None:
        raise ImportError(f"{spec.name} is not written in Python, so it cannot be run.", name=spec.name)
    names = {"__file__": spec.origin, "__cached__": spec.cached, "__loader__": spec.loader}
    main.__dict__.update(names, __package__=spec.parent, __spec__=spec)
    exec(code, main.__dict__)


def _run_file(path: str, main: ModuleType) -> None:
    loader = (SourcelessFileLoader if path.endswith(".pyc") else SourceFileLoader)("__main__", path)
    if isinstance(loader, SourceFileLoader):  # its `get_code` would keep the bytecode, as imports do
        code: CodeType | None = loader.source_to_code(loader.get_data(path), path)
    else:
        code = loader.get_code("__main__")
    assert code is not None, "a file has code, or its loader raises"
    main.__dict__.update(__file__=path, __cached__=None, __loader__=loader)
    exec(code, main.__dict__)
