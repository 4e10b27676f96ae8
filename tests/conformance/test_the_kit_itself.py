"""What a maker of a device sees of the kit: reports, known failures, capabilities, the command."""

from __future__ import annotations

import dataclasses
import io
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import warnings
import xml.etree.ElementTree as ET

import pytest
import torch

from amp_core import AmpError
from amp_core.cli import main
from amp_core.kernels import Portable
from amp_core.policy import OpPolicy
from amp_core.testing import BackendConformance, BackendFixtures, Loopback, check


class Host(BackendFixtures):
    device_type = "cpu"


class Wrong(Portable):
    def update_scale_(self, state, found_inf, schedule):
        pass


def test_the_command_checks_the_cpu_and_writes_every_report(tmp_path, capsys):
    """A vendor's report could be missing or could say something else than the exit code."""
    junit, page = tmp_path / "r.xml", tmp_path / "r.md"
    args = ["check", "cpu", "--area", "update", "--area", "dtypes", "--json"]
    assert main([*args, "--junit", str(junit), "--markdown", str(page)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"]
    assert {r["area"] for r in found["results"]} == {"update", "dtypes"}
    assert {"torch", "amp-core", "python"} <= set(found["versions"])
    assert len(ET.parse(junit).findall(".//testcase")) == len(found["results"])
    assert "| update | 6 | 0 | 0 | 0 |" in page.read_text()


class Untracked(Portable):
    """Writes past torch, as a kernel in another language does that gets addresses, and has one dtype."""

    def multiply_(self, grads, factor, found_inf=None):
        super().multiply_([grad.data for grad in grads], factor, found_inf)

    def grad_stats(self, grads, norm_type=2.0):
        found = super().grad_stats(grads, norm_type)
        return dataclasses.replace(found, norm=found.norm.float())


def test_a_failure_says_what_is_missing():
    """The maker of a device reads that something is wrong, and neither what is right nor what to call."""
    report = check(Loopback(kernels=Untracked()), keyword="multiply_of_special or grad_stats_norms")
    messages = {result.check: result.message for result in report.results}
    assert "torch.autograd.graph.increment_version(tensors)" in messages["multiply_of_special_numbers"]
    assert "is torch.float32 () in place of torch.float64 ()" in " ".join(messages.values())


@pytest.mark.parametrize(
    ("kernel", "result", "words"),
    [
        ("multiply_", torch.ones(()), "it returned a Tensor, and must return None"),
        ("update_scale_", [], "it returned a list, and must return None"),
        ("cast", torch.ones(2, 3), "it returned a Tensor, and must return a list"),
        (
            "grad_stats",
            (torch.ones(()),) * 4,
            "it returned a tuple, and must return an amp_core.kernels.GradStats",
        ),
    ],
)
def test_a_result_of_another_kind_is_named(kernel, result, words):
    """A maker reads of an attribute that a tuple lacks, or that a tensor is no bool, in code of the kit's."""
    kernels = type("Wrong", (Portable,), {kernel: lambda *_, **__: result})()
    report = check(Loopback(kernels=kernels), areas=[kernel.strip("_").replace("_scale", "")])
    messages = [each.message for each in report.results if each.outcome == "failed"]
    assert any(f"{kernel} of " in text and words in text for text in messages), messages


class Float32ByDefault(Loopback):
    def default_dtype(self):
        return torch.float32


class FindsNothing(Portable):
    def multiply_(self, grads, factor, found_inf=None):
        super().multiply_(grads, factor)

    def grad_stats(self, grads, norm_type=2.0):
        found = super().grad_stats(grads, norm_type)
        return dataclasses.replace(found, found_inf=torch.zeros(()))


@pytest.mark.parametrize(
    ("backend", "check_of", "words"),
    [
        (
            Float32ByDefault(),
            "default_dtype_is_supported",
            "default_dtype() is torch.float32, supported_dtypes() is",
        ),
        (
            Float32ByDefault(),
            "default_dtype_is_a_lower_precision",
            "torch.float32: return a dtype of 16 bits",
        ),
        (Loopback(kernels=FindsNothing()), "scaler_finds_one_bad", "the scale is 8.0, not 4.0, after an inf"),
        (
            Loopback(policy=OpPolicy.float32("cpu")),
            "regions_nest",
            "a product in a region inside a disabled one is",
        ),
        (
            Loopback(policy=OpPolicy.float32("cpu")),
            "region_computes_in_the_d",
            "ones @ ones is torch.float32, not",
        ),
    ],
)
def test_a_failure_of_regions_hooks_or_scaler_says_what_came(backend, check_of, words):
    """A maker whose pytest does not rewrite the kit's asserts reads "assert 4 < 4", or nothing at all."""
    (result,) = check(backend, keyword=check_of).results
    assert (result.outcome, words in result.message) == ("failed", True), result.message


def test_a_skip_says_whether_the_maker_or_the_default_asked_for_it():
    """A maker who declared nothing reads that the fixtures of the device declare it, and looks for where."""
    declared = type("Declared", (Host,), {"supports_compile": False})
    by_default = type("ByDefault", (Host,), {"default_dtype_is_torchs": False})
    for fixtures, text in (
        (declared, "the fixtures of cpu declare supports_compile = False"),
        (by_default, "supports_compile is False by default for cpu; fixtures may set it"),
    ):
        (result,) = check(Loopback(), keyword="region_compiles", fixtures=fixtures).results
        assert (result.outcome, result.message) == ("skipped", text)


def test_a_report_without_results_says_so():
    """The verdict ends in a colon, and its reader looks for the rest."""
    report = check("cpu", areas=["update"], keyword="nosuch")
    assert report.summary() == "does not pass a part: no check ran"
    assert "does not pass a part: no check ran" in report.to_svg()
    assert "No check ran." in report.to_markdown()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"device_type": Loopback}, "needs a device type or an instance of a Backend"),
        ({"device_type": None}, "needs a device type or an instance of a Backend"),
        ({"device_type": "cpu", "areas": "update"}, r"pass \['update'\]"),
    ],
)
def test_what_is_no_backend_or_area_is_refused(arguments, text):
    """Pytest's internal error, or areas of one letter."""
    with pytest.raises(TypeError, match=text):
        check(**arguments)


def test_no_two_areas_define_the_same_name():
    """One area's helper would take the place of another's in the class that has them all."""
    from amp_core.testing.suite import AREAS

    seen = {}
    for area, cls in AREAS.items():
        for name in vars(cls):
            if not name.startswith("__") and name != "AREA":
                assert seen.setdefault(name, area) == area, name


def test_the_command_shows_a_table_and_fails_with_the_kit(capsys):
    """The exit code and the name of the failing check are what CI and its reader see."""
    from amp_core.testing.fixtures import serving

    with serving(Loopback(kernels=Wrong())):
        assert main(["check", "cpu", "--area", "update"]) == 1
    out = capsys.readouterr().out
    assert "failed update_follows_the_schedule_through_long_histories" in out
    assert "does not pass" in out


SERVED_FIRST = """
from amp_core import get_backend
from amp_core.testing import Loopback
from amp_core.testing.fixtures import serving

with serving(Loopback()):
    get_backend("cuda")
print(get_backend("cpu"), get_backend("cuda"))
"""


def test_installed_backends_serve_again_after_the_kit():
    """A process that checks a backend before it uses any other would train with torch's generic ones."""
    run = [sys.executable, "-W", "ignore", "-c", SERVED_FIRST]
    printed = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    assert printed == "<CpuBackend for 'cpu'> <CudaBackend for 'cuda'>\n"


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["nosuch"], "No backend serves"),
        (["cpu", "--area", "nosuch"], "unknown areas"),
        (["xpu"], "cannot be"),
        (["cpu", "--fixtures", "nosuch:Npu"], "nosuch:Npu names no fixtures"),
        (["cpu", "--fixtures", "json:dumps"], "no subclass"),
        (["cpu", "--fixtures", "json:JSONDecoder"], "no subclass"),
        (["cpu", "--area", "update", "-k", "a or ("], "no expression 'a or ('"),
        (["cpu", "--markdown", "nosuch/r.md"], "nosuch/r.md: No such file or directory."),
        (["cpu", "--badge", "."], "Is a directory"),
    ],
)
def test_the_command_explains_what_it_cannot_check(args, text, capsys):
    """A traceback, or a green run of nothing, would be the answer to a mistyped name."""
    assert main(["check", *args]) == 2
    assert text in capsys.readouterr().err


def test_the_kit_does_not_run_without_assert_statements():
    """`python -O` leaves out what a check asserts, and a wrong backend passes."""
    backend = "from amp_core.testing import BackendConformance"
    for run in (["-m", "amp_core", "check", "cpu", "--area", "dtypes"], ["-c", backend]):
        done = subprocess.run([sys.executable, "-O", *run], capture_output=True, text=True, check=False)
        assert done.returncode
        assert "run it without -O" in done.stderr


@pytest.mark.parametrize("fixtures", [BackendFixtures, BackendConformance])
def test_every_class_of_fixtures_leaves_the_areas_as_chosen(fixtures):
    """A maker who passes his test class would get all areas; who passes the base, an error of Python."""
    report = check("cpu", areas=["update"], fixtures=fixtures)
    assert report.ok
    assert {r.area for r in report.results} == {"update"}


def test_what_ends_pytest_is_raised(monkeypatch):
    """A module that cannot be imported would be hidden by an error about a report of nothing."""

    def missing(_):
        raise ModuleNotFoundError("No module named 'torch_npu'")

    monkeypatch.setattr("amp_core.testing.runner.Collector._build", missing)
    with pytest.raises(ModuleNotFoundError, match="torch_npu"):
        check("cpu", areas=["update"])


class Stopped(BackendFixtures):
    """What a maker presses Ctrl-C in, while the kit runs."""

    @property
    def keeps_subnormals(self):
        raise KeyboardInterrupt


def test_an_interrupted_run_is_no_verdict(tmp_path, monkeypatch, capsys):
    """The checks before Ctrl-C pass, and a report says that the backend passes the kit."""
    report = tmp_path / "report.md"
    fixtures = f"{__name__}:Stopped"
    with pytest.raises(KeyboardInterrupt):
        check("cpu", areas=["cast"], fixtures=Stopped)
    words = ["check", "cpu", "--area", "cast", "--fixtures", fixtures, "--markdown", str(report)]
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(words) == 130
    out, err = capsys.readouterr()
    assert out == ""
    assert err.endswith("\r\x1b[Kamp: interrupted\n")  # not behind the name of a check
    assert not report.exists()


FILL = torch.utils.deterministic


def _ignore_children():
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    return lambda: signal.signal(signal.SIGCHLD, before)


def _patched(owner, name, value):
    def change():
        patch = pytest.MonkeyPatch()
        patch.setattr(owner, name, value)
        return patch.undo

    return change


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("the handlers of signals", _ignore_children),
        ("the standard streams", _patched(sys, "stderr", io.StringIO())),
        ("the display of warnings", _patched(warnings, "showwarning", print)),
        ("the hooks for errors", _patched(sys, "unraisablehook", print)),
        ("how processes start", _patched(multiprocessing, "get_start_method", lambda **_: "spawn")),
        ("the filling of empty tensors", _patched(FILL, "fill_uninitialized_memory", False)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_a_plugin_may_not_change_is_watched(name, change):
    """A backend that breaks `DataLoader`, or hides the errors of a program, would pass."""
    from amp_core.testing.suite.settings import settings

    (setting,) = [setting for setting in settings(Host()) if setting.name == name]
    before = setting.read()
    undo = change()
    try:
        assert setting.read() != before
    finally:
        undo()
    assert setting.read() == before


def test_a_known_failure_is_excused_by_name_and_only_while_it_fails():
    """A mended fault would stay on the list of known ones."""

    class Excused(BackendFixtures):
        known_failures = {"update_never_grows_past_float32": "the driver does this"}  # noqa: RUF012

    only = "update_never_grows_past_float32"
    assert check(Loopback(), keyword=only, fixtures=Excused).failed == [only]

    class AlsoWrong(Portable):
        def update_scale_(self, state, found_inf, schedule):
            state.growth_tracker.fill_(7)

    report = check(Loopback(kernels=AlsoWrong()), keyword=only, fixtures=Excused)
    assert [(r.outcome, r.message) for r in report.results] == [("known", "the driver does this")]


def test_a_known_failure_that_no_check_has_is_an_error():
    """A mistyped name would excuse nothing."""

    class Mistyped(BackendFixtures):
        known_failures = {"update_nosuch": "?"}  # noqa: RUF012

    report = check(Loopback(), areas=["availability"], fixtures=Mistyped)
    assert report.failed == ["known_failures_name_checks_that_exist"]


def test_a_run_of_one_area_takes_the_known_failures_of_others():
    """A backend with a known failure would fail each run of a part that leaves the check out."""

    class Excused(BackendFixtures):
        known_failures = {"update_never_grows_past_float32": "the driver does this"}  # noqa: RUF012

    only = "known_failures_name_checks_that_exist"
    assert check(Loopback(), areas=["availability"], keyword=only, fixtures=Excused).ok


def test_the_kit_runs_where_numpy_is_kept_out(monkeypatch):
    """All checks fail with "'NoneType' object has no attribute 'random'"."""
    monkeypatch.setitem(sys.modules, "numpy", None)
    assert check(Loopback(), areas=["add"], keyword="shapes").ok


def test_the_kit_puts_the_installed_backend_back():
    """Checking a backend would leave it in charge of the device."""
    from amp_core.plugin import get_backend

    before = get_backend("cpu")
    check(Loopback(), areas=["update"])
    assert get_backend("cpu") is before


def test_a_loopback_has_the_policy_it_is_given():
    """A policy without rules counts as none, and the kit checks torch's."""
    policy = OpPolicy("cpu")
    assert Loopback(policy=policy).op_policy() is policy
    assert len(Loopback().op_policy()) > 0


def test_a_failure_shows_values(tmp_path):
    """A third party's run would show a bare AssertionError."""
    (tmp_path / "conftest.py").write_text(
        'import pytest\npytest.register_assert_rewrite("amp_core.testing")\n'
    )
    (tmp_path / "test_it.py").write_text(
        "import torch\nfrom amp_core.testing import BackendConformance, Loopback\n"
        "class Wrong(Loopback):\n    def supported_dtypes(self):\n        return (torch.float16,)\n"
        "class TestIt(BackendConformance):\n    device_type = 'cpu'\n    backend = Wrong()\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "default_dtype_is_supported"],
        cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "assert torch.bfloat16 in (torch.float16,)" in done.stdout, done.stdout


def test_progress_names_each_check(monkeypatch, capsys):
    """A check on a slow device would look as if it hung."""
    seen = []
    report = check(Loopback(), areas=["update"], progress=seen.append)
    total = len(report.results)
    assert seen == [f"{i}/{total} {result.check}" for i, result in enumerate(report.results, 1)]
    args = ["check", "cpu", "--area", "update", "-k", "update_counts_far", "--json"]
    assert main(args) == 0
    assert not capsys.readouterr().err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(args) == 0
    shown = capsys.readouterr()
    assert "1/1 update_counts_far" in shown.err
    assert json.loads(shown.out)["ok"]


FAULTY = """
import os, time
from amp_core.cli import check, main
from amp_core.kernels import Portable
from amp_core.testing import Loopback
from amp_core.testing.fixtures import serving

check._LONG = 0.2

class Wrong(Portable):
    def update_scale_(self, state, found_inf, schedule):
        {fault}
        super().update_scale_(state, found_inf, schedule)

with serving(Loopback(kernels=Wrong())):
    main(["check", "cpu", "--area=update", "-k=update_reads_any"])
"""


@pytest.mark.parametrize("fault", ["os.abort()", "time.sleep(0.02)"])
def test_a_check_that_crashes_or_hangs_is_named(fault):
    """A CI job ends with no word but a signal's, and the maker cannot tell which kernel it was."""
    run = [sys.executable, "-W", "ignore", "-c", FAULTY.format(fault=fault)]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert "in test_update_reads_any_positive_flag" in done.stderr, done.stderr
    assert ("passes" in done.stdout) is (fault != "os.abort()")


def test_the_text_of_an_error_may_be_no_unicode(tmp_path):
    """The name of a driver's file with odd bytes would end a run of minutes without a report."""

    class Raises(Portable):
        def update_scale_(self, state, found_inf, schedule):
            raise OSError(os.fsdecode(b"lib\xff.so"))

    page = tmp_path / "r.md"
    check(Loopback(kernels=Raises()), areas=["update"], keyword="far").write(page)
    assert "lib\\udcff.so" in page.read_text()


def test_a_hook_that_panics_leaves_a_report():
    """A panic in Rust is no Exception in Python: all results would be lost with it."""

    class Panic(BaseException):
        pass

    class Panics(Loopback):
        def availability(self):
            raise Panic("index out of bounds")

        def supported_dtypes(self):
            raise Panic("index out of bounds")

    report = check(Panics(), areas=["availability"], keyword="reason_in_words")
    assert report.failed == ["availability_gives_a_reason_in_words"]
    assert "Panic: index out of bounds" in report.availability


def test_growth_by_chance_is_no_leak(monkeypatch):
    """What somebody else frees, then allocates, while the kit counts would fail a right backend."""
    count = sys.getallocatedblocks
    noise = iter([120, 80, 40, 0, 0, 40, 80, 120])
    monkeypatch.setattr(sys, "getallocatedblocks", lambda: count() + next(noise, 120))
    report = check(Loopback(), keyword="kernels_need_no_more_memory_with_every_call")
    assert report.ok, report.to_markdown()


@pytest.mark.slow
def test_the_whole_command_passes_for_the_cpu(capsys):
    """The first thing that anybody runs; or with the name of every area, which leaves out nothing."""
    from amp_core.testing.suite import AREAS

    for areas in ([], AREAS):
        assert main(["check", "cpu", *(f"--area={name}" for name in areas)]) == 0
        assert "\npasses: " in capsys.readouterr().out


SHOWN = """
from amp_core.kernels import Portable
from amp_core.testing import Loopback, check

class Wrong(Portable):
    def update_scale_(self, state, found_inf, schedule):
        pass

report = check(Loopback(kernels=Wrong()), areas=["update"])
failed = [r for r in report.results if r.outcome == "failed"]
assert failed
for result in failed:
    assert result.message.strip() != "AssertionError", result.check
assert any("assert " in result.message and "==" in result.message for result in failed), failed
"""


def test_a_failed_check_shows_values():
    """A maker of a device reads "AssertionError" and nothing else."""
    subprocess.run([sys.executable, "-W", "ignore", "-c", SHOWN], check=True)


def run_pytest(folder, *args):
    words = ["-q", "-p", "no:cacheprovider", "-p", "amp_core.testing.pytest_plugin", *args]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_the_kit_as_a_pytest_plugin(tmp_path):
    """A project's own run could lose tests, blame kernels for what a plugin does, or take a part for all."""
    (tmp_path / "test_own.py").write_text("def test_own_update():\n    pass\n")
    phases = ("setup", "teardown")  # in each of which pytest-randomly seeds anew
    seeding = [f"def pytest_runtest_{phase}():\n    random.seed('{phase}')\n" for phase in phases]
    (tmp_path / "seeding.py").write_text("\n\n".join(["import random", *seeding]))
    files = {name: tmp_path / name for name in ("r.json", "r.md", "r.svg")}
    reports = [f"--amp-report={path}" for path in files.values()]
    done = run_pytest(tmp_path, "-p", "seeding", "--amp-device=cpu", "-k", "update", *reports)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(files["r.json"].read_text())
    assert {r["area"] for r in found["results"]} == {"update"}
    assert f"{len(found['results']) + 1} passed" in done.stdout
    assert "amp-core conformance kit: cpu passes a part: " in done.stdout
    assert found["capabilities"]["default dtype"] == "bfloat16"
    assert "cpu: passes a part of the amp-core conformance kit" in files["r.md"].read_text()
    badge = ET.parse(files["r.svg"]).getroot()
    texts = {text.text for text in badge.iter()}
    assert f"passes a part: {len(found['results'])} passed" in texts
    assert "conformance kit" not in run_pytest(tmp_path).stdout


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("--amp-device=nosuch", "No backend"),
        ("--amp-device=xpu", "'xpu' cannot be checked here"),
        ("--amp-report=r.txt", "r.txt"),
        ("--amp-report=nosuch/r.md", "nosuch/r.md: No such file or directory."),
    ],
)
def test_the_plugin_refuses_what_it_cannot_do_before_it_runs(tmp_path, option, text):
    """A mistyped name would end in a traceback, or after minutes without a report."""
    done = run_pytest(tmp_path, "--amp-device=cpu", option)
    assert done.returncode == 4
    assert text in done.stderr
    assert "Traceback" not in done.stderr


def test_an_interrupted_run_of_the_plugin_writes_no_report(tmp_path):
    """The badge of a run that Ctrl-C ended after some checks says that the backend passes."""
    (tmp_path / "stop.py").write_text("def pytest_runtest_logfinish():\n    raise KeyboardInterrupt\n")
    options = ["-p", "stop", "-k", "update", "--amp-device=cpu", "--amp-report=badge.svg"]
    done = run_pytest(tmp_path, *options)
    assert done.returncode == pytest.ExitCode.INTERRUPTED
    assert "passes" not in done.stdout
    assert not (tmp_path / "badge.svg").exists()


def test_a_run_of_the_plugin_that_another_plugin_stops_is_a_part(tmp_path):
    """A limit on the time of a session ends it after some checks, and the report says that all passed."""
    stop = "def pytest_runtest_setup(item):\n    item.session.shouldfail = 'the time is over'\n"
    (tmp_path / "stop.py").write_text(stop)
    done = run_pytest(tmp_path, "-p", "stop", "--amp-device=cpu")
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert "amp-core conformance kit: cpu passes a part: 1 passed" in done.stdout


def test_the_plugin_needs_a_device(tmp_path):
    """A run without the device's name would end well, with no report."""
    done = run_pytest(tmp_path, "--amp-report=r.md")
    assert done.returncode == 4
    assert "need --amp-device=DEVICE" in done.stderr


def test_a_device_that_torch_does_not_know_is_named_with_the_reason():
    """A maker whose package is not imported reads torch's list of devices, once for each check."""

    class Missing(BackendFixtures):
        device_type, backend = "npx", Loopback()

    with pytest.raises(AmpError, match=rf"no device type 'npx': {Loopback().availability().reason}"):
        _ = Missing().device
