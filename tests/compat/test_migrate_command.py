"""The `amp migrate` command: which files, how they are written, what is reported."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from amp_compat.migrate.cli import _mapper
from amp_compat.migrate.files import write_whole
from amp_compat.migrate.model import Finding
from amp_compat.migrate.positions import moved
from amp_core.cli import main

OLD = "import torch\nscaler = torch.cuda.amp.GradScaler()\n"
NEW = 'import torch\nscaler = torch.amp.GradScaler("cuda")\n'


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A folder with one file to migrate."""
    (tmp_path / "train.py").write_text(OLD)
    return tmp_path


def report(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    """Run with --json and return what it prints."""
    main(["migrate", "--json", *words])
    return json.loads(capsys.readouterr().out)


def test_without_write_nothing_is_written(tree: Path, capsys) -> None:
    """The bare command only reports."""
    assert main(["migrate", str(tree)]) == 0
    assert (tree / "train.py").read_text() == OLD
    assert "nothing written" in capsys.readouterr().out


def test_check_tells_by_exit_code(tree: Path) -> None:
    """--check is 1 while something would change and 0 after --write."""
    assert main(["migrate", "--check", str(tree)]) == 1
    assert main(["migrate", "--write", str(tree)]) == 0
    assert (tree / "train.py").read_text() == NEW
    assert main(["migrate", "--check", str(tree)]) == 0


def test_what_is_left_is_named_where_it_is_in_the_written_file(tree: Path, capsys) -> None:
    """--write adds lines, so the places that it prints would be lines above those to change by hand."""
    head = "from torch.cuda.amp import GradScaler, autocast as ac\nimport torch\n"
    text = f"{head}scaler = ac(*args), ac(dtype=torch.half)\nclass Scaler(GradScaler):\n    pass\n"
    (tree / "train.py").write_text(text)
    cells = [_cell("import torch\n1 +\ntorch.cuda.amp"), _cell(text)]
    (tree / "train.ipynb").write_text(json.dumps({"cells": cells, "nbformat": 4}))

    written, left = (report(capsys, *words, str(tree))["files"] for words in (["--write"], []))
    manual = [
        [f for file in files for f in file["findings"] if f["level"] == "manual"] for files in (written, left)
    ]
    assert len(manual[0]) == 5
    assert manual[0] == manual[1]


def test_places_in_a_long_file_of_equal_lines() -> None:
    """Comparing each pair of equal lines takes minutes for a file of thousands of lines."""
    body = "with old():\n    pass\n\n" * 400
    places = [Finding(line, 5, "manual", "old", "") for line in range(1, 1200, 3)]
    found = moved(places, f"{body}end\n", f"import torch\n{body.replace('old', 'new')}end\n")
    assert [(f.line, f.column) for f in found] == [(f.line + 1, 5) for f in places]


def test_what_python_warns_of_in_a_file_is_not_shown(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Warnings about `<unknown>:2` among the report; as errors, they leave a good file unchanged."""
    number = 'number = "\\d torch.cuda.amp"\n'
    cells = [_cell(f"!pip install torch\n{number}{OLD}")]
    (tree / "train.ipynb").write_text(json.dumps({"cells": cells, "nbformat": 4}))
    (tree / "train.py").write_text(number + OLD)
    assert main(["migrate", "--write", str(tree)]) == 0
    assert capsys.readouterr().err == ""
    assert (tree / "train.py").read_text() == number + NEW
    assert "".join(json.loads((tree / "train.ipynb").read_text())["cells"][0]["source"][1:]) == number + NEW


@pytest.mark.parametrize("jobs", ["0", "-1"])
def test_jobs_must_be_positive(tree: Path, jobs: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A negative number quietly means one process, and 0 all cores."""
    with pytest.raises(SystemExit):
        main(["migrate", "--jobs", jobs, str(tree)])
    assert f"{jobs} is not a positive number" in capsys.readouterr().err


def test_diff_without_a_console(tree: Path, monkeypatch) -> None:
    """A program without standard output gets a traceback in place of the exit code."""
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["migrate", "--check", "--diff", str(tree)]) == 1


def test_diff_applies(tree: Path, capsys) -> None:
    """--diff prints a patch with the lines that change."""
    main(["migrate", "--diff", str(tree / "train.py")])
    out = capsys.readouterr().out
    assert '+scaler = torch.amp.GradScaler("cuda")' in out
    assert "-scaler = torch.cuda.amp.GradScaler()" in out


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_diff_is_utf8_as_the_file_is(tree: Path, encoding: str, unbuffered: str) -> None:
    """No program applies the patch that a shell wrote in the encoding of its locale."""
    source = "# \N{GREEK SMALL LETTER MU} \xfc\n" + (tree / "train.py").read_text()
    (tree / "train.py").write_text(source, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "amp_core", "migrate", "--diff", "train.py"],
        env={**os.environ, "PYTHONIOENCODING": encoding, "PYTHONUNBUFFERED": unbuffered},
        cwd=tree,
        capture_output=True,
        check=True,
    )
    assert " # \N{GREEK SMALL LETTER MU} \xfc\n" in done.stdout.decode("utf-8")


def test_a_diff_of_a_file_with_form_feeds(tree: Path, capsys) -> None:
    """No program applies the patch: a line of it ends where no line of the file does."""
    (tree / "train.py").write_text("\f\n" + OLD)
    main(["migrate", "--diff", str(tree / "train.py")])
    assert "\n \f\n" in (out := capsys.readouterr().out)
    assert "No newline" not in out


def test_json_report(tree: Path, capsys) -> None:
    """--json gives every finding with file, line, level, name and message."""
    data = report(capsys, "--to", "amp_core", str(tree))
    assert data["summary"]["files_changed"] == 1
    (file,) = data["files"]
    assert file["path"] == str(tree / "train.py")
    finding = file["findings"][0]
    assert (finding["line"], finding["level"], finding["name"]) == (2, "changed", "torch.cuda.amp.GradScaler")


def test_broken_files_are_reported_and_the_rest_goes_on(tree: Path, capsys) -> None:
    """Each kind of file that cannot be rewritten gets a reason; the others are written."""
    (tree / "python2.py").write_text("import torch\ntorch.cuda.amp.autocast()\nprint 'x'\n")
    (tree / "latin.py").write_bytes(b"# caf\xe9\nimport torch\ntorch.cuda.amp.autocast()\n")
    (tree / "cut.ipynb").write_text('{"cells": [\n"torch.cuda.amp')
    (tree / "locked.py").write_text(OLD)
    (tree / "locked.py").chmod(0o444)
    (tree / "long.py").write_text(OLD + "if x:\n    pass\n" + "elif y:\n    pass\n" * 600)
    (tree / "sum.py").write_text(f"{OLD}x = {' + '.join(['1'] * 400)}\n")
    data = report(capsys, "--write", str(tree))
    errors = {Path(file["path"]).name: file["error"] for file in data["files"]}
    assert "does not parse: line 3" in errors["python2.py"]
    assert errors["latin.py"] == "not UTF-8: byte 5 is 0xe9"
    assert "not a notebook: line 2 is no JSON" in errors["cut.ipynb"]
    assert "read-only" in errors["locked.py"]
    assert "nested too deeply" in errors["long.py"]
    assert errors["sum.py"] == errors["long.py"]
    assert data["summary"]["changed"] == 1  # of the file that is written
    assert errors["train.py"] is None
    assert (tree / "train.py").read_text() == NEW
    assert (tree / "locked.py").read_text() == OLD
    assert main(["migrate", "--write", str(tree)]) == 1


def test_mode_bom_and_no_leftovers(tree: Path) -> None:
    """A rewritten file keeps its mode and byte-order mark, and no temporary file stays behind."""
    file = tree / "train.py"
    file.write_bytes(b"\xef\xbb\xbf" + OLD.encode())
    file.chmod(0o750)
    main(["migrate", "--write", str(tree)])
    assert file.read_bytes() == b"\xef\xbb\xbf" + NEW.encode()
    assert file.stat().st_mode & 0o777 == 0o750
    assert os.listdir(tree) == ["train.py"]


def test_links_are_not_followed(tree: Path, tmp_path_factory, capsys) -> None:
    """A symbolic link in a folder is skipped, and its target outside stays as it was."""
    outside = tmp_path_factory.mktemp("outside") / "theirs.py"
    outside.write_text(OLD)
    (tree / "link.py").symlink_to(outside)
    data = report(capsys, "--write", str(tree))
    assert data["summary"]["symlinks_skipped"] == 1
    assert outside.read_text() == OLD
    assert (tree / "link.py").is_symlink()


def test_pipes_are_left_out(tree: Path, capsys) -> None:
    """The command waits for ever for what someone may write to a pipe in a folder."""
    before = report(capsys, str(tree))
    os.mkfifo(tree / "pipe.py")
    assert report(capsys, str(tree)) == before


def test_untracked_files_and_environments_are_left_out(tree: Path, capsys) -> None:
    """In a git work tree only tracked files are touched; virtual environments never are."""
    for folder in ("scratch", "env"):
        (tree / folder).mkdir()
        (tree / folder / "old.py").write_text(OLD)
    (tree / "env" / "pyvenv.cfg").write_text("")
    for words in (["init", "-q"], ["add", "train.py"]):
        subprocess.run(["git", "-C", str(tree), *words], check=True)
    data = report(capsys, "--write", str(tree))
    assert (data["summary"]["files_written"], data["summary"]["untracked_skipped"]) == (1, 1)
    assert (tree / "scratch" / "old.py").read_text() == OLD
    main(["migrate", "--write", "--untracked", str(tree)])
    assert (tree / "scratch" / "old.py").read_text() == NEW
    assert (tree / "env" / "old.py").read_text() == OLD


USERS = {
    "alias.py": "from .old import ac\nac(False)\n",
    "several_lines.py": "from pkg.old import (\n    other,\n    ac,\n)\n",
    "comments.py": "from pkg.old import (\n    other,  # (not used)\n    ac,\n)\n",
    "behind_a_colon.py": "try: from pkg.old import ac\nexcept ImportError: pass\n",
    "behind_a_semicolon.py": "import os; from pkg.old import ac\n",
    "continued.py": "from pkg.old import other, \\\n    ac\n",
    "attribute.py": "from . import old\nold.ac(False)\n",
    "module_alias.py": "import pkg.old as compat\ncompat.ac(False)\n",
    "other_package.py": "from torchdrug.old import ac\n",
    "lines.ipynb": '{"cells": [{"source": ["import x\\n", "from pkg.old import ac\\n"]}]}',
    "one_string.ipynb": '{"cells": [{"source": "import x\\nfrom pkg.old import ac\\n"}]}',
}


@pytest.mark.parametrize("file", USERS)
def test_names_that_other_files_use_stay(tmp_path: Path, capsys, file: str) -> None:
    """A module's old name becomes the new one, and another file goes on to call it without a device."""
    (tmp_path / "old.py").write_text("from torch.cuda.amp import autocast as ac\n")
    assert report(capsys, str(tmp_path))["summary"]["changed"] == 1
    (tmp_path / file).write_text(USERS[file])
    assert report(capsys, str(tmp_path))["summary"]["manual"] == 1


def test_names_of_the_package_itself_stay(tmp_path: Path, capsys) -> None:
    """``from . import name`` reads it from the folder's __init__.py."""
    (tmp_path / "__init__.py").write_text("from torch.cuda.amp import autocast\n")
    (tmp_path / "user.py").write_text("from . import autocast\n")
    assert report(capsys, str(tmp_path))["summary"]["manual"] == 1


def test_an_ellipsis_that_reads_like_an_import(tmp_path: Path, capsys) -> None:
    """A text with more dots than the file has parent folders ends the run for all files."""
    (tmp_path / "old.py").write_text("from torch.cuda.amp import autocast\n")
    (tmp_path / "text.py").write_text(f'"""Was:\n\nfrom {"." * 200} import autocast\n"""\n')
    assert report(capsys, str(tmp_path))["summary"]["changed"] == 1


def test_notebook(tree: Path, capsys) -> None:
    """Code cells are rewritten as one program; magics, outputs and layout stay."""
    cells = [
        {"cell_type": "markdown", "metadata": {}, "source": ["torch.cuda.amp.autocast()"]},
        _cell("!pip install torch\n%matplotlib inline\nfrom torch.cuda.amp import autocast"),
        _cell("%%bash\necho torch.cuda.amp.autocast(\n"),
        _cell("for i in range(2):\n    with autocast():\n        %time f(é)\n", outputs=[{"x": 1}]),
        _cell("register(autocast"),
    ]
    path = tree / "demo.ipynb"
    text = json.dumps(
        {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}, indent=1, ensure_ascii=False
    )
    path.write_text(text + "\n", encoding="utf-8")
    data = report(capsys, "--write", str(path))
    expected = text.replace("from torch.cuda.amp import", "from torch.amp import").replace(
        "with autocast():", 'with autocast(\\"cuda\\"):'
    )
    assert path.read_text(encoding="utf-8") == expected + "\n"
    places = [(f["cell"], f["line"], f["level"]) for f in data["files"][0]["findings"]]
    assert (3, 2, "changed") in places
    assert any(cell == 4 and level == "manual" for cell, _, level in places)


@pytest.mark.parametrize(
    ("layout", "write"),
    [
        ({"indent": 1}, lambda text: text.replace("\n", "\r\n")),
        ({"indent": "\t"}, str),
        ({"separators": (",", ":")}, str),
        ({"indent": 2}, lambda text: text.replace("1e-05", "0.00001").replace("<", "\\u003c")),
    ],
    ids=["crlf", "tabs", "compact", "numbers and escapes"],
)
def test_notebook_layouts(tree: Path, layout: dict, write) -> None:
    """A diff would show the whole notebook, outputs included, where another program wrote the file."""
    same = ["x = 1\n", "files = !ls\n", "autocast? "]
    old = [
        _cell("".join(same)),
        _cell("from torch.cuda.amp import autocast\nautocast()", [{"source": 1e-5, "<": [float("nan")]}]),
    ]
    new = [
        _cell("".join(same)),
        _cell('from torch.amp import autocast\nautocast("cuda")', [{"source": 1e-5, "<": [float("nan")]}]),
    ]
    path = tree / "demo.ipynb"
    path.write_bytes(write(json.dumps({"cells": old, "nbformat": 4}, **layout)).encode())
    assert main(["migrate", "--write", str(path)]) == 0
    assert path.read_bytes() == write(json.dumps({"cells": new, "nbformat": 4}, **layout)).encode()


@pytest.mark.parametrize(
    "magic", ["%timeit autocast(True)", "took = %timeit -o autocast(True)", "%%time autocast(True)\nx = 1"]
)
def test_names_in_magics_stay(tmp_path: Path, capsys, magic: str) -> None:
    """A magic, which is not rewritten, goes on to call without a device what is imported from the target."""
    path = tmp_path / "demo.ipynb"
    cells = [_cell("from torch.cuda.amp import GradScaler, autocast\nGradScaler()"), _cell(magic)]
    path.write_text(json.dumps({"cells": cells, "nbformat": 4}))
    (file,) = report(capsys, "--write", str(path))["files"]
    assert "".join(json.loads(path.read_text())["cells"][0]["source"]) == (
        'from torch.amp import GradScaler\nfrom torch.cuda.amp import autocast\nGradScaler("cuda")'
    )
    assert [f["level"] for f in file["findings"] if f["name"] == "autocast"] == ["manual"]


def test_deprecated_names_in_magics_are_reported(tmp_path: Path, capsys) -> None:
    """A notebook counts as migrated, and goes on to use the deprecated name."""
    path = tmp_path / "demo.ipynb"
    cells = [_cell("x = 1"), _cell("import torch\n%time s = torch.cuda.amp.GradScaler()")]
    path.write_text(json.dumps({"cells": cells, "nbformat": 4}))
    (file,) = report(capsys, str(path))["files"]
    places = [(f["cell"], f["line"], f["column"], f["level"]) for f in file["findings"]]
    assert places == [(2, 2, len("%time s = "), "manual")]


@pytest.mark.parametrize(
    ("cell", "place"),
    [
        ("%%writefile train.py\nx = 1\nwith torch.cuda.amp.autocast(False): ...", (3, 5)),
        ("%%writefile train.py\nfrom torch.cuda import nvtx, amp", (2, 5)),
        ("%%file train.py\nfrom apex import amp", (2, 5)),
        ("%%bash\npython -c 'import torch; torch.cpu.amp.autocast(0)'", (2, 25)),
        ("%%wandb\nGradScaler()", (2, 0)),
        ("%%wandb\nmade = Scaler()", (2, 7)),
        ("%%bash\npython train.py --amp", None),
        ("%%writefile train.py\nfrom torch.amp import GradScaler", None),
    ],
)
def test_cells_of_other_magics_are_reported(tmp_path: Path, capsys, cell: str, place) -> None:
    """The notebook counts as migrated, and goes on to use the deprecated name, or one that lacks a device."""
    path = tmp_path / "demo.ipynb"
    cells = [_cell("from torch.cuda.amp import GradScaler as Scaler\nScaler()"), _cell(cell)]
    path.write_text(json.dumps({"cells": cells, "nbformat": 4}))
    (file,) = report(capsys, str(path))["files"]
    found = [(f["line"], f["column"]) for f in file["findings"] if (f["cell"], f["level"]) == (2, "manual")]
    assert found == ([place] if place else [])


@pytest.mark.parametrize(
    ("cell", "device"),
    [
        ("from torch.cuda.amp import autocast\nprint(\n    'step %d'\n    % 3\n)\nautocast()", "'cuda'"),
        ("!pip install \\\r\n  torch\r\nfrom torch.cuda.amp import autocast\r\nautocast()", '"cuda"'),
    ],
    ids=["an expression with %", "a command of two lines"],
)
def test_lines_of_magics_are_told_from_those_of_python(tmp_path: Path, cell: str, device: str) -> None:
    """The cell counts as no valid Python, and stays as it is."""
    path = tmp_path / "demo.ipynb"
    path.write_text(json.dumps({"cells": [_cell(cell)], "nbformat": 4}))
    assert main(["migrate", "--write", str(path)]) == 0
    new = cell.replace("torch.cuda.amp", "torch.amp").replace("autocast()", f"autocast({device})")
    assert "".join(json.loads(path.read_text())["cells"][0]["source"]) == new


def test_a_cell_magic_stays_the_first_line(tmp_path: Path) -> None:
    """The first cell no longer runs: below another line, ``%%time`` means nothing."""
    path = tmp_path / "demo.ipynb"
    cells = [_cell("%%time\nimport torch"), _cell("ac = torch.cuda.amp.autocast"), _cell("ac(False)")]
    path.write_text(json.dumps({"cells": cells, "nbformat": 4}))
    assert main(["migrate", "--write", str(path)]) == 0
    assert ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"]] == [
        "%%time\nimport functools\nimport torch",
        'ac = functools.partial(torch.amp.autocast, "cuda")',
        "ac(enabled=False)",
    ]


def test_cells_that_magics_profile_are_rewritten(tmp_path: Path) -> None:
    """The import changes, and the cell goes on to call it without a device."""
    path = tmp_path / "demo.ipynb"
    cells = [_cell("from torch.cuda.amp import GradScaler"), _cell("%%memit\nGradScaler()")]
    path.write_text(json.dumps({"cells": cells, "nbformat": 4}))
    assert main(["migrate", "--write", str(path)]) == 0
    assert json.loads(path.read_text())["cells"][1]["source"] == ["%%memit\n", 'GradScaler("cuda")']


def test_a_broken_cell_that_uses_an_alias_is_reported(tmp_path: Path, capsys) -> None:
    """The alias changes, and nothing says that the cell goes on to call it without a device."""
    path = tmp_path / "demo.ipynb"
    cells = [_cell("from torch.cuda.amp import GradScaler as Scaler\nScaler()"), _cell("s = Scaler(")]
    path.write_text(json.dumps({"cells": cells, "nbformat": 4}))
    (file,) = report(capsys, str(path))["files"]
    assert [f["cell"] for f in file["findings"] if f["level"] == "manual"] == [2]


def test_a_named_link_stays_a_link(tree: Path) -> None:
    """The link would become a second file, and the one that it names would stay as it was."""
    link = tree / "link.py"
    link.symlink_to("train.py")
    assert main(["migrate", "--write", str(link)]) == 0
    assert link.is_symlink()
    assert (tree / "train.py").read_text() == NEW


def _cell(source: str, outputs: list | None = None) -> dict:
    return {
        "cell_type": "code",
        "execution_count": None,
        "metadata": {},
        "outputs": outputs or [],
        "source": source.splitlines(keepends=True),
    }


def test_names_passed_on_between_files(tree: Path, capsys) -> None:
    """A module whose `autocast` another file imports keeps it, and the report says where the trouble is."""
    (tree / "utils.py").write_text("from torch.cuda.amp import autocast\n")
    (tree / "use.py").write_text("from .utils import autocast\nwith autocast(False):\n    pass\n")
    data = report(capsys, "--write", str(tree))
    assert (tree / "utils.py").read_text() == "from torch.cuda.amp import autocast\n"
    assert any(f["level"] == "manual" for file in data["files"] for f in file["findings"])


def test_the_last_line_counts_in_words(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`1 files`."""
    (tree / "link.py").symlink_to(tree / "train.py")
    main(["migrate", str(tree)])
    (tree / "other.py").write_text(OLD)
    main(["migrate", str(tree)])
    one, two = [line for line in capsys.readouterr().out.splitlines() if "would change" in line]
    assert one.startswith("1 file: 1 would change, ")
    assert "1 symlink skipped" in one
    assert two.startswith("2 files: 2 would change, ")


def test_missing_path_is_one_line(capsys) -> None:
    """A path that does not exist is a usage error, not a traceback, however long its name is."""
    for path in ("/no/such/place", "a" * 300):
        assert main(["migrate", path]) == 2
        assert f"no such file or folder: {path}\n" in capsys.readouterr().err


def test_an_empty_path_is_no_folder(tree: Path, monkeypatch, capsys) -> None:
    """``amp migrate --write "$UNSET"`` rewrites the current folder."""
    monkeypatch.chdir(tree)
    assert main(["migrate", "--write", ""]) == 2
    assert "no such file or folder: ''" in capsys.readouterr().err
    assert (tree / "train.py").read_text() == OLD


AS_NOBODY = """
import locale, os, sys  # Python 3.10 imports locale when it first prints, where nobody may not read
import amp_compat.migrate.cli, amp_compat.migrate.worker
from amp_core.cli import main
if os.geteuid() == 0:
    os.seteuid(65534)
raise SystemExit(main(["migrate", "--untracked", "--jobs", "1", *sys.argv[1:]]))
"""


def test_folders_that_cannot_be_listed_are_reported() -> None:
    """A folder without permission counts as one without files: ``--check`` passes. A path in it crashes."""
    with tempfile.TemporaryDirectory() as name:  # that of pytest is its user's alone
        locked = Path(name, "locked")
        locked.mkdir()
        (locked / "train.py").write_text(OLD)
        Path(name).chmod(0o755)
        locked.chmod(0)

        def run(path: Path) -> subprocess.CompletedProcess[str]:
            words = [sys.executable, "-c", AS_NOBODY, "--check", str(path)]
            return subprocess.run(words, capture_output=True, text=True, check=False)

        try:
            for path in (Path(name), locked):
                done = run(path)
                assert (done.returncode, done.stderr) == (1, "")
                assert f"{locked}: error: Permission denied" in done.stdout
                assert ", 1 failed" in done.stdout
            done = run(locked / "train.py")
            assert (done.returncode, done.stdout) == (2, "")
            assert done.stderr == f"amp migrate: no such file or folder: {locked / 'train.py'}\n"
        finally:
            locked.chmod(0o700)


def test_worker_processes(tree: Path) -> None:
    """Enough files for worker processes are all written, from the installed command."""
    for number in range(20):
        (tree / f"m{number}.py").write_text(OLD)
    command = [sys.executable, "-m", "amp_core", "migrate", "--write", "--jobs", "2", str(tree)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "21 files: 21 changed" in done.stdout
    assert all(file.read_text() == NEW for file in tree.glob("*.py"))


def test_worker_processes_leave_ctrl_c_to_the_command() -> None:
    """Each that is just starting prints a traceback of its own."""
    with _mapper(8, 2) as mapper:
        assert {*mapper(signal.getsignal, [signal.SIGINT] * 8)} == {signal.SIG_IGN}


def test_replaced_whole_or_not_at_all(tree: Path) -> None:
    """A file that changed since it was read is not overwritten, and nothing is left beside it."""
    file = tree / "train.py"
    with pytest.raises(OSError, match="was changed while"):
        write_whole(file, b"what was read", b"new")
    assert file.read_text() == OLD
    assert os.listdir(tree) == ["train.py"]


def test_missing_libcst_says_what_to_install(tree: Path) -> None:
    """Without the extra, the command is one line that names it."""
    code = "import sys; sys.modules['libcst'] = None; from amp_core.cli import main; exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", code, "migrate", "."], capture_output=True, text=True, cwd=tree, check=False
    )
    assert (done.returncode, done.stderr) == (
        2,
        "amp migrate: needs libcst; install it with: pip install 'amp-core[migrate]'\n",
    )


@pytest.mark.slow
def test_two_thousand_files_in_a_minute(tmp_path: Path) -> None:
    """A tree of 2,000 files, one in ten with deprecated calls, stays under a minute."""
    filler = "".join(f"def f{i}(a, b):\n    c = a + b\n    return [c, a * {i}]\n\n\n" for i in range(60))
    for number in range(2000):
        (tmp_path / f"m{number}.py").write_text((OLD if number % 10 == 0 else "import os\n") + filler)
    command = [sys.executable, "-m", "amp_core", "migrate", "--write", str(tmp_path)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Processor time, which depends least on what else the machine does.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 60
    assert "2000 files: 200 changed" in done.stdout
