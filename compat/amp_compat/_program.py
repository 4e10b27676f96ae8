"""Run a program as Python would: in a ``__main__`` that stays, unlike that of the functions of ``runpy``."""

from __future__ import annotations

import builtins
import io
import os
import pkgutil
import runpy
import sys
import zipfile
from types import CodeType, ModuleType


def run_program(program: str, *, module: bool) -> None:
    """Run `program` with ``sys.argv`` as it is.

    Threads and exit handlers of the program still need its ``__main__`` when this has returned, or raised:
    to pickle its classes, for example.

    Args:
        program: the path of a file, of a folder or archive with a ``__main__.py``, or the name of a module.
        module: `program` is the name of a module.
    """
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    if module:
        sys.path.insert(0, os.getcwd())
        _run_in_main(program)
    elif os.path.isdir(program) or zipfile.is_zipfile(program):
        sys.path[0] = program
        _run_in_main("__main__", alter_argv=False)
    else:
        path = os.path.abspath(program)
        sys.path[0] = os.path.dirname(path)
        main.__dict__.update(__file__=path, __cached__=None)
        exec(_code_of(path), main.__dict__)


_run_in_main = runpy._run_module_as_main  # type: ignore[attr-defined]  # what ``python -m`` calls


def _code_of(path: str) -> CodeType:
    with io.open_code(path) as file:
        code = pkgutil.read_code(file)  # of a .pyc file
    if isinstance(code, CodeType):
        return code
    with io.open_code(path) as file:
        source: CodeType = compile(file.read(), path, "exec", dont_inherit=True)
    return source
