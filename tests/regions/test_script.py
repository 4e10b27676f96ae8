"""`amp_core.script`: each limit of TorchScript's autocast is lifted, or diagnosed at the user's line."""

from __future__ import annotations

import inspect
import sys
import warnings

import pytest
import torch
from torch import Tensor

import amp_core
from amp_core import ScriptRegionError, script

BF16, FP32 = torch.bfloat16, torch.float32
USE_AMP = True

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit")


@pytest.fixture
def x() -> Tensor:
    """A float32 matrix."""
    torch.manual_seed(0)
    return torch.randn(4, 4)


def plain(a: Tensor) -> Tensor:
    with amp_core.autocast("cpu"):
        return torch.mm(a, a)


def constant_switch(a: Tensor) -> Tensor:
    with torch.autocast("cpu", BF16, USE_AMP):
        return torch.mm(a, a)


@amp_core.autocast("cpu")
def decorated(a: Tensor) -> Tensor:
    return torch.mm(a, a)


def calls_decorated(a: Tensor) -> Tensor:
    return decorated(a) + 1


def runtime_switch(a: Tensor, use_amp: bool) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=use_amp):
        return torch.mm(a, a)


def bound_and_reentered(a: Tensor) -> tuple[Tensor, Tensor]:
    with torch.autocast("cpu") as region:
        b = torch.mm(a, a)
        with torch.autocast("cpu", enabled=False), region:
            c = torch.mm(a, a)
    return b, c


def promotes(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    with torch.autocast("cpu"):
        return torch.cat([a, b]), torch.stack([torch.mm(a.float(), a.float()), b])


def norms(a: Tensor) -> Tensor:
    with torch.autocast("cpu"):
        return torch.norm(torch.mm(a, a))


def disables(a: Tensor) -> tuple[Tensor, Tensor]:
    b = torch.mm(a, a)
    with torch.autocast("cpu", enabled=False):
        return b, torch.mm(a, a)


LIFTED = [plain, constant_switch, decorated, calls_decorated, bound_and_reentered, norms, disables]


@pytest.mark.parametrize("fn", LIFTED, ids=lambda f: f.__name__)
@pytest.mark.parametrize("ambient", [False, True])
def test_lifted_rows_equal_eager(fn, ambient: bool, x: Tensor) -> None:
    """The scripted function gives eager's dtypes and values, in a region or not, at once and later."""
    compiled = script(fn)
    with torch.autocast("cpu", enabled=ambient):
        expected = fn(x)
        for _ in range(3):
            torch.testing.assert_close(compiled(x), expected)
    assert isinstance(compiled.scripted, torch.jit.ScriptFunction)


@pytest.mark.parametrize("use_amp", [True, False])
def test_runtime_enabled(use_amp: bool, x: Tensor) -> None:
    """`enabled` may be an argument; torch.jit.script refuses it without saying where."""
    compiled = script(runtime_switch)
    for _ in range(3):
        assert compiled(x, use_amp).dtype == (BF16 if use_amp else FP32)


def test_torch_refuses_runtime_enabled(x: Tensor) -> None:
    """Why: torch.jit.script has no such thing, and does not say where."""
    with pytest.raises(RuntimeError, match="must be a constant"):
        torch.jit.script(runtime_switch)(x, True)


@pytest.mark.parametrize("dtypes", [(BF16, BF16), (BF16, FP32), (FP32, FP32)], ids=str)
def test_promotion_with_unknown_dtypes(dtypes: tuple, x: Tensor) -> None:
    """Inputs whose dtypes are known only at run time are promoted as in eager mode."""
    inputs = [x.to(dtype) for dtype in dtypes]
    compiled = script(promotes)
    for _ in range(3):
        assert [t.dtype for t in compiled(*inputs)] == [t.dtype for t in promotes(*inputs)]


def arithmetic(a: Tensor) -> list[Tensor]:
    with torch.autocast("cpu"):
        b = torch.mm(a, a)
        return [b + 1, b + b, b * 2.0, b.sum(), b + a]


def test_arithmetic_keeps_eagers_dtypes(x: Tensor) -> None:
    """torch.jit.script casts what it does not know to float32; here b + 1 stays bfloat16 as in eager mode."""
    expected = [t.dtype for t in arithmetic(x)]
    compiled, theirs = script(arithmetic), torch.jit.script(arithmetic)
    for _ in range(3):
        assert [t.dtype for t in compiled(x)] == expected == [BF16] * 4 + [FP32]
    assert [t.dtype for t in theirs(x)] == [FP32] * 5


def same_product_twice(a: Tensor) -> tuple[Tensor, Tensor]:
    outside = torch.mm(a, a)
    with torch.autocast("cpu"):
        return outside, torch.mm(a, a)


def test_equal_expressions_are_not_merged(x: Tensor) -> None:
    """The optimiser does not take the product inside a region for the one outside."""
    compiled = script(same_product_twice)
    for _ in range(4):
        assert [t.dtype for t in compiled(x)] == [FP32, BF16]


def early_return(a: Tensor, n: int) -> Tensor:
    with torch.autocast("cpu"):
        for i in range(n):
            if i == 2:
                return torch.mm(a, a)
    return torch.mm(a, a[0])


def test_regions_are_left(x: Tensor) -> None:
    """An early return and an exception leave the region, as in eager mode."""
    compiled = script(early_return)
    for _ in range(3):
        assert compiled(x, 5).dtype == BF16
        with pytest.raises(RuntimeError, match="mat2"):
            compiled(x, 0)
        assert not torch.is_autocast_enabled("cpu")
    failing = script(fails_inside)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="mat2"):
            failing(x)
        assert not torch.is_autocast_enabled("cpu")


def fails_inside(a: Tensor) -> Tensor:
    with torch.autocast("cpu"):
        return torch.mm(a, a[0])


def custom_op(a: Tensor) -> Tensor:
    with torch.autocast("cpu"):
        return torch.ops.amp_core_test.low(a)


def test_custom_op_rules_apply(x: Tensor) -> None:
    """An op registered with torch.library.register_autocast is cast in scripted regions too."""
    library = torch.library.Library("amp_core_test", "FRAGMENT")
    library.define("low(Tensor a) -> Tensor")
    library.impl("low", lambda a: a.clone(), "CompositeExplicitAutograd")
    torch.library.register_autocast("amp_core_test::low", "cpu", torch.bfloat16, lib=library)
    try:
        assert script(custom_op)(x).dtype == custom_op(x).dtype == BF16
        assert torch.jit.script(custom_op)(x).dtype == FP32
    finally:
        library._destroy()


def deprecated_class(a: Tensor) -> Tensor:
    with torch.cpu.amp.autocast(True):
        return torch.mm(a, a)


def test_deprecated_classes(x: Tensor) -> None:
    """Torch's deprecated classes, with their order of arguments, are regions too."""
    assert script(deprecated_class)(x).dtype == BF16


def test_torch_ignores_what_is_lifted(x: Tensor) -> None:
    """Why: torch.jit.script lets eager autocast overrule enabled=False inside; amp_core.script does not."""
    theirs = torch.jit.script(disables)
    with torch.autocast("cpu"):
        assert theirs(x)[1].dtype == BF16
        assert [t.dtype for t in script(disables)(x)] == [BF16, FP32]


def test_trace_calls_script(x: Tensor) -> None:
    """A traced function that calls a scripted one in a region replays the casts; torch's replays without."""
    ours, theirs = script(no_region), torch.jit.script(no_region)

    def replayed(compiled) -> torch.dtype:
        def caller(a: Tensor) -> Tensor:
            with torch.autocast("cpu", cache_enabled=False):
                return compiled(a)

        with torch.no_grad():
            return torch.jit.trace(caller, (x,), check_trace=False)(x).dtype

    assert replayed(theirs) == FP32
    assert replayed(ours) == BF16


Region = torch.autocast


def under_another_name(a: Tensor) -> Tensor:
    with Region("cpu", enabled=False):
        return torch.mm(a, a)


def calls_by_name(a: Tensor) -> Tensor:
    with torch.autocast("cpu"):
        with torch.no_grad():
            b = torch.mm(a, a)
        return under_another_name(b.float())


def test_regions_of_callees_under_other_names_and_other_contexts(x: Tensor) -> None:
    """A callee runs without its region, or no_grad() is taken for a region."""
    x.requires_grad_()
    ours, eager = script(calls_by_name)(x), calls_by_name(x)
    assert ours.dtype is FP32
    assert torch.equal(ours, eager)
    assert ours.requires_grad is eager.requires_grad is False


def no_region(a: Tensor) -> Tensor:
    return torch.mm(a, a)


def test_scripted_code_calls_it(x: Tensor) -> None:
    """Code scripted by torch itself can call the result."""
    with torch.no_grad():
        assert torch.jit.script(calls_compiled)(x).dtype == BF16


def two_layers(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return torch.softmax(torch.nn.functional.linear(torch.nn.functional.linear(x, w), v), -1)


def calls_two_layers(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return compiled_layers(x, w, v)


compiled_layers = script(two_layers)


@pytest.mark.parametrize("ambient", [False, True])
def test_gradients_of_every_call_equal_eager(x: Tensor, ambient: bool) -> None:
    """From its second call on, TorchScript derives gradients itself: other numbers, or mixed dtypes."""
    x, w, v = (torch.nn.Parameter(x.clone() + i) for i in range(3))
    with torch.autocast("cpu", enabled=ambient):
        wanted = torch.autograd.grad(two_layers(x, w, v).square().sum(), (x, w, v))
    for _ in range(4):
        with torch.autocast("cpu", enabled=ambient):
            loss = compiled_layers(x, w, v=v).square().sum()
        for ours, eager in zip(torch.autograd.grad(loss, (x, w, v)), wanted, strict=True):
            assert torch.equal(ours, eager)
    with torch.no_grad():
        assert torch.equal(compiled_layers(x, w, v=v), two_layers(x, w, v))


def test_gradients_that_torchscript_derives_are_announced(x: Tensor) -> None:
    """Scripted code that calls the result gets wrong gradients, and nobody says why."""
    x, w, v = (torch.nn.Parameter(x.clone() + i) for i in range(3))
    outer = torch.jit.script(calls_two_layers)
    with torch.jit.optimized_execution(False):
        assert outer(x, w, v).requires_grad
    with pytest.warns(UserWarning, match="TorchScript derives gradients"):
        outer(x, w, v)
    with pytest.warns(UserWarning, match="optimized_execution"):
        compiled_layers.scripted(x, w, v)


compiled_plain = script(plain)


def calls_compiled(a: Tensor) -> Tensor:
    return compiled_plain(a)


def traced_original(a: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return torch.mm(a, a)


def calls_traced(a: Tensor) -> Tensor:
    with torch.autocast("cpu"):
        return traced(a)  # here  # noqa: F821


def calls_traced_after_region(a: Tensor) -> Tensor:
    with torch.autocast("cpu"):
        b = torch.mm(a, a)
    return traced(b.float())  # noqa: F821


def runtime_dtype(a: Tensor, dtype: torch.dtype) -> Tensor:
    with torch.autocast("cpu", dtype=dtype):  # here
        return torch.mm(a, a)


def leaks_region(a: Tensor) -> Tensor:
    with torch.autocast("cpu") as region:
        print(region)  # here  # noqa: T201
        return a


def with_policy(a: Tensor) -> Tensor:
    with amp_core.autocast("cpu", policy=amp_core.OpPolicy):  # here
        return torch.mm(a, a)


def splat(a: Tensor, options: dict[str, bool]) -> Tensor:
    with torch.autocast("cpu", **options):  # here
        return torch.mm(a, a)


@torch.autocast("cpu")
@amp_core.autocast("cpu", policy=amp_core.OpPolicy.float32("cpu"))
def decorated_with_policy(a: Tensor) -> Tensor:
    return torch.mm(a, a)


@amp_core.autocast("cpu", dtype=torch.float8_e4m3fn)
def decorated_with_recipes(a: Tensor) -> Tensor:
    return torch.mm(a, a)


def calls_decorated(a: Tensor) -> Tensor:
    return decorated_with_policy(a)


def test_policies_of_decorators_are_refused() -> None:
    """The decorated function, or one that calls it, computes by the device's policy, and nothing tells."""
    for fn, place in (
        (decorated_with_policy, decorated_with_policy),
        (decorated_with_recipes, decorated_with_recipes),
        (calls_decorated, decorated_with_policy),
    ):
        _, line = inspect.getsourcelines(place)
        with pytest.raises(ScriptRegionError, match=r"policy= or dtype=torch\.float8_e4m3fn") as caught:
            script(fn)
        assert str(caught.value).startswith(f"{__file__}:{line}: ")


DIAGNOSED = {
    calls_traced: "was traced",
    runtime_dtype: "known only at run time",
    leaks_region: "can only enter it",
    with_policy: "policy= cannot be compiled",
    splat: "takes its arguments by",
}


@pytest.mark.parametrize("fn", DIAGNOSED, ids=lambda f: f.__name__)
def test_diagnosed_rows_name_the_line(fn, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be had is an error with the file, the line, the reason and what to write."""
    monkeypatch.setitem(globals(), "traced", torch.jit.trace(traced_original, (x,)))
    lines, first = inspect.getsourcelines(fn)
    here = first + next(i for i, line in enumerate(lines) if "# here" in line)
    with pytest.raises(ScriptRegionError, match=DIAGNOSED[fn]) as caught:
        script(fn)
    assert str(caught.value).startswith(f"{__file__}:{here}: ")


def test_traced_functions_run_after_a_region(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call after the region is refused as one in it, whose autocast would apply in the traced function."""
    monkeypatch.setitem(globals(), "traced", torch.jit.trace(traced_original, (x,)))
    assert torch.equal(script(calls_traced_after_region)(x), calls_traced_after_region(x))


def test_other_things_are_refused() -> None:
    """Modules, classes and lambdas get a TypeError or an error that says what to do."""
    with pytest.raises(TypeError, match="move the region into a function"):
        script(torch.nn.Linear(1, 1))
    with pytest.raises(ScriptRegionError, match="defined by `def`"):
        script(lambda a: a)


def test_only_the_deprecation_is_hidden() -> None:
    """A user of Python 3.14 does not learn that torch no longer supports TorchScript there."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        script(plain)
    texts = [str(warning.message) for warning in caught]
    expected = "`torch.jit.script` is not supported in Python 3.14+"
    assert [text.partition(" and")[0] for text in texts] == (
        [expected] if sys.version_info >= (3, 14) else []
    )
