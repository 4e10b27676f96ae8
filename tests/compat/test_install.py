"""`install`, `uninstall` and ``python -m amp_compat``."""

from __future__ import annotations

import ast
import functools
import multiprocessing
import pickle
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import amp_compat
import amp_core
from amp_compat._install import _NAMES

SCRIPT = Path(__file__).parent / "data" / "old_training.py"


@pytest.fixture
def installed() -> Iterator[None]:
    """Have amp_compat installed for one test."""
    amp_compat.install()
    yield
    amp_compat.uninstall()


def user_module(name: str) -> types.ModuleType:
    """A module of a user's, with a name taken from torch.cuda.amp."""
    module = types.ModuleType(name)
    exec("from torch.cuda.amp import autocast as ac, GradScaler\nimport torch.cuda.amp as amp", vars(module))
    sys.modules[name] = module
    return module


def test_modules_before_and_after() -> None:
    """Names taken before and after install() are ours while it lasts and torch's again afterwards."""
    theirs = torch.cuda.amp.autocast
    before = user_module("user_before")
    try:
        amp_compat.install()
        after = user_module("user_after")
        for module in (before, after):
            assert (
                module.ac.__module__ == module.amp.autocast.__module__ == "amp_compat.cuda.amp.autocast_mode"
            )
            assert module.GradScaler.__module__ == "amp_compat.cuda.amp.grad_scaler"
        amp_compat.uninstall()
        for module in (before, after):
            assert module.ac is module.amp.autocast is torch.cuda.amp.autocast_mode.autocast is theirs
    finally:
        amp_compat.uninstall()
        del sys.modules["user_before"], sys.modules["user_after"]


def test_twice_is_once(installed: None) -> None:
    """A second install() changes nothing, and one uninstall() undoes both."""
    ours = torch.cuda.amp.autocast
    amp_compat.install()
    assert torch.cuda.amp.autocast is ours
    amp_compat.uninstall()
    assert torch.cuda.amp.autocast.__module__ == "torch.cuda.amp.autocast_mode"


def test_torch_amp_is_replaced(installed: None) -> None:
    """`install` leaves alone torch.amp, which the trainers of today use."""
    assert torch.autocast is torch.amp.autocast is torch.amp.autocast_mode.autocast is amp_core.autocast
    assert torch.GradScaler is torch.amp.GradScaler is amp_core.GradScaler
    x = torch.ones(2, 2)
    with torch.autocast("cpu"):
        assert torch.mm(x, x).dtype == torch.bfloat16
    amp_compat.uninstall()
    assert torch.autocast.__module__ == "torch.amp.autocast_mode"
    assert torch.GradScaler.__module__ == "torch.amp.grad_scaler"


@pytest.mark.parametrize("device", ["foo", None])
def test_an_unknown_device_under_the_old_names(installed: None, device: str | None) -> None:
    """What lists the devices of torch asks under torch's name, is answered by us, and so on for ever."""
    with pytest.warns(amp_core.AmpWarning, match="scale will be on the device of the first loss"):
        assert torch.amp.GradScaler(device).is_enabled()  # type: ignore[arg-type]
    with pytest.raises(amp_core.BackendNotFoundError, match="foo"):
        torch.autocast("foo")


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    "old", [torch.amp.GradScaler, torch.cpu.amp.GradScaler], ids=["current", "deprecated"]
)
def test_a_scaler_that_torch_pickled(old: Callable[..., torch.amp.GradScaler]) -> None:
    """A checkpoint that holds a scaler, not its state_dict, raises at its first use after install()."""
    theirs = functools.partial(old, "cpu") if old is torch.amp.GradScaler else old
    scaler = theirs(64.0, growth_factor=4.0, growth_interval=3)
    scaler._init_growth_tracker = 2
    pickled = pickle.dumps(scaler), pickle.dumps(theirs(enabled=False))
    amp_compat.install()
    try:
        scaler, disabled = map(pickle.loads, pickled)
    finally:
        amp_compat.uninstall()
    assert isinstance(scaler, amp_core.GradScaler)
    assert isinstance(scaler, old)
    param = torch.nn.Parameter(torch.ones(2))
    scaler.scale(param.sum()).backward()
    scaler.step(torch.optim.SGD([param], lr=1.0))
    scaler.update()
    assert (scaler.get_scale(), param.tolist()) == (256.0, [0.0, 0.0])
    assert disabled.scale(3) == 3
    assert "enabled=False" in repr(disabled)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("old", [torch.autocast, torch.cpu.amp.autocast], ids=["current", "deprecated"])
def test_a_region_that_torch_pickled(old: Callable[..., torch.autocast]) -> None:
    """A pickled model that holds a region raises after install()."""
    pickled = pickle.dumps(old("cpu", torch.float16) if old is torch.autocast else old(True, torch.float16))
    amp_compat.install()
    try:
        region = pickle.loads(pickled)
    finally:
        amp_compat.uninstall()
    assert isinstance(region, amp_core.autocast)
    with region:
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.float16


OWN_REGION = """
import torch

class Own(torch.autocast):
    def __init__(self, level):
        super().__init__("cpu", torch.float16)
        self.level = level
"""


def test_an_own_region_that_torch_pickled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A region of a program's own class comes without its own attributes out of a checkpoint of before."""
    module = types.ModuleType("user_regions")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(OWN_REGION, vars(module))
    pickled = pickle.dumps(module.Own(level=3))
    amp_compat.install()
    try:
        exec(OWN_REGION, vars(module))  # as in the process that loads
        region = pickle.loads(pickled)
    finally:
        amp_compat.uninstall()
    assert isinstance(region, amp_core.autocast)
    assert region.level == pickle.loads(pickle.dumps(region)).level == 3
    with region:
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.float16


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning", "ignore:.*CUDA is not available:UserWarning")
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_instances_of_the_class_from_before(device: str) -> None:
    """A table of classes that a library filled before install() has no entry for the scaler."""
    before = getattr(torch, device).amp.GradScaler
    amp_compat.install()
    try:
        scaler = getattr(torch, device).amp.GradScaler()
    finally:
        amp_compat.uninstall()
    assert isinstance(scaler, amp_core.GradScaler)
    assert isinstance(scaler, before)


REPLACED = {f"torch.{name}" for name in ("autocast", "GradScaler")} | {f"torch.amp.{name}" for name in _NAMES}


def test_no_function_looks_up_what_install_replaces() -> None:
    """A function finds our own object where it wants torch's, and calls itself."""
    for file in Path(amp_core.__file__).parent.rglob("*.py"):
        for function in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
                inside = [node for part in function.body for node in ast.walk(part)]
                used = {ast.unparse(node) for node in inside if isinstance(node, ast.Attribute)}
                assert not used & REPLACED, f"{file.name}, {function.name}: {used & REPLACED}"


def test_only_deprecated_names_on_request() -> None:
    """``deprecated_only`` replaces torch.amp too; or a whole install() after it replaces nothing more."""
    try:
        amp_compat.install(deprecated_only=True)
        assert torch.cuda.amp.autocast.__module__ == "amp_compat.cuda.amp.autocast_mode"
        assert torch.autocast.__module__ == "torch.amp.autocast_mode"
        amp_compat.install()
        assert torch.autocast is amp_core.autocast
    finally:
        amp_compat.uninstall()
    assert torch.autocast.__module__ == "torch.amp.autocast_mode"


def test_a_line_says_what_is_replaced() -> None:
    """A program cannot tell whether `install` did anything."""
    user_module("user_before")
    try:
        line = amp_compat.install()
        assert line.startswith("amp_compat: amp-core replaces torch.amp, torch.cpu.amp, torch.cuda.amp (")
        assert "user_before" in line
        assert amp_compat.install() == line
        amp_compat.uninstall()
        assert "torch.amp" not in amp_compat.install(deprecated_only=True)
    finally:
        amp_compat.uninstall()
        del sys.modules["user_before"]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the old script, warnings on."""
    command = [sys.executable, "-W", "always::FutureWarning", *words, str(SCRIPT), "--epochs", "2"]
    return subprocess.run(command, capture_output=True, text=True, check=True)


def test_old_script_runs_unmodified() -> None:
    """A script of 2020 gives under ``python -m amp_compat`` the losses that it gives alone, over amp_core."""
    alone, ours = run(), run("-m", "amp_compat")
    assert ours.stdout.splitlines()[:2] == alone.stdout.splitlines()[:2]
    assert ours.stdout.splitlines()[2] == "scaler amp_compat.cuda.amp.grad_scaler"
    assert alone.stderr.count("FutureWarning") == ours.stderr.count("FutureWarning") > 0
    assert ours.stderr.count(f"{SCRIPT}:") >= ours.stderr.count("FutureWarning")
    assert ours.stderr.startswith("amp_compat: amp-core replaces torch.amp, ")


SPAWNS = """
import multiprocessing, pickle, sys
import torch
from torch.amp import autocast

def tell(method):
    names = torch.GradScaler, autocast, torch.cuda.amp.GradScaler
    print(method, *[name.__module__ for name in names], len(sys.argv))

if __name__ == "__main__":
    for method in sys.argv[1:]:
        process = multiprocessing.get_context(method).Process(target=tell, args=(method,))
        process.start()
        process.join()
    assert b"amp_compat" not in pickle.dumps(sys.argv)
"""


@pytest.mark.parametrize("options", [("spawns.py",), ("--deprecated-only", "-m", "spawns")])
def test_processes_that_a_program_starts(options: tuple[str, ...], tmp_path: Path) -> None:
    """Ranks that the program spawns train with torch's classes, unlike those that it forks."""
    (tmp_path / "spawns.py").write_text(SPAWNS)
    methods = multiprocessing.get_all_start_methods() if len(options) == 1 else ["spawn"]
    command = [sys.executable, "-m", "amp_compat", *options, *methods]
    run = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    current = ("amp_core.scaling.grad_scaler", "amp_core.regions.region")
    if "--deprecated-only" in options:
        current = ("torch.amp.grad_scaler", "torch.amp.autocast_mode")
    said = " ".join([*current, "amp_compat.cuda.amp.grad_scaler", str(len(methods) + 1)])
    assert run.stdout.splitlines() == [f"{method} {said}" for method in methods], run.stderr


def test_uninstall_leaves_alone_what_was_ours_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that imported amp_core's classes by itself is given torch's by uninstall()."""
    module = types.ModuleType("a_user_of_amp_core")
    module.GradScaler = amp_core.GradScaler  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    amp_compat.install()
    amp_compat.uninstall()
    assert module.GradScaler is amp_core.GradScaler


def test_uninstall_leaves_alone_what_a_module_has_bound_since(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that a program has given another meaning, or deleted, since install() ends uninstall()."""
    module = types.ModuleType("a_user_of_torch")
    module.autocast = torch.autocast  # type: ignore[attr-defined]
    module.GradScaler = torch.amp.GradScaler  # type: ignore[attr-defined]
    module.scaler = module.GradScaler  # type: ignore[attr-defined]
    theirs = torch.amp.GradScaler
    monkeypatch.setitem(sys.modules, module.__name__, module)
    amp_compat.install()
    module.autocast = own = object()  # type: ignore[attr-defined]
    del module.GradScaler  # type: ignore[attr-defined]
    amp_compat.uninstall()
    assert module.autocast is own
    assert not hasattr(module, "GradScaler")
    assert module.scaler is torch.amp.GradScaler is theirs


def test_several_threads_install_and_uninstall(in_threads: Callable[..., None]) -> None:
    """A name of torch's stays ours for good, because one thread saw half of what another did."""
    theirs = [getattr(torch.amp, name) for name in ("autocast", "GradScaler", "custom_fwd")]
    in_threads(amp_compat.install, amp_compat.uninstall, amp_compat.install, amp_compat.uninstall, seconds=1)
    amp_compat.install()
    assert torch.amp.GradScaler is amp_core.GradScaler
    amp_compat.uninstall()
    assert [getattr(torch.amp, name) for name in ("autocast", "GradScaler", "custom_fwd")] == theirs
