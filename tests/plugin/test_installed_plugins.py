"""Plugin packages, good and broken, installed by pip and loaded in a process of their own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

LIST = """
import json, warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import amp_core
    status = amp_core.backends()
print(json.dumps({
    "status": {name: [s.status, s.reason, s.distribution, s.version] for name, s in status.items()},
    "warnings": [[w.category.__name__, str(w.message)] for w in caught],
    "files": sorted({w.filename for w in caught}),
}))
"""


@pytest.fixture(scope="module")
def listed(run: Any) -> Any:
    """What a process sees that lists all backends."""
    return run(LIST)


def test_the_good_one_works_among_the_broken(listed: Any) -> None:
    """One broken plugin stops another, or our own backends, from loading."""
    assert listed["status"]["good"] == ["available", "always there", "amp-backend-good", "3.1"]
    assert listed["status"]["cpu"][0] == "available"
    assert listed["status"]["cpu"][2] == "amp-core"


def test_each_broken_one_is_named_once(listed: Any, broken: list[str]) -> None:
    """A broken plugin is left out in silence, or the message does not say whose fault it is."""
    assert {category for category, _ in listed["warnings"]} == {"PluginWarning"}
    texts = [text for _, text in listed["warnings"]]
    assert len(texts) == len(broken)
    for name in broken:
        (text,) = [
            t for t in texts if t.startswith(f"plugin {name!r} (amp-backend-{name} 3.1) failed at stage")
        ]
        assert f"AMP_DISABLE_BACKENDS={name}" in text
        assert "AMP_STRICT_PLUGINS=1" in text
        if name != "twin":
            assert listed["status"][name][0] == "failed"


@pytest.mark.parametrize(
    ("name", "stage", "cause"),
    [
        ("asking", "import", "RuntimeError: saw good: True"),
        ("missing", "import", "ModuleNotFoundError: No module named 'a_library_that_nobody_has'"),
        ("syntax", "import", "SyntaxError"),
        ("raising", "import", "OSError: libfoo.so"),
        ("version", "register", "implements backend API 99; this amp_core supports 1"),
        (
            "unversioned",
            "register",
            "does not say which version of the backend API it implements",
        ),
        (
            "aclass",
            "register",
            "is no amp_core.plugin.Backend instance; call registry.add(GoodBackend())",
        ),
        ("greedy", "register", "wants to serve device type 'cpu', which plugin 'cpu' (amp-core"),
        ("argument", "register", "config"),
        ("misspelt", "register", "amp_register_backend"),
        ("halfway", "register", "RuntimeError: half done"),
        ("silent", "register", "registered no backend"),
        ("nameless", "register", "must set device_type"),
        ("indexed", "register", "without an index; it is 'indexed:0'"),
        ("capital", "register", "in lower case and without an index; it is 'Capital'"),
        ("base", "import", "Skipped: no device. The plugin was skipped"),
        ("abstract", "register", "default_dtype"),
        ("exits", "import", "SystemExit: no licence"),
        ("later", "requirements", "it requires 'amp-core>=2', but amp-core 0.1.0 is installed"),
        ("twin", "register", "which plugin 'good' (amp-backend-good 3.1) already serves"),
        ("hpu", "register", "is named 'hpu', but it registered a backend for 'hqu' only"),
    ],
)
def test_stage_and_cause(listed: Any, name: str, stage: str, cause: str) -> None:
    """The message for a kind of fault does not say where it happened or what it was."""
    (text,) = [text for _, text in listed["warnings"] if text.startswith(f"plugin {name!r}")]
    assert f"failed at stage {stage!r}" in text
    assert cause in text


def test_the_warning_stands_where_the_user_asked(listed: Any) -> None:
    """The warning shows a line of amp-core's own, which its reader cannot do anything about."""
    asking = [f for f in listed["files"] if f != "<string>"]  # a plugin that lists backends itself
    assert len(asking) < len(listed["files"])
    assert all("amp_backend_asking" in f for f in asking)


def test_two_claims_to_one_name_are_both_shown(listed: Any) -> None:
    """A device that works hides that another plugin wanted it too."""
    status, reason, distribution, _ = listed["status"]["greedy"]
    assert (status, distribution) == ("failed", "amp-backend-greedy")
    assert "'cpu'" in reason
    assert listed["status"]["cpu"][0] == "available"


def test_one_module_for_several_device_types(run: Any, listed: Any) -> None:
    """A plugin is found only under the names of its entry points, or fails under the second of them."""
    for name in ("pair", "unannounced"):
        status, reason, *_ = listed["status"][name]
        assert status == "failed"
        assert f"serves device type {name!r}, which torch does not know. Import the package" in reason
    code = """
    import json, warnings, amp_core
    warnings.simplefilter("ignore")
    print(json.dumps([amp_core.get_backend(name).device_type for name in ("unannounced", "pair")]))
    """
    assert run(code) == ["unannounced", "pair"]
    quiet = run(LIST, AMP_DISABLE_BACKENDS="unannounced")
    assert quiet["status"]["unannounced"][:2] == ["disabled", "AMP_DISABLE_BACKENDS names it"]
    assert "torch does not know" in quiet["status"]["pair"][1]


def test_what_a_plugin_changes_as_it_loads_is_put_back(run: Any, tmp_path: Path, changing: str) -> None:
    """A region for a new device makes the rest of the program compute in another dtype, or otherwise.

    A library that is built for speed flushes subnormals as it is loaded, and a driver may bind the thread.
    """
    (tmp_path / "amp_backend_changing.py").write_text(changing)
    folder = tmp_path / "amp_backend_changing-3.1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: amp-backend-changing\nVersion: 3.1\n")
    (folder / "entry_points.txt").write_text("[amp_core.backends]\nchanging = amp_backend_changing\n")
    code = f"""
    import json, os, sys, warnings, torch, amp_core
    sys.path.insert(0, {str(tmp_path)!r})
    def state():
        settings = torch.get_default_dtype(), torch.get_default_device(), os.getcwd()
        cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        return [*map(str, settings), torch.get_rng_state().tolist(), 5e-324 * float("1") > 0, cpus]
    before = state()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        amp_core.get_backend("changing")
    print(json.dumps([state() == before, [str(w.message) for w in caught]]))
    """
    same, (text,) = run(code)
    assert same
    assert text.startswith(
        "plugin 'changing' (amp-backend-changing 3.1) changed the default dtype (torch.float32 to "
        "torch.float64), the default device (cpu to meta), torch's generator, the working directory ("
    )
    assert "the flushing of subnormals (False to True)" in text or not torch.set_flush_denormal(False)
    if hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) > 1:
        assert "the CPUs of the thread (" in text


def test_a_disabled_built_in_leaves_no_room(run: Any) -> None:
    """Where the CPU is switched off, a plugin takes its place in silence."""
    code = """
    import json, warnings, amp_core
    warnings.simplefilter("ignore")
    reason = amp_core.backends()["greedy"].reason
    try:
        amp_core.get_backend("cpu")
    except amp_core.BackendDisabledError:
        print(json.dumps(reason))
    """
    reason = run(code, AMP_DISABLE_BACKENDS="cpu")
    assert "wants to serve device type 'cpu', which is amp-core's own" in reason


BAD_METADATA = {
    "no line": {"entry_points.txt": "[amp_core.backends]\nno equals sign\n", "METADATA": "Name: bad\n"},
    "no name": {"entry_points.txt": "[amp_core.backends]\nhalf = amp_backend_half.hooks\n"},
    "no module": {"entry_points.txt": "[amp_core.backends]\nhalf = two words\n", "METADATA": "Name: bad\n"},
}


@pytest.mark.parametrize("kind", BAD_METADATA)
def test_bad_metadata_of_one_hides_no_other(run: Any, tmp_path: Path, kind: str) -> None:
    """A half-removed or malformed distribution anywhere on the path makes every plugin unusable."""
    folder = tmp_path / "bad-1.0.dist-info"
    folder.mkdir()
    for name, text in BAD_METADATA[kind].items():
        (folder / name).write_text(text)
    code = f"""
    import json, sys, warnings, torch, amp_core  # torch reads the metadata too, and has no such care
    sys.path.insert(0, {str(tmp_path)!r})
    warnings.simplefilter("ignore")
    status = amp_core.backends()
    print(json.dumps([status["good"].status, status["half"].status if "half" in status else ""]))
    """
    assert run(code) == ["available", "" if kind == "no line" else "failed"]


def test_half_a_registration_is_undone(run: Any) -> None:
    """A plugin that raises after adding a backend leaves it behind."""
    code = """
    import json, warnings, amp_core
    warnings.simplefilter("ignore")
    try:
        amp_core.get_backend("halfway")
    except amp_core.BackendLoadError as error:
        print(json.dumps([str(error), repr(error.__cause__)]))
    """
    text, cause = run(code)
    assert text.startswith("The backend for 'halfway' is installed but failed to load: plugin 'halfway'")
    assert cause == "RuntimeError('half done')"


def test_nothing_of_others_is_imported_for_the_cpu(run: Any) -> None:
    """Using the CPU imports a third party's code."""
    code = """
    import json, sys, amp_core, torch
    with amp_core.autocast("cpu"):
        pass
    print(json.dumps([m for m in sys.modules if m.startswith("amp_backend_")]))
    """
    assert set(run(code)) <= {"amp_backend_cpu", "amp_backend_cpu.hooks", "amp_backend_cpu.backend"} | {
        m for m in run(code) if m.startswith("amp_backend_cpu.")
    }


def test_one_plugin_is_loaded_on_demand(run: Any) -> None:
    """Asking for one plugin's device imports the others."""
    code = """
    import json, sys, amp_core
    backend = amp_core.get_backend("good")
    names = sorted({m.split(".")[0] for m in sys.modules if m.startswith("amp_backend_")})
    print(json.dumps([type(backend).__name__, names]))
    """
    name, modules = run(code)
    assert name == "GoodBackend"
    assert set(modules) == {f"amp_backend_{name}" for name in ("cpu", "cuda", "good", "torch", "xpu")}


def test_disabled_and_not_autoloaded(run: Any, broken: list[str]) -> None:
    """The switches that keep plugins from loading do not."""
    quiet = run(LIST, AMP_DISABLE_BACKENDS=",".join([*broken, "", " xpu"]))
    assert quiet["warnings"] == []
    assert quiet["status"]["good"][0] == "available"
    assert quiet["status"]["xpu"][:2] == ["disabled", "AMP_DISABLE_BACKENDS names it"]
    alone = run(LIST, AMP_PLUGIN_AUTOLOAD="0")
    assert alone["warnings"] == []
    assert "good" not in alone["status"]
    assert alone["status"]["cpu"][0] == "available"


def test_strict(run: Any) -> None:
    """AMP_STRICT_PLUGINS=1 does not raise, so that a plugin's CI stays green."""
    code = """
    import json, amp_core
    seen = []
    for _ in range(2):
        try:
            amp_core.get_backend("raising")
        except amp_core.BackendLoadError as error:
            seen.append([str(error), type(error.__cause__).__name__])
    for _ in range(2):
        try:
            amp_core.backends()
        except amp_core.BackendLoadError as error:
            seen.append([str(error), type(error.__cause__).__name__])
    print(json.dumps(seen))
    """
    seen = run(code, AMP_STRICT_PLUGINS="1", AMP_DISABLE_BACKENDS="aclass,abstract,argument,asking,greedy")
    assert len(seen) == 4
    for text, cause in seen[:2]:
        assert text.startswith("plugin 'raising' (amp-backend-raising 3.1) failed at stage 'import'")
        assert cause == "OSError"
    assert seen[2] == seen[3]


def test_a_misspelt_strictness(run: Any) -> None:
    """A CI misspells strictness, and does not hear of it until a plugin breaks."""
    code = """
    import json, amp_core
    try:
        amp_core.get_backend("good")
    except ValueError as error:
        print(json.dumps(str(error)))
    """
    assert "AMP_STRICT_PLUGINS='maybe' is not a switch" in run(code, AMP_STRICT_PLUGINS="maybe")


def test_an_interrupted_load_can_be_repeated(run: Any) -> None:
    """Ctrl-C while a plugin loads leaves it neither loaded nor failed."""
    code = """
    import builtins, json, sys, amp_core
    real = builtins.__import__
    def interrupted(name, *args):
        if name == "amp_core.plugin" and "amp_backend_good.hooks" in sys.modules:
            raise KeyboardInterrupt
        return real(name, *args)
    builtins.__import__ = interrupted
    try:
        amp_core.get_backend("good")
    except KeyboardInterrupt:
        builtins.__import__ = real
        print(json.dumps(type(amp_core.get_backend("good")).__name__))
    """
    assert run(code) == "GoodBackend"


def test_a_switch_that_is_neither_on_nor_off(run: Any) -> None:
    """A misspelt switch is taken for off."""
    code = """
    import json, amp_core
    try:
        amp_core.backends()
    except ValueError as error:
        print(json.dumps(str(error)))
    """
    assert "AMP_PLUGIN_AUTOLOAD='maybe' is not a switch; use one of" in run(code, AMP_PLUGIN_AUTOLOAD="maybe")


def test_many_threads_ask_at_once(run: Any) -> None:
    """A plugin is loaded twice, or half loaded, when threads race for it."""
    code = """
    import json, threading, amp_core
    got, start = [], threading.Barrier(8)
    def ask():
        start.wait()
        got.append(amp_core.get_backend("good"))
    threads = [threading.Thread(target=ask) for _ in range(8)]
    for t in threads: t.start()
    for t in threads: t.join()
    print(json.dumps([len(got), len(set(map(id, got)))]))
    """
    assert run(code) == [8, 1]


def test_stale_metadata_cannot_lose_the_cpu(run: Any) -> None:
    """Where amp-core's metadata is lost, its own backends are too."""
    code = """
    import importlib.metadata as metadata, json
    def lost(name): raise metadata.PackageNotFoundError(name)
    metadata.version = lost
    metadata.entry_points = lambda **_: ()
    import amp_core
    print(json.dumps(amp_core.get_backend("cpu").availability().usable))
    """
    assert run(code) is True
