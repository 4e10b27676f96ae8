"""Every python block of the documentation runs."""

from __future__ import annotations

import importlib.util
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sybil")
ROOT = Path(__file__).resolve().parents[2]
PAGE = runpy.run_path(str(Path(__file__).with_name("page.py")))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]


def _name(page):
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [p for p in PAGES if PAGE["blocks"](p)], ids=_name)
def test_the_python_blocks_of_a_page_run(page, tmp_path, monkeypatch):
    """A reader who types in a page, block after block, would meet an error or a warning."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    needed = PAGE["packages"](page)
    absent = [package for package in needed if importlib.util.find_spec(package) is None]
    if absent:
        pytest.skip(f"{', '.join(absent)} not installed; tox -e ecosystem installs and runs this page")
    if not PAGE["needs_own_process"](page):
        PAGE["run"](page)
        return
    script = Path(__file__).with_name("page.py")
    warn = "default" if needed else "error"  # other packages have warnings of their own
    done = subprocess.run(
        [sys.executable, "-W", warn, script, page], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_page_is_run_in_order_in_one_namespace(tmp_path):
    """Blocks could see nothing of each other, or a failing block could pass unnoticed."""
    page = tmp_path / "page.md"
    page.write_text('```python title="a.py"\nx = 2\n```\n\n- item\n\n  ```python\n  y = x + 1\n  ```\n')
    PAGE["run"](page)
    page.write_text(page.read_text() + "\n```python\nassert y == 4\n```\n")
    with pytest.raises(AssertionError) as caught:
        PAGE["run"](page)
    assert caught.traceback[-1].lineno + 1 == 12, "the traceback must point into the page"


def test_only_included_files_escape_execution():
    """Code could hide from these tests behind another name for Python (`py`, `python3`, `{ .py }`)."""
    included = re.compile(r'``` \{ \.py \}\n--8<-- "[^"\n]+"\n```')
    for page in PAGES:
        text = included.sub("", page.read_text())
        names = re.findall(r"^ *`{3,} *(\{? *\.?py\S*)", text, re.MULTILINE)
        assert set(names) <= {"python"}, f"{page}: {names}"
