"""The same call on torch.autocast and on amp_core.autocast: same result, error, warning, signature."""

from __future__ import annotations

import copy
import inspect
import pickle
import threading
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import torch

import amp_core

BOTH = [torch.autocast, amp_core.autocast]


def outcome(make: Any) -> tuple[Any, ...]:
    """Return what a call gave: value or exception type and text, and its warnings with their line."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            value = make()
            result: tuple[Any, ...] = (
                "value",
                value.device,
                value.fast_dtype,
                value._enabled,
                value._cache_enabled,
            )
        except Exception as error:  # compared below, type and text
            result = ("error", type(error), str(error))
    return (*result, [(w.category, str(w.message), w.filename, w.lineno) for w in caught])


@pytest.mark.parametrize("device", ["cpu", "cuda", "xpu", "mps", "mtia", "hpu", "xla", "maia", "cpu:0"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16, torch.int8])
@pytest.mark.parametrize("enabled", [True, False])
def test_construction(device: str, dtype: torch.dtype | None, enabled: bool) -> None:
    """A device, dtype or switch is taken, refused or warned about otherwise than by torch."""
    ours, theirs = (
        outcome(lambda cls=cls: cls(device, dtype=dtype, enabled=enabled)) for cls in reversed(BOTH)
    )
    if device == "cpu:0" and ours[0] == "value":  # torch keeps the index that it ignores
        ours = ("value", "cpu:0", *ours[2:])
    assert ours[:-1] == theirs[:-1]
    assert [w[:3] for w in ours[-1]] == [(c, m.replace("CPU:0", "CPU"), f) for c, m, f, _ in theirs[-1]]


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64, torch.float64])
def test_a_default_dtype_that_no_region_can_have(dtype: torch.dtype) -> None:
    """`torch.set_autocast_dtype` with a dtype of no use raises an error that blames the CPU's plugin."""
    before = torch.get_autocast_dtype("cpu")
    try:
        torch.set_autocast_dtype("cpu", dtype)
        theirs, ours = (outcome(lambda cls=cls: cls("cpu")) for cls in BOTH)
    finally:
        torch.set_autocast_dtype("cpu", before)
    assert ours[:-1] == theirs[:-1]
    assert [w[:3] for w in ours[-1]] == [w[:3] for w in theirs[-1]]


def test_warning_stands_at_the_callers_line() -> None:
    """The warning points into amp-core instead of at the line to change."""
    with pytest.warns(UserWarning, match="target dtype is not supported") as caught:
        amp_core.autocast("cpu", dtype=torch.int8)
    assert caught[0].filename == __file__


@pytest.mark.parametrize("device", [None, 3, torch.bfloat16])
def test_wrong_type_of_device(device: Any) -> None:
    """A device that is no string gives another error than torch's."""
    assert outcome(lambda: amp_core.autocast(device)) == outcome(lambda: torch.autocast(device))


def test_signature_is_torchs_and_policy() -> None:
    """A caller who passes torch's arguments by position or keyword is refused."""
    ours = inspect.signature(amp_core.autocast)
    theirs = inspect.signature(torch.autocast)
    names = [*theirs.parameters, "policy"]
    assert list(ours.parameters) == names
    for name, parameter in theirs.parameters.items():
        assert ours.parameters[name].default == parameter.default
    assert list(inspect.signature(amp_core.custom_fwd).parameters) == list(
        inspect.signature(torch.amp.custom_fwd).parameters
    )
    assert list(inspect.signature(amp_core.custom_bwd).parameters) == list(
        inspect.signature(torch.amp.custom_bwd).parameters
    )


def test_every_public_name_of_torch_amp_is_here() -> None:
    """A name that torch.amp exports cannot be imported from amp_core."""
    wanted = {*torch.amp.autocast_mode.__all__, *torch.amp.grad_scaler.__all__}
    assert wanted <= set(amp_core.__all__)
    assert {"_enter_autocast", "_exit_autocast"} <= set(amp_core.__all__)


def test_instances_pass_for_torchs() -> None:
    """A library that tests for torch's class does not recognise ours."""
    assert isinstance(amp_core.autocast("cpu"), torch.autocast)
    assert isinstance(amp_core.GradScaler("cpu"), torch.amp.GradScaler)


def test_pickle_and_deepcopy() -> None:
    """A region inside a module cannot be sent to another process, or copied with it."""
    region = amp_core.autocast("cpu", dtype=torch.float16, cache_enabled=False)
    for other in (pickle.loads(pickle.dumps(region)), copy.deepcopy(region)):
        with other:
            assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.float16


@pytest.mark.parametrize("cls", BOTH)
def test_state_inside_nested_regions(cls: Any) -> None:
    """Nesting, a disabled part, another dtype or the cache switch reads otherwise than in torch."""

    def state() -> tuple[Any, ...]:
        return (
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(),
        )

    seen = [state()]
    with cls("cpu", dtype=torch.float16, cache_enabled=False):
        seen.append(state())
        with cls("cpu"):
            seen.append(state())
            with cls("cpu", dtype=torch.bfloat16, enabled=False):
                seen.append(state())
            seen.append(state())
        seen.append(state())
    seen.append(state())
    f16, bf16 = torch.float16, torch.bfloat16
    off = (False, bf16, True)
    assert seen == [
        off,
        (True, f16, False),
        (True, f16, False),
        (False, bf16, False),
        (True, f16, False),
        (True, f16, False),
        off,
    ]


def test_an_exception_leaves_the_region() -> None:
    """After an exception the surrounding code runs in mixed precision."""
    with pytest.raises(ZeroDivisionError), amp_core.autocast("cpu"):
        raise ZeroDivisionError
    assert not torch.is_autocast_enabled("cpu")


def test_threads_do_not_inherit_a_region() -> None:
    """A new thread starts inside the region of the one that made it."""
    seen = []
    with amp_core.autocast("cpu"):
        thread = threading.Thread(target=lambda: seen.append(torch.is_autocast_enabled("cpu")))
        thread.start()
        thread.join()
    assert seen == [False]


def plain(x: int, *, y: int = 1) -> None:
    """Document it."""


def generator(x: int, *, y: int = 1) -> Iterator[int]:
    """Document it."""
    yield x + y


async def coroutine(x: int, *, y: int = 1) -> None:
    """Document it."""


async def async_generator(x: int, *, y: int = 1) -> AsyncIterator[int]:
    """Document it."""
    yield x + y


@pytest.mark.parametrize("cls", BOTH)
@pytest.mark.parametrize("function", [plain, generator, coroutine, async_generator])
def test_a_decorated_function_keeps_its_name_and_signature(cls: Any, function: Callable[..., Any]) -> None:
    """Trainers that ask for argument names, tracebacks and pickles see the wrapper's own."""
    decorated = cls("cpu")(function)
    assert decorated is not function
    assert (decorated.__qualname__, decorated.__doc__) == (function.__qualname__, function.__doc__)
    assert inspect.signature(decorated) == inspect.signature(function)


def test_decorating_something_that_is_no_function() -> None:
    """The hint to use a `with` statement is lost."""
    for cls in BOTH if torch.__version__ >= (2, 12) else BOTH[1:]:  # earlier, torch took anything
        with pytest.raises(TypeError, match=r"requires a callable, but got Tensor\. Did you mean"):
            cls("cpu")(torch.ones(1))


@pytest.mark.parametrize("name", ["cpu", "cuda", "meta", "mps", "xla", "privateuseone"])
def test_is_autocast_available(name: str) -> None:
    """Availability of a device type differs from torch's answer."""
    assert amp_core.is_autocast_available(name) == torch.amp.is_autocast_available(name)


def test_is_autocast_available_for_no_device_at_all() -> None:
    """A name that is no device type is answered instead of refused."""
    with pytest.raises(RuntimeError):
        torch.amp.is_autocast_available("bogus")
    with pytest.raises(RuntimeError):
        amp_core.is_autocast_available("bogus")


@pytest.mark.parametrize("cls", BOTH)
def test_checkpoint_recomputes_in_the_same_precision(cls: Any) -> None:
    """A checkpointed block is recomputed in another dtype, and its gradient differs."""
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    block, x = torch.nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True)
    grads = []
    for use in (True, False):
        block.zero_grad()
        with cls("cpu"):
            out = checkpoint(block, x, use_reentrant=False) if use else block(x)
        assert out.dtype is torch.bfloat16
        out.float().sum().backward()
        grads.append(block.weight.grad.clone())
    assert torch.equal(*grads)


def test_no_grad_and_inference_mode() -> None:
    """A forward without gradients poisons the cast cache for the next one with them."""
    layer = torch.nn.Linear(4, 4)
    x = torch.randn(2, 4)
    with amp_core.autocast("cpu"):
        with torch.no_grad():
            layer(x)
        with torch.inference_mode():
            layer(x)
        layer(x).float().sum().backward()
    assert layer.weight.grad is not None


def test_devices_given_in_other_ways() -> None:
    """A torch.device, a tensor or "auto" is not taken for a device type."""
    for device in (torch.device("cpu"), torch.ones(1), "auto"):
        assert amp_core.autocast(device).device in {"cpu", "cuda", "xpu", "mps"}


def test_an_unknown_device_names_what_is_there() -> None:
    """The error for a misspelt device does not help."""
    with pytest.raises(
        amp_core.BackendNotFoundError, match=r"'gpu'.*Did you mean 'cuda'\?.*Installed: cpu, cuda"
    ):
        amp_core.autocast("gpu")
