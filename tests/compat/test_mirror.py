"""The mirrored modules against torch's own: signatures, warnings, subclassing, pickling, behaviour."""

from __future__ import annotations

import copy
import importlib
import inspect
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import amp_core

SHIMS = [
    ("cuda.amp", "autocast"),
    ("cuda.amp", "GradScaler"),
    ("cuda.amp", "custom_fwd"),
    ("cuda.amp", "custom_bwd"),
    ("cuda.amp", "amp_definitely_not_available"),
    ("cuda.amp.autocast_mode", "_cast"),
    ("cuda.amp.autocast_mode", "autocast"),
    ("cuda.amp.grad_scaler", "GradScaler"),
    ("cpu.amp", "autocast"),
    ("cpu.amp", "GradScaler"),
]
# What Python 3.10 to 3.12 show for torch's own; torch 2.13 on Python 3.13.0 shows (*args, **kwargs) instead.
AUTOCAST = "(enabled: bool = True, dtype: torch.dtype = torch.{}, cache_enabled: bool = True)"
SCALER = (
    "(init_scale: float = 65536.0, growth_factor: float = 2.0, backoff_factor: float = 0.5, "
    "growth_interval: int = 2000, enabled: bool = True) -> None"
)
SIGNATURES = {
    ("cuda.amp", "autocast"): AUTOCAST.format("float16"),
    ("cpu.amp", "autocast"): AUTOCAST.format("bfloat16"),
    ("cuda.amp", "GradScaler"): SCALER,
    ("cpu.amp", "GradScaler"): SCALER,
    ("cuda.amp", "custom_fwd"): "(fwd=None, *, cast_inputs=None)",
    ("cuda.amp", "custom_bwd"): "(bwd)",
    ("cuda.amp", "amp_definitely_not_available"): "() -> bool",
    ("cuda.amp.autocast_mode", "_cast"): "(value, dtype)",
}


def pair(module: str, name: str) -> tuple[Any, Any]:
    """Torch's object and ours."""
    return tuple(
        getattr(importlib.import_module(f"{root}.{module}"), name) for root in ("torch", "amp_compat")
    )


def record(function: Callable[[], Any]) -> list[tuple[str, type, str]]:
    """Text, category and file of each warning that `function` gives, every time it is called."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    return [(str(w.message), w.category, w.filename) for w in caught]


@pytest.mark.parametrize(("module", "name"), SIGNATURES, ids=lambda v: str(v))
def test_signature_is_real(module: str, name: str) -> None:
    """inspect.signature, help() and IDEs show the arguments, on each Python that the suite runs on."""
    theirs, ours = pair(module, name)
    assert str(inspect.signature(ours)) == SIGNATURES[module, name]
    if str(inspect.signature(theirs)) != "(*args, **kwargs)":
        assert inspect.signature(ours).parameters == inspect.signature(theirs).parameters


@pytest.mark.parametrize(("module", "name"), SHIMS)
def test_all_names_are_there(module: str, name: str) -> None:
    """Each path below torch.cuda.amp and torch.cpu.amp has one of the same form here."""
    theirs, ours = pair(module, name)
    assert theirs is not ours
    assert inspect.isclass(theirs) == inspect.isclass(ours)
    assert getattr(theirs, "__deprecated__", None) == getattr(ours, "__deprecated__", None)
    assert importlib.import_module(f"amp_compat.{module}").__doc__


CALLS = [
    ("cpu.amp", "autocast", lambda f: f()),
    ("cpu.amp", "autocast", lambda f: f(False, torch.bfloat16, False)),
    ("cuda.amp", "autocast", lambda f: f(enabled=False)),
    ("cpu.amp", "GradScaler", lambda f: f(enabled=False)),
    ("cuda.amp", "GradScaler", lambda f: f(2.0**8, enabled=False)),
    ("cuda.amp", "custom_fwd", lambda f: f(cast_inputs=torch.float32)),
    ("cuda.amp", "custom_bwd", lambda f: f(lambda ctx, g: g)),
    ("cuda.amp.autocast_mode", "_cast", lambda f: f([1, torch.ones(2)], torch.float16)),
    ("cpu.amp", "autocast", lambda f: type("Sub", (f,), {})),
    ("cpu.amp", "autocast", lambda f: pickle.loads(pickle.dumps(f()))),
]


@pytest.mark.parametrize(("module", "name", "call"), CALLS, ids=lambda v: getattr(v, "__name__", v))
def test_warnings_are_torchs(module: str, name: str, call: Callable[[Any], Any]) -> None:
    """The same FutureWarnings, as often, and at this file's lines."""
    theirs, ours = (record(lambda f=f: call(f)) for f in pair(module, name))
    assert ours == theirs
    assert len(ours) >= 1
    assert {(category, file) for _, category, file in ours} == {(FutureWarning, __file__)}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("call", [lambda f: f(x=1), lambda f: f(1.0, 2.0, 0.5, 10, True, None)])
@pytest.mark.parametrize("module", ["cuda.amp", "cpu.amp"])
def test_wrong_calls_name_the_class(module: str, call: Callable[[Any], Any]) -> None:
    """The error names a function of ours that no program calls."""
    texts = []
    for kind in pair(module, "GradScaler"):
        with pytest.raises(TypeError) as caught:
            call(kind)
        texts.append(str(caught.value))
    assert texts[1] == texts[0]
    assert texts[1].startswith("GradScaler.__init__() ")


def test_subclass_instances_do_not_warn() -> None:
    """Making a subclass warns; its instances do not, and may have arguments of their own."""
    for base in pair("cpu.amp", "autocast"):
        with pytest.warns(FutureWarning):
            sub = type("Sub", (base,), {})
        assert record(lambda sub=sub: sub(False)) == []

    with pytest.warns(FutureWarning):

        class Wide(pair("cpu.amp", "autocast")[1]):  # type: ignore[misc]
            def __init__(self, a: int, b: int, c: int, d: int) -> None:
                super().__init__(True, torch.bfloat16)
                self.total = a + b + c + d

    with Wide(1, 2, 3, 4) as region:
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.bfloat16
    assert region.total == 10


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_instances_are_amp_cores() -> None:
    """Isinstance holds for amp_core's and torch's classes, through pickle and deepcopy too."""
    autocast, scaler = pair("cpu.amp", "autocast")[1], pair("cpu.amp", "GradScaler")[1]
    for region in (autocast(), pickle.loads(pickle.dumps(autocast())), copy.deepcopy(autocast())):
        assert isinstance(region, (autocast, amp_core.autocast))
        assert isinstance(region, torch.autocast)
        with region:
            assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.bfloat16
    restored = pickle.loads(pickle.dumps(scaler(2.0**4)))
    assert isinstance(restored, amp_core.GradScaler)
    assert restored.state_dict()["scale"] == 16.0


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    "arguments", [(), (True,), (False,), (True, torch.float16), (True, torch.float16, False)]
)
def test_region_state_is_torchs(arguments: tuple) -> None:
    """Inside, the device's autocast state is what torch's shim sets; afterwards it is as before."""

    def state() -> tuple:
        return (
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(),
        )

    before, inside = state(), []
    for autocast in pair("cpu.amp", "autocast"):
        with autocast(*arguments):
            inside.append(state())
        assert state() == before
    assert inside[0] == inside[1]


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_decorator_and_script() -> None:
    """A decorated function, and a region in scripted code, give the low precision."""
    autocast = pair("cpu.amp", "autocast")[1]
    x = torch.ones(2, 2)
    assert autocast()(torch.mm)(x, x).dtype == torch.bfloat16
    with pytest.warns((DeprecationWarning, FutureWarning), match="jit"):
        scripted = torch.jit.script(scripted_region)
    assert scripted(x).dtype == torch.bfloat16


from amp_compat.cpu.amp import autocast as cpu_autocast  # noqa: E402  # TorchScript looks at this module's globals


def scripted_region(x: torch.Tensor) -> torch.Tensor:
    with cpu_autocast():
        return torch.mm(x, x)


@pytest.mark.parametrize("name", ["cpu.amp", "cuda.amp"])
def test_regions_in_a_compiled_function(name: str) -> None:
    """Compiled code that enters a region of the old name crashes, or breaks the graph."""
    theirs, ours = pair(name, "autocast")

    def product(x: torch.Tensor, region: type) -> torch.Tensor:
        with region(enabled=name == "cpu.amp"):
            return x @ x

    x = torch.rand(3, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = product(x, theirs)
    with warnings.catch_warnings():
        if torch.__version__ < (2, 13):  # it does not say that it compiles, so the class warns
            warnings.simplefilter("ignore")
        got = torch.compile(product, backend="eager", fullgraph=True)(x, ours)
    assert torch.equal(got, expected)
    assert expected.dtype is (torch.bfloat16 if name == "cpu.amp" else torch.float32)


def test_disabled_warning_points_at_the_caller() -> None:
    """Without CUDA, torch's own shim blames torch/cuda/amp/autocast_mode.py; here it is the caller's line."""
    if torch.cuda.is_available():
        pytest.skip("CUDA is there")
    caught = record(pair("cuda.amp", "autocast")[1])
    assert [category for _, category, _ in caught] == [FutureWarning, UserWarning]
    assert {file for _, _, file in caught} == {__file__}


def test_once_per_site(monkeypatch: pytest.MonkeyPatch) -> None:
    """AMP_DEPRECATION=once: a line warns once however often it runs; another line warns again."""
    monkeypatch.setenv("AMP_DEPRECATION", "once")
    autocast = pair("cpu.amp", "autocast")[1]

    def loop() -> None:
        for _ in range(5):
            autocast(False)

    assert len(record(loop)) == 1
    assert record(loop) == []
    assert len(record(lambda: autocast(False))) == 1


def test_other_ranks_are_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """AMP_DEPRECATION=once: only rank 0 warns."""
    monkeypatch.setenv("AMP_DEPRECATION", "once")
    monkeypatch.setenv("RANK", "1")
    assert record(lambda: pair("cpu.amp", "autocast")[1](False)) == []


def test_can_be_an_error() -> None:
    """The usual warning filters turn it into an error, as for any warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        with pytest.raises(FutureWarning, match=r"torch\.amp\.autocast\('cpu', args\.\.\.\)"):
            pair("cpu.amp", "autocast")[1]()


def test_legacy_forms() -> None:
    """The forms before PyTorch 1.10: no dtype argument, loose keyword arguments, the old words."""
    from amp_compat import legacy

    assert str(inspect.signature(legacy.autocast)) == "(enabled: 'bool' = True) -> 'None'"
    assert record(lambda: legacy.autocast(False)) == []
    with pytest.raises(TypeError):
        legacy.autocast(True, torch.bfloat16)
    with pytest.raises(AssertionError):
        legacy.custom_fwd(cast_inputs=torch.float32, device_type="cuda")
    with pytest.raises(KeyError):
        legacy.custom_fwd(device_type="cuda")
    assert legacy.custom_fwd(cast_inputs=torch.float32)(lambda ctx, x: x)(None, 3) == 3
    if not torch.cuda.is_available():
        ((text, _, file),) = record(legacy.autocast)
        assert text == "torch.cuda.amp.autocast only affects CUDA ops, but CUDA is not available.  Disabling."
        assert file == __file__


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is available")
def test_a_disabled_scaler_points_at_the_caller() -> None:
    """The warning names a line of amp_compat, where there is nothing to change."""
    files = {text.split(",")[0]: file for text, _, file in record(pair("cuda.amp", "GradScaler")[1])}
    assert files["torch.cuda.amp.GradScaler is enabled"] == __file__


def test_import_needs_no_torch() -> None:
    """`import amp_compat` alone is free: nothing is imported until it is asked for."""
    code = "import sys, amp_compat; assert 'torch' not in sys.modules and 'amp_core' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_old_functions_run_backward() -> None:
    """The old decorators lose the method that they decorate."""
    legacy = importlib.import_module("amp_compat.legacy")

    class Double(torch.autograd.Function):
        @staticmethod
        @legacy.custom_fwd
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        @legacy.custom_bwd
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * 2

    x = torch.ones(2, requires_grad=True)
    Double.apply(x).sum().backward()
    assert torch.equal(x.grad, torch.full((2,), 2.0))
