"""What a program finds under ``python -m amp_compat``, beside amp-core."""

from __future__ import annotations

import py_compile
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

LEAVES_WORK = """
import atexit, os, pickle, sys, threading

class Model:
    pass

def save(when):
    print(when, pickle.loads(pickle.dumps(Model)) is Model, len(sys.argv))

def save_later():
    threading.main_thread().join()
    save("thread")

if __name__ == "__main__":
    atexit.register(save, "exit")
    threading.Thread(target=save_later).start()
    os.chdir("/")
    print(__file__, __cached__, __package__, type(__loader__).__name__, __spec__ and __spec__.name)
    print(sys.argv, sys.path[0])
    print("starts", os.path.exists(__file__), __name__, sys.modules[__name__].Model is Model)
"""


PROGRAMS = {
    "file": "a.py",
    "module": "a",
    "package": "a",
    "folder": "a",
    "archive": "a.zip",
    "bytecode": "a.pyc",
}


@pytest.mark.parametrize("form", PROGRAMS)
def test_what_a_program_does_at_its_end(form: str, tmp_path: Path) -> None:
    """What an exit handler saves, or a thread that goes on, is lost: their classes cannot be pickled."""
    program = PROGRAMS[form]
    source = tmp_path / ("a/__main__.py" if form in ("package", "folder") else "a.py")
    source.parent.mkdir(exist_ok=True)
    source.write_text(LEAVES_WORK)
    if form == "archive":
        with zipfile.ZipFile(tmp_path / program, "w") as archive:
            archive.write(source, "__main__.py")
    elif form == "bytecode":
        py_compile.compile(str(source), str(tmp_path / program))
    words = ["-m", program] if form in ("module", "package") else [program]
    said = []
    for command in ([sys.executable], [sys.executable, "-m", "amp_compat"]):
        run = subprocess.run([*command, *words, "x"], capture_output=True, text=True, cwd=tmp_path)
        assert run.returncode == 0, run.stderr
        assert "Error" not in run.stderr, run.stderr
        said.append(run.stdout)
    assert said[0].endswith(" __main__ True\nthread True 2\nexit True 2\n")
    assert said[1] == said[0]


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    """Who mistypes the name of a script gets a traceback through amp-core, as if it had a fault."""
    command = [sys.executable, "-m", "amp_compat", "trian.py", "--epochs", "3"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode == 2
    assert "there is no file 'trian.py'" in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize(
    ("words", "missing"),
    [
        (["-m", "trian"], "module 'trian'"),
        (["-m", "trian.main"], "module 'trian.main'"),
        (["-m", "kit.trian"], "module 'kit.trian'"),
        (["-m", "kit"], "module 'kit.__main__'"),
        (["kit"], "__main__.py in 'kit'"),
    ],
)
def test_a_module_that_is_not_there(words: list[str], missing: str, tmp_path: Path) -> None:
    """Who mistypes the name of a module gets a traceback through amp-core, where Python prints one line."""
    (tmp_path / "kit").mkdir()
    (tmp_path / "kit/__init__.py").touch()
    command = [sys.executable, "-m", "amp_compat", *words]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode == 2
    assert f"there is no {missing}" in run.stderr
    assert "Traceback" not in run.stderr


def test_a_package_that_cannot_be_imported(tmp_path: Path) -> None:
    """The import that fails in a package is taken for a mistyped name, and nobody learns where it is."""
    (tmp_path / "kit").mkdir()
    (tmp_path / "kit/__init__.py").write_text("import nowhere")
    command = [sys.executable, "-m", "amp_compat", "-m", "kit.train"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert "No module named 'nowhere'" in run.stderr
    assert "__init__.py" in run.stderr
