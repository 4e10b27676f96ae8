"""What a backend's methods return or raise, and what the user then reads."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch
from torch import Tensor

import amp_core
from amp_core import OpPolicy
from amp_core.cli import main
from amp_core.kernels import PORTABLE, GradStats, Kernels, Portable, ScaledProducts
from amp_core.plugin import Availability, Backend, replace_backend
from amp_core.plugin.default_manager import manager
from amp_core.plugin.registry import Owner, Registry
from amp_core.plugin.status import status_of


class Right(Backend):
    """A backend without a fault."""

    device_type = "cpu"
    api_version = 1

    def availability(self) -> Availability:
        return Availability(True, "always there")

    def default_dtype(self) -> torch.dtype:
        return torch.bfloat16

    def supported_dtypes(self) -> tuple[torch.dtype, ...]:
        return (torch.bfloat16,)


class Several(Right):
    """Serves several device types, with the policy of one."""

    device_type = ""

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type  # type: ignore[misc]

    def op_policy(self) -> OpPolicy:
        return _OF_HPU


_OF_HPU = OpPolicy("hpu", {"mm": "fp32"})


def test_a_policy_is_of_the_device_that_asks() -> None:
    """A device gets the policy of another if the other asked first."""
    assert Several("hpu").op_policy() is _OF_HPU
    with pytest.raises(amp_core.BackendError, match="returned the policy of 'hpu'"):
        Several("xla").op_policy()


def _raising(_: Backend) -> Any:
    raise OSError("libnpu.so: cannot open shared object file")


def _unknown_op(_: Backend) -> OpPolicy:
    return OpPolicy.default("cpu").override({"no_such_op": "fp32"})


def _exiting(_: Backend) -> Any:
    raise SystemExit("no licence")


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError


def _mute(_: Backend) -> Any:
    raise Mute


def _nameless(_: Backend) -> Portable:
    kernels = Portable()
    kernels.name = None  # type: ignore[assignment]
    return kernels


class Unprintable:
    """Like a tensor of a device without float64, in which torch prints."""

    def __repr__(self) -> str:
        raise TypeError("npu devices have no float64")


def _unnamed(_: Backend) -> Kernels:
    class Unnamed(Kernels):
        cast = grad_stats = multiply_ = update_scale_ = lambda *_, **__: None  # type: ignore[assignment]

    return Unnamed()


WRONG = {
    "availability is a bool": ("availability", lambda _: True, "returned True, but must return an amp_core"),
    "availability without words": (
        "availability", lambda _: Availability(True, None),  # type: ignore[arg-type]
        "must return an amp_core.plugin.Availability of",
    ),
    "availability exits": ("availability", _exiting, "raised SystemExit: no licence"),
    "kernels whose class sets no name": ("kernels", _unnamed, "whose name and reason are strings"),
    "kernels without a name": ("kernels", _nameless, "whose name and reason are strings"),
    "a cached method": ("default_dtype", functools.cache(lambda _: "bf16"), "returned 'bf16', but must"),
    "a class method": ("default_dtype", classmethod(lambda _: "bf16"), "returned 'bf16', but must"),
    "too few arguments": ("default_dtype", lambda: torch.float16, "raised TypeError"),
    "an error without text": ("kernels", _mute, "raised Mute: (its text cannot be had: ValueError)"),
    "an op that does not exist": (
        "op_policy", lambda _: OpPolicy.default("cpu").override({"sofmax": "fp32"}),
        "'?\nThis is a bug",
    ),
    "another device's policy": (
        "op_policy", lambda _: OpPolicy.default("cuda"),
        "returned the policy of 'cuda'; return OpPolicy('cpu', OpPolicy.default('cuda').rules)",
    ),
    "availability raises": ("availability", _raising, "raised OSError: libnpu.so"),
    "kernels are None": ("kernels", lambda _: None, "returned None, but must return an amp_core.kernels"),
    "kernels are an object": ("kernels", lambda _: object(), "must return an amp_core.kernels.Kernels"),
    "kernels raise": ("kernels", _raising, "raised OSError"),
    "a dtype as a string": ("default_dtype", lambda _: "bfloat16", "returned 'bfloat16', but must return"),
    "no dtypes": ("supported_dtypes", lambda _: (), "must return a tuple of one or more"),
    "dtypes as a list": ("supported_dtypes", lambda _: [torch.float16], "must return a tuple"),
    "a dtype of integers": ("supported_dtypes", lambda _: (torch.int8,), "must return a tuple"),
    "no dtype among them": ("supported_dtypes", lambda _: ("bfloat16",), "must return a tuple"),
    "dtypes raise": ("supported_dtypes", _raising, "raised OSError"),
    "a refusal as a string": ("autocast_refusal", lambda *_: "no", "must return None or an amp_core.plugin"),
    "what cannot be printed": ("kernels", lambda _: (Unprintable(),), "a tuple (its repr raises TypeError)"),
    "an unknown op": ("op_policy", _unknown_op, "has no op 'no_such_op'"),
}  # fmt: skip


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_result_names_backend_method_and_fix(fault: str) -> None:
    """A bare AttributeError deep in a region names neither the package nor what to do."""
    method, wrong, text = WRONG[fault]
    backend = type("WrongBackend", (Right,), {method: wrong, "__module__": __name__})()
    arguments = [torch.float16] if method == "autocast_refusal" else []
    with pytest.raises(amp_core.BackendError) as raised:
        getattr(backend, method)(*arguments)
    message = str(raised.value)
    assert message.startswith(f"WrongBackend.{method}() of {__name__} ")
    assert text in message
    assert "AMP_DISABLE_BACKENDS=cpu" in message


def test_a_wrong_result_of_a_class_beside_backend_is_named_too() -> None:
    """A vendor shares code between its backends in a class of its own, and the error names nobody."""

    class Shared:
        def default_dtype(self) -> str:
            return "bf16"

        @functools.cache  # noqa: B019
        def supported_dtypes(self) -> list[torch.dtype]:
            return [torch.float16]

    class WrongBackend(Shared, Right):  # type: ignore[misc]
        pass

    class Derived(WrongBackend):  # type: ignore[misc]
        pass

    for backend in (WrongBackend(), Derived()):
        with pytest.raises(amp_core.BackendError, match=r"default_dtype\(\) of .* returned 'bf16'"):
            backend.default_dtype()
        with pytest.raises(amp_core.BackendError, match=r"supported_dtypes\(\) of .* must return a tuple"):
            backend.supported_dtypes()


ATTRIBUTES: dict[str, tuple[dict[str, Any], str]] = {
    "a string for a bool": ({"has_float64": "no"}, "has_float64 must be True or False; it is 'no'"),
    "a method for a bool": ({"caches_memory": lambda _: True}, "caches_memory must be True or False; it is"),
    "words for a size": ({"grad_bucket_nbytes": "32 MiB"}, "grad_bucket_nbytes must be a positive int"),
    "no size": ({"grad_bucket_nbytes": 0}, "grad_bucket_nbytes must be a positive int; it is 0"),
    "one string for several": ({"aliases": "npux"}, "aliases must be a tuple of strings; it is 'npux'"),
    "one device type for several": ({"also_casts": "xla"}, "also_casts must be a frozenset of device types"),
    "an unknown rule": ({"op_lists": {"float32": "exp"}}, "op_lists must be a mapping"),
    "lists in op lists": ({"op_lists": {"fp32": ["exp"]}}, "op_lists must be a mapping to op names in"),
    "a property for a method": (
        {"default_dtype": property(lambda _: torch.float16)}, "default_dtype must be a method that returns a",
    ),
    "a value for a method": ({"supported_dtypes": (torch.float16,)}, "it is (torch.float16,)"),
    "no hash": ({"__eq__": lambda *_: True, "__hash__": None}, "must also define __hash__"),
    "a version that is a bool": ({"api_version": True}, "Set `api_version = 1` in the class, an int"),
    "a version in words": ({"api_version": "1"}, "Set `api_version = 1` in the class, an int"),
    "a method for the device type": ({"device_type": lambda _: "cpu"}, "it is a method"),
}  # fmt: skip


@pytest.mark.parametrize("fault", ATTRIBUTES)
def test_a_wrong_attribute_is_refused_on_registration(fault: str) -> None:
    """The attribute changes what is computed in silence, or fails deep in a region."""
    attributes, text = ATTRIBUTES[fault]
    backend = type("WrongBackend", (Right,), {**attributes, "__module__": __name__})()
    with pytest.raises((TypeError, amp_core.BackendLoadError)) as raised:
        Registry().add(backend)
    message = str(raised.value)
    assert message.startswith(f"WrongBackend of plugin '{__name__}'")
    assert text in message


@pytest.mark.parametrize("value", [PORTABLE, lambda: None], ids=["kernels", "a function"])
def test_a_hook_is_no_attribute_of_the_instance(value: object) -> None:
    """The first step of a scaler says that an object is not callable, or that None has no `prepare`."""
    backend = Right()
    backend.kernels = value  # type: ignore[method-assign, assignment]
    with pytest.raises(TypeError, match="kernels must be a method of the class, not an attribute of the"):
        Registry().add(backend)


def test_unusual_attributes_and_methods_are_taken() -> None:
    """A right backend is refused for how its methods are bound, or a property asks the driver on import."""

    class Unusual(Right):
        aliases = ["npux"]  # type: ignore[assignment]  # noqa: RUF012
        kernels = functools.lru_cache(Right.kernels)

        @property
        def has_float64(self) -> bool:  # type: ignore[override]
            raise OSError("asked")

        @classmethod
        def default_dtype(cls) -> torch.dtype:
            return torch.float16

        @staticmethod
        def supported_dtypes() -> tuple[torch.dtype, ...]:
            return (torch.float16,)

    backend = Unusual()
    Registry().add(backend)
    assert backend.default_dtype() is Unusual.default_dtype() is torch.float16
    assert backend.supported_dtypes() == (torch.float16,)
    with pytest.raises(amp_core.BackendError, match="raised OSError: asked"):
        backend.kernels()


def test_two_backends_of_one_plugin_for_a_device_type() -> None:
    """The plugin is said to be in conflict with itself, and told to be uninstalled."""
    registry = Registry()
    with registry.claimed(Owner("twice")):
        registry.add(Right())
        with pytest.raises(amp_core.BackendConflictError) as raised:
            registry.add(Right())
    assert str(raised.value) == "plugin 'twice' adds two backends for device type 'cpu'. Add one of them."


def test_a_reason_of_several_lines_is_one_line_of_the_listing(capsys: pytest.CaptureFixture[str]) -> None:
    """A driver's error of many lines tears the table apart, and the list of devices of a bug report."""
    lines = Availability(False, "no driver:\n\tlibnpu.so\n\tlibacc.so")
    backend = type("Wordy", (Right,), {"availability": lambda _: lines, "__module__": __name__})()
    with manager().registry.serving(backend):
        assert amp_core.backends()["cpu"].reason == "no driver: libnpu.so libacc.so"
        main(["env"])
        assert "  cpu: absent; no driver: libnpu.so libacc.so; bfloat16" in capsys.readouterr().out


@pytest.mark.parametrize(("usable", "status"), [(True, "failed"), (False, "absent")])
def test_a_device_type_that_torch_does_not_know_fails_only_where_the_device_is(
    usable: bool, status: str
) -> None:
    """A plugin whose device is not there, so that its package adds none to torch, is listed as broken."""
    now = Availability(usable, "as the driver says")
    backend = type("Later", (Right,), {"device_type": "nosuch", "availability": lambda _: now})()
    found = status_of(backend, Owner("later"))
    assert found.status == status
    assert ("which torch does not know" in found.reason) is usable


def test_right_results_pass_unchanged() -> None:
    """A right backend is refused, or its answers arrive as others."""
    backend = Right()
    assert backend.availability().reason == "always there"
    assert backend.supported_dtypes() == (torch.bfloat16,)
    assert backend.kernels().name == "portable"
    assert backend.op_policy() == OpPolicy.default("cpu")


def test_a_device_type_that_torch_does_not_know_is_named_with_its_backend(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Every use fails deep in torch, in words that name neither the package nor what to do."""
    registry = manager().registry
    replace_backend(type("Misnamed", (Right,), {"device_type": "nosuch", "__module__": __name__})())
    try:
        with pytest.raises(amp_core.PolicyError, match="which torch does not know") as raised:
            amp_core.autocast("nosuch").__enter__()
        assert str(raised.value).startswith(f"Misnamed of plugin '{__name__}' serves device type 'nosuch'")
        assert main(["check", "nosuch"]) == 2
        assert str(raised.value) in capsys.readouterr().err
    finally:
        registry.drop(Owner(__name__), frozenset({"nosuch"}))


def _scaled_step(model: torch.nn.Module) -> None:
    scaler = amp_core.GradScaler("cpu")
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    scaler.step(torch.optim.SGD(model.parameters()), max_norm=1.0)


def _quantised(model: torch.nn.Module) -> None:
    policy = OpPolicy.default("cpu").override({"linear": "recipe mxfp8"})
    with amp_core.autocast("cpu", policy=policy):
        model(torch.ones(1, 2))


def _guarded_step(model: torch.nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters())
    with amp_core.guard(model):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()


def _overlapping_step(model: torch.nn.Module) -> None:
    scaler, optimizer = amp_core.GradScaler("cpu", overlap=True), torch.optim.SGD(model.parameters())
    for _ in range(2):  # the second backward reads
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        scaler.step(optimizer, max_norm=1.0)


def _cast_inputs(_: torch.nn.Module) -> None:
    forward = amp_core.custom_fwd(lambda *_: None, device_type="cpu", cast_inputs=torch.bfloat16)
    with amp_core.autocast("cpu"):
        forward(torch.ones(2), torch.ones(2))


_ONE, _TWO = torch.tensor(1.0), torch.zeros(2)
_STATS = [
    GradStats(_ONE, _TWO.tolist(), _TWO, _ONE),  # type: ignore[arg-type]
    GradStats(_ONE, _TWO, _TWO.tolist(), _ONE),  # type: ignore[arg-type]
    GradStats(1.0, _TWO, _TWO, _ONE),  # type: ignore[arg-type]
    GradStats(_ONE, _TWO, _TWO, None),  # type: ignore[arg-type]
    GradStats(_ONE, _TWO, _TWO[:1], _ONE),
]


@pytest.mark.parametrize(
    ("kernel", "result", "step"),
    [
        ("grad_stats", None, _scaled_step),
        *[("grad_stats", stats, _scaled_step) for stats in _STATS],
        ("grad_stats", _STATS[0], _guarded_step),
        ("grad_stats", _STATS[0], _overlapping_step),
        ("prepare", [], _scaled_step),
        ("quantize", None, _quantised),
        ("cast", None, _cast_inputs),
        ("cast", [_ONE], _cast_inputs),
    ],
)
@pytest.mark.filterwarnings("ignore::amp_core.errors.EmulationWarning")
def test_results_of_kernels_are_checked(kernel: str, result: object, step: Any) -> None:
    """A kernel that returns nothing, or lists, ends in an AttributeError of amp-core's, or is not noticed."""
    kernels = type("Wrong", (Portable,), {kernel: lambda *_, **__: result})()
    backend = type("WrongKernels", (Right,), {"kernels": lambda _: kernels})()
    named = pytest.raises(amp_core.BackendError, match=rf"Wrong\.{kernel}\(\), a kernel of 'cpu'")
    with manager().registry.serving(backend), named:
        step(torch.nn.Linear(2, 2))


_MULTIPLY = "Kernels.multiply_(grads, factor, found_inf=None)"


@pytest.mark.parametrize(
    ("base", "name", "method", "words"),
    [
        (
            Portable,
            "multiply_",
            lambda self, grads, factor: None,
            f"(grads, factor) cannot be called like {_MULTIPLY}",
        ),
        (
            Portable,
            "multiply_",
            lambda self, tensors, factor, flag=None: None,
            f"flag=None) cannot be called like {_MULTIPLY}",
        ),
        (
            Portable,
            "multiply_",
            lambda grads, factor, found_inf=None: None,
            "(factor, found_inf=None) cannot",
        ),
        (
            Portable,
            "multiply_",
            lambda self, grads, factor, found_inf: None,
            "these arguments, in this order",
        ),
        (
            Portable,
            "multiply_",
            lambda self, grads, factor, found_inf=None, more=1, *, x: None,
            "each other one a default",
        ),
        (Portable, "add_", lambda self, grads, totals: None, "Kernels.add_(totals, grads)"),
        (
            Portable,
            "quantize",
            lambda self, tensor, quantization, dim=-1: None,
            "seed=None, amax=None, packed=False",
        ),
        (Portable, "prepare", staticmethod(lambda tensors: tensors), "Wrong.prepare(tensors) cannot"),
        (ScaledProducts, "multiply", lambda self, a, b: None, "ScaledProducts.multiply(a, b, accumulate)"),
    ],
)
def test_kernels_that_take_other_arguments_are_refused(
    base: type, name: str, method: Any, words: str
) -> None:
    """A kernel that lacks an argument ends a step in a TypeError, and one that renames it passes the kit."""
    with pytest.raises(TypeError, match=re.escape(words)):
        type("Wrong", (base,), {name: method})


def test_kernels_may_take_arguments_in_other_ways() -> None:
    """A kernel that is right, such as a static one, could not be defined."""

    class Right(Portable):
        @staticmethod
        def multiply_(grads: Any, factor: Any, found_inf: Any = None, streams: int = 1) -> None: ...

        @torch.no_grad()
        def add_(self, *args: Any, **kwargs: Any) -> None: ...

        @classmethod
        def cast(cls, tensors: Any, dtype: Any, out: Any = None) -> list[Tensor]: ...

        def quantize(self, tensor: Any, quantization: Any, dim: int = -1, **options: Any) -> Any: ...

    assert Right().name == "portable"
