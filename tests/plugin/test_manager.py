"""Getting, listing and replacing backends in this process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch

import amp_backend_cpu.hooks
import amp_core
from amp_core.plugin import (
    Availability,
    Backend,
    Registry,
    default_manager,
    entry_points,
    hookimpl,
    replace_backend,
)
from amp_core.plugin.manager import Manager
from amp_core.plugin.registry import Owner
from amp_core.plugin.surroundings import restored


class Npu(Backend):
    """Another backend for a device type of torch's."""

    device_type = "hpu"
    api_version = 1

    def availability(self) -> Availability:
        return Availability(False, "no card in the slot")

    def default_dtype(self) -> torch.dtype:
        return torch.bfloat16

    def supported_dtypes(self) -> tuple[torch.dtype, ...]:
        return (torch.bfloat16,)


@pytest.fixture
def replaced() -> Iterator[Backend]:
    """Serve hpu with another backend for one test."""
    backend = Npu()
    replace_backend(backend)
    yield backend
    default_manager.manager().registry.drop(Owner(__name__), frozenset({"hpu"}))


def test_replacing_a_backend(replaced: Backend) -> None:
    """A backend cannot be put in the place of another on purpose."""
    assert amp_core.get_backend("hpu") is replaced
    assert amp_core.backends()["hpu"].reason == "no card in the slot"
    with pytest.warns(UserWarning, match="In HPU autocast, but the target dtype is not supported"):
        amp_core.autocast("hpu", dtype=torch.float16)


def test_plugins_of_entry_points_stay() -> None:
    """Its hooks for events are gone, but the backends serve on."""
    amp_core.get_backend("cpu")
    with pytest.raises(ValueError, match=r"by its entry point, .* Set AMP_DISABLE_BACKENDS"):
        amp_core.plugin.unregister(amp_backend_cpu.hooks)
    assert default_manager.manager()._pluggy.is_registered(amp_backend_cpu.hooks)


def test_backends_is_read_only() -> None:
    """A caller can change what others see."""
    with pytest.raises(TypeError):
        amp_core.backends()["cpu"] = None  # type: ignore[index]


def test_unknown_devices_get_near_names() -> None:
    """The error for a misspelt device offers nothing."""
    for name, near in (("gpu", "cuda"), ("cuad", "cuda"), ("rocm", "cuda"), ("CPU", "cpu")):
        with pytest.raises(amp_core.BackendNotFoundError, match=f"Did you mean '{near}'"):
            amp_core.get_backend(name)
    with pytest.raises(amp_core.BackendNotFoundError, match="To add a device, install a package"):
        amp_core.get_backend("meta")
    for name in ("auto", "cuda:0", ""):  # no package can add these
        with pytest.raises(amp_core.BackendNotFoundError, match="'cuda', without an index"):
            amp_core.get_backend(name)


def test_an_unknown_device_says_that_packages_are_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has installed the package of the device is told to install it."""
    off = "AMP_PLUGIN_AUTOLOAD is off, so no such package is loaded"
    for value, said in (("0", True), ("1", False)):
        monkeypatch.setenv("AMP_PLUGIN_AUTOLOAD", value)
        with pytest.raises(amp_core.BackendNotFoundError) as caught:
            amp_core.get_backend("meta")
        assert (off in str(caught.value)) is said


def test_a_disabled_backend_says_by_what(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error for a disabled device sends its user looking for a package."""
    monkeypatch.setenv("AMP_DISABLE_BACKENDS", "some_npu")
    with pytest.raises(amp_core.BackendDisabledError, match="switched off by AMP_DISABLE_BACKENDS=some_npu"):
        amp_core.get_backend("some_npu")


def test_two_owners() -> None:
    """The second plugin for a device replaces the first in silence."""
    registry = Registry()
    registry.add(Npu())
    conflict = pytest.raises(amp_core.BackendConflictError, match="wants to serve device type 'hpu', which")
    with registry.claimed(Owner("other")), conflict:
        registry.add(Npu())


@pytest.mark.parametrize("device", ["cpu", "cuda", "xpu", "mps", "mtia", "hpu", "maia", "xla"])
def test_dtypes_agree_with_torch(device: str) -> None:
    """A default dtype differs from torch's for the device."""
    backend = amp_core.get_backend(device)
    assert backend.default_dtype() is torch.get_autocast_dtype(device)
    assert backend.default_dtype() in backend.supported_dtypes()
    assert backend.availability().reason


RENAMED = """
import types, torch, amp_core
assert amp_core.get_backend("privateuseone").device_type == "privateuseone"  # before it has a name
assert not amp_core.get_backend("privateuseone").availability().usable
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
_setup_privateuseone_for_python_backend("foo")
torch.foo.get_amp_supported_dtype = lambda: [torch.bfloat16]
for name in ("privateuseone", "foo"):
    backend = amp_core.get_backend(name)
    assert (backend.device_type, backend.supported_dtypes()) == ("foo", (torch.bfloat16,)), backend
    assert backend.availability().usable
assert "privateuseone" not in amp_core.backends()
assert amp_core.backends()["foo"].status == "available"
"""


def test_the_slot_keeps_its_device_under_a_new_name() -> None:
    """Code that asks for "privateuseone" after the device has its name gets a backend that knows nothing."""
    subprocess.run([sys.executable, "-c", RENAMED], check=True)


def test_the_generic_backend_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every region on mps reads the metadata of all installed distributions (5 ms)."""
    first = amp_core.get_backend("mps")
    monkeypatch.setattr(entry_points, "_declared", lambda: pytest.fail("metadata was read again"))
    assert amp_core.get_backend("mps") is first


def test_what_a_module_of_a_device_raises_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """`amp backends` said "division by zero", of no function, and `amp check` ended in a traceback."""

    def is_available() -> bool:
        raise OSError("libnpu.so is too old")

    monkeypatch.setattr(torch, "hpu", SimpleNamespace(is_available=is_available), raising=False)
    available = Manager().get("hpu").availability()
    assert not available
    assert available.reason == "torch.hpu.is_available() raised OSError: libnpu.so is too old"


def test_a_backend_is_found_after_its_op_lists() -> None:
    """A thread that finds the backend while another registers it takes its ops for ops without rules."""
    registry = Registry()

    class Listed(Npu):
        @property
        def op_lists(self) -> dict[str, str]:  # type: ignore[override]
            assert registry.get("hpu") is None
            return {"fp32": "mm"}

    registry.add(Listed())
    assert registry.get("hpu") is not None


def test_a_name_that_is_no_text() -> None:
    """The error says that a list has no hash."""
    with pytest.raises(TypeError, match=r"name= of a plugin must be a text, not \[\]"):
        amp_core.plugin.register(object(), [])  # type: ignore[arg-type]


def test_a_name_that_another_plugin_has() -> None:
    """Pluggy's own error, with a list of all that is registered."""
    first, second = amp_core.callbacks.Logging(), amp_core.callbacks.Logging()
    amp_core.plugin.register(first, "log")
    try:
        with pytest.raises(ValueError, match=r"^Another plugin is registered as 'log'"):
            amp_core.plugin.register(second, "log")
        amp_core.plugin.register(second, "other")
        amp_core.plugin.unregister(second)
    finally:
        amp_core.plugin.unregister(first)


class Adding:
    """A plugin that registers a backend, and then does something else."""

    def __init__(self, backend: Backend, fallback: bool, error: Exception | None = None) -> None:
        self.backend, self.fallback, self.error = backend, fallback, error

    @hookimpl
    def amp_register_backends(self, registry: Registry) -> None:
        registry.add(self.backend, fallback=self.fallback)
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize("fallback", [False, True])
def test_a_registration_is_undone_whole(fallback: bool) -> None:
    """The backend of a plugin that failed, or was unregistered, serves on, or keeps others out."""
    first, second, manager = Npu(), Npu(), default_manager.manager()
    with pytest.raises(RuntimeError, match="half done"):
        amp_core.plugin.register(Adding(first, fallback, RuntimeError("half done")))
    assert first not in [backend for backend, _ in manager.registry.added()]
    plugin = Adding(second, fallback)
    amp_core.plugin.register(plugin)
    try:
        assert amp_core.get_backend("hpu") is second
    finally:
        amp_core.plugin.unregister(plugin)
    assert second not in [backend for backend, _ in manager.registry.added()]
    assert amp_core.get_backend("hpu") not in (first, second)


class Mtia(Npu):
    """A backend for a device type that amp-core has a fallback for."""

    device_type = "mtia"


def test_a_fallback_serves_as_long_as_it_is_registered() -> None:
    """It is ignored once the device was used, with its op lists in force, and the built-in one is lost."""
    manager = Manager()
    first = manager.get("mtia")
    lists = manager.registry.op_lists("mtia")
    assert lists
    plugin = Adding(Mtia(), fallback=True)
    manager.add(plugin, None)
    assert manager.get("mtia") is plugin.backend
    assert not manager.registry.op_lists("mtia")
    manager.remove(plugin)
    assert manager.get("mtia") is first
    assert manager.registry.op_lists("mtia") is lists


def test_a_fallback_that_fails_takes_no_other_along() -> None:
    """After an error in a plugin's hook, a device of torch's runs without the rules of its kernels."""
    manager = Manager()
    manager.discover()
    with pytest.raises(RuntimeError, match="half done"):
        manager.add(Adding(Mtia(), True, RuntimeError("half done")), None)
    assert manager.registry.op_lists("mtia") == manager.get("mtia").op_lists != {}


def test_a_plugin_may_be_registered_before_anything_is_loaded() -> None:
    """Its fallback gives way to the built-in one, or its backend for cuda breaks the look-up of others."""
    manager = Manager()
    plugin = Adding(Mtia(), fallback=True)
    manager.add(plugin, None)
    assert manager.get("mtia") is plugin.backend

    class Cuda(Npu):
        device_type = "cuda"

    manager = Manager()
    with pytest.raises(amp_core.BackendConflictError, match="'cuda', which plugin 'cuda' "):
        manager.add(Adding(Cuda(), fallback=False), None)
    assert manager.status()["cuda"].distribution == "amp-core"


def test_op_lists_stay_with_what_replaced_their_backend() -> None:
    """Ops lose their rules when the plugin of a backend that no longer serves is unregistered."""

    class Listed(Npu):
        op_lists = MappingProxyType({"fp32": "exp"})

    for successor in (Listed(), Npu()):  # the second takes over the lists
        manager, plugin = Manager(), Adding(Listed(), fallback=False)
        manager.add(plugin, None)
        manager.registry.replace(successor)
        manager.remove(plugin)
        assert manager.get("hpu") is successor
        assert manager.registry.op_lists("hpu") == {"fp32": "exp"}
        manager.registry.withdraw([successor])
        assert not manager.registry.op_lists("hpu")


def test_op_lists_are_back_after_another_backend_served() -> None:
    """After the kit has run on another backend for it, ops of a device have the rules of that one."""

    class Listed(Npu):
        op_lists = MappingProxyType({"fp32": "exp"})

    class Other(Npu):
        op_lists = MappingProxyType({"lower_precision_fp": "mm"})

    for first, before in ((Listed(), {"fp32": "exp"}), (Npu(), {})):
        registry = Registry()
        registry.add(first)
        with registry.serving(Other()):
            assert registry.op_lists("hpu") == {"lower_precision_fp": "mm"}
        assert registry.get("hpu") is first
        assert registry.op_lists("hpu") == before


def test_what_is_put_back_has_its_owner_again() -> None:
    """`amp backends` names a module in place of the package that is to blame."""
    registry, owner = Registry(), Owner("npu", "npu-plugin", "1.0")
    first = Npu()
    with registry.claimed(owner):
        registry.add(first)
    registry.replace(Npu())
    assert registry["hpu"][1] == Owner(__name__)
    registry.replace(first)
    assert registry["hpu"][1] == owner
    assert first.origin == "plugin 'npu' (npu-plugin 1.0)"


def test_what_replaces_a_backend_is_checked() -> None:
    """A backend of another version of the interface is put in place, and fails in a step."""

    class Newer(Npu):
        api_version = 2

    with pytest.raises(amp_core.BackendLoadError, match="implements backend API 2"):
        replace_backend(Newer())
    assert not isinstance(amp_core.get_backend("hpu"), Newer)


def test_the_owner_of_a_fallback_is_known() -> None:
    """`amp backends` says that mps, mtia and maia come from nowhere."""
    status = amp_core.backends()["mps"]
    assert (status.distribution, amp_core.get_backend("mps").origin[:14]) == ("amp-core", "plugin 'torch'")


@pytest.mark.parametrize("change", ["tf32", "ieee", "medium"])
@pytest.mark.parametrize("given", ["tf32", "ieee", "high"])
def test_the_precision_of_products_by_either_of_torchs_settings(given: str, change: str) -> None:
    """A program that has set it by `torch.backends` could load no plugin: torch does not tell it."""
    products: Any = torch.backends.cuda.matmul

    def put(value: str) -> None:
        if value in {"tf32", "ieee"}:
            products.fp32_precision = value
        else:
            torch.set_float32_matmul_precision(value)

    with restored():
        torch.set_float32_matmul_precision("highest")
        put(given)
        before = products.fp32_precision
        with restored() as changed:
            put(change)
        assert products.fp32_precision == before
        assert [text.partition(" (")[0] for text in changed] in ([], ["the precision of float32 products"])
        assert changed or change in {given, before}


def test_an_entry_point_that_names_a_class() -> None:
    """Its maker reads that a backend is an ABCMeta, and not that the entry point must name a module."""
    point = entry_points.metadata.EntryPoint("npu", "amp_core.plugin:Backend", entry_points.ENTRY_POINT_GROUP)
    with pytest.raises(TypeError, match=r"must name a module .* but 'amp_core\.plugin:Backend' is a class"):
        entry_points.Candidate("npu", "amp-npu", "1", point).load()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system binds no threads")
def test_openmp_may_bind_the_thread_if_its_user_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin whose import starts OpenMP is blamed for what the environment asks for, and it is undone."""
    everywhere = os.sched_getaffinity(0)
    monkeypatch.setenv("OMP_PROC_BIND", "true")
    try:
        with restored() as changed:
            os.sched_setaffinity(0, {min(everywhere)})
        assert (changed, os.sched_getaffinity(0)) == ([], {min(everywhere)})
    finally:
        os.sched_setaffinity(0, everywhere)


def test_a_plugin_loads_while_another_thread_draws_numbers(in_threads: Callable[..., None]) -> None:
    """The other thread draws the same numbers again, and the plugin is blamed for it."""
    seen: list[float] = []

    def draw() -> None:
        seen.extend(torch.rand(8).tolist())

    def load() -> None:
        with restored() as changed:
            in_threads(draw)
        assert not changed

    in_threads(load)
    draw()
    assert len(set(seen)) == len(seen)


SLOW_PLUGIN = """
import threading, time
import amp_core
from amp_core.plugin import Availability, Backend, hookimpl

begun.set()
time.sleep(0.5)  # another thread asks for all backends, and waits for this import
found = {{{question}}}

class Slow(Backend):
    device_type, api_version = "slow", 1
    availability = lambda self: Availability(True, "there")
    default_dtype = lambda self: amp_core.plugin.get_backend("cpu").default_dtype()
    supported_dtypes = lambda self: (self.default_dtype(),)

@hookimpl
def amp_register_backends(registry):
    registry.add(Slow())
"""

IMPORTED_BY_ANOTHER_THREAD = """
import builtins, faulthandler, importlib, threading
import amp_core

faulthandler.dump_traceback_later(60, exit=True)
builtins.begun = threading.Event()
thread = threading.Thread(target=importlib.import_module, args=("slow_plugin.hooks",))
thread.start()
begun.wait()
amp_core.backends()
assert type(amp_core.get_backend("slow")).__name__ == "Slow"
thread.join()
import slow_plugin.hooks
assert slow_plugin.hooks.found
"""


@pytest.mark.parametrize("question", ["*amp_core.backends()", "amp_core.plugin.get_backend('mps')"])
def test_a_plugin_that_another_thread_imports_asks_for_backends(question: str, tmp_path: Path) -> None:
    """The import waits for the thread that loads all plugins, which waits for the import."""
    package, info = tmp_path / "slow_plugin", tmp_path / "slow_plugin-1.0.dist-info"
    package.mkdir()
    info.mkdir()
    (package / "__init__.py").touch()
    (package / "hooks.py").write_text(SLOW_PLUGIN.format(question=question))
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: slow-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[amp_core.backends]\nslow = slow_plugin.hooks\n")
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    command = [sys.executable, "-c", IMPORTED_BY_ANOTHER_THREAD]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, check=True, timeout=120)


def test_the_generic_backend_says_that_no_package_serves_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`amp check` passes for a device whose own backend is not found, as its entry point is misspelt."""
    monkeypatch.setattr(torch, "hpu", SimpleNamespace(is_available=lambda: True), raising=False)
    reason = amp_core.get_backend("hpu").availability().reason
    assert "amp-core's generic backend serves it, as no package loaded does" in reason
