"""What a backend's methods return or raise, and what the user then reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import amp_core
from amp_core import OpPolicy
from amp_core.cli import main
from amp_core.plugin import Availability, Backend, replace_backend
from amp_core.plugin.default_manager import manager


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


def _raising(_: Backend) -> Any:
    raise OSError("libnpu.so: cannot open shared object file")


def _unknown_op(_: Backend) -> OpPolicy:
    return OpPolicy.default("cpu").override({"no_such_op": "fp32"})


WRONG = {
    "availability is a bool": ("availability", lambda _: True, "returned True, but must return an amp_core"),
    "availability raises": ("availability", _raising, "raised OSError: libnpu.so"),
    "kernels are None": ("kernels", lambda _: None, "returned None, but must return an amp_core.kernels"),
    "kernels are an object": ("kernels", lambda _: object(), "must return an amp_core.kernels.Kernels"),
    "kernels raise": ("kernels", _raising, "raised OSError"),
    "a dtype as a string": ("default_dtype", lambda _: "bfloat16", "returned 'bfloat16', but must return"),
    "an integer dtype": ("default_dtype", lambda _: torch.int8, "must return a floating-point torch.dtype"),
    "no dtypes": ("supported_dtypes", lambda _: (), "must return a tuple of one or more"),
    "dtypes as a list": ("supported_dtypes", lambda _: [torch.float16], "must return a tuple"),
    "dtypes raise": ("supported_dtypes", _raising, "raised OSError"),
    "a refusal as a string": ("autocast_refusal", lambda *_: "no", "must return None or an amp_core.plugin"),
    "an unknown op": ("op_policy", _unknown_op, "has no op 'no_such_op'"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_result_names_backend_method_and_mend(fault: str) -> None:
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
        registry.restore({k: v for k, v in registry.snapshot().items() if k != "nosuch"})
