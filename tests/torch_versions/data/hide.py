"""Run amp-core with one private torch name hidden from it, or changed, in a forked process per name.

    python hide.py MODE PATH...

MODE is ``hide`` (torch lacks the name) or ``change`` (a call of it raises). Prints one JSON object per path.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import os
import sys
import warnings
from collections.abc import Callable

import torch

FEATURES = "amp_core._torch.features"


class Patched(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads amp-core's features with another `resolve`."""

    def __init__(self, mode: str, path: str) -> None:
        self.mode, self.path = mode, path

    def find_spec(self, name, path, target=None):
        if name != FEATURES:
            return None
        self.real = importlib.machinery.PathFinder.find_spec(name, path)
        return importlib.machinery.ModuleSpec(name, self, origin=self.real.origin)

    def exec_module(self, module):
        module.__file__ = self.real.origin
        self.real.loader.exec_module(module)
        real = module.resolve

        def resolve(path):
            found = real(path)
            if path != self.path:
                return found
            if self.mode == "hide":
                return module._MISSING
            return found if isinstance(found, type) or not callable(found) else changed

        module.resolve = resolve


def changed(*_args, **_kwargs):
    raise TypeError("this torch wants other arguments")


A, B = torch.randn(4, 8), torch.randn(8, 4)


def listing() -> None:
    import amp_core

    assert amp_core.backends()["cpu"].status == "available"


def regions() -> None:
    from amp_core import autocast, custom_bwd, custom_fwd, disable

    for _ in range(2):
        with autocast("cpu", torch.bfloat16):
            low = A @ B
            with autocast("cpu", enabled=False):
                assert (A @ B).dtype is torch.float32
            with disable():
                assert (A @ B).dtype is torch.float32
            assert low.dtype is torch.bfloat16
            assert torch.nn.functional.mse_loss(low, low).dtype is torch.float32
        assert (A @ B).dtype is torch.float32
    assert autocast("cpu")(torch.mm)(A, B).dtype is torch.bfloat16
    with torch.device("cpu"), autocast("cpu"):  # a mode for functions is active
        assert (A @ B).dtype is torch.bfloat16

    class Double(torch.autograd.Function):
        @staticmethod
        @custom_fwd(device_type="cpu")
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        @custom_bwd(device_type="cpu")
        def backward(ctx, grad):
            return 2 * grad

    x = torch.ones(2, requires_grad=True)
    with autocast("cpu"):
        Double.apply(x).sum().backward()
    assert x.grad.tolist() == [2.0, 2.0]


def scaler() -> None:
    from amp_core import GradScaler

    for clipped in (False, True):
        for dtype in (torch.float32, torch.bfloat16):
            weights = [torch.nn.Parameter(torch.ones(n, dtype=dtype)) for n in (1, 3)]
            optimizer = torch.optim.SGD(weights, lr=0.5)
            scaler = GradScaler("cpu", init_scale=8.0)
            for factor in (1.0, 1.0, float("inf")):
                loss = sum((w.float() * factor).sum() for w in weights)
                optimizer.zero_grad()
                scaler.scale(loss).backward()
                if clipped and dtype is torch.float32:
                    scaler.unscale_(optimizer)
                    norm = scaler.clip_grad_norm_(optimizer, 100.0)
                    assert factor > 1 or abs(float(norm) - 2.0) < 1e-6
                scaler.step(optimizer)
                scaler.update()
            assert [w.tolist() for w in weights] == [[0.0], [0.0] * 3]
            assert scaler.get_scale() == 4.0
            assert GradScaler("cpu").load_state_dict(scaler.state_dict()) is None


def policy() -> None:
    from amp_core import OpPolicy, apply_policy, autocast

    changed = OpPolicy.default("cpu").override({"mm": "fp32"})
    with autocast("cpu", policy=changed):
        assert torch.mm(A, B).dtype is torch.float32
        assert torch.bmm(A[None], B[None]).dtype is torch.bfloat16
    assert torch.mm(A, B).dtype is torch.float32
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
    apply_policy(model, {"0": "fp32"})
    with autocast("cpu"):
        assert model[0](A.bfloat16()).dtype is torch.float32
        assert model(A).dtype is torch.bfloat16


def casts() -> None:
    from amp_core import autocast, cached_casts, master_weights

    for keep in (cached_casts, master_weights):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 512), torch.nn.Linear(512, 256))
        expected = []
        for kept in (False, True):
            model.zero_grad()
            with autocast("cpu"):
                if not kept:
                    out = model(A)
                    out.float().square().sum().backward()
                else:
                    with keep(model):
                        for _ in range(2):
                            out = model(A)
                        out.float().square().sum().backward()
            expected.append([p.grad.clone() for p in model.parameters()])
        for plain, cast in zip(*expected, strict=True):
            torch.testing.assert_close(cast, plain, rtol=2e-2, atol=2e-2)


def record() -> None:
    import amp_core

    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
    with amp_core.record(model) as recording, amp_core.autocast("cpu"):
        model(A).float().square().sum().backward()
    text = str(recording)
    assert "linear" in text, text
    assert "bfloat16" in text, text


def script() -> None:
    import amp_core

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit")
        assert amp_core.script(scripted)(A, B).dtype is torch.bfloat16
        with amp_core.autocast("cpu"):
            assert amp_core.script(scripted)(A, B).dtype is torch.bfloat16


def scripted(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return a @ b


def plan() -> None:
    from amp_core import OpPolicy, PrecisionPlan

    model = torch.nn.Module()
    model.register_buffer("angles", torch.ones(2))
    with PrecisionPlan(OpPolicy("cpu"), float32_buffers=("angles",)).apply(model):
        assert model.half().angles.dtype is torch.float32


SCENARIOS: tuple[Callable[[], None], ...] = (listing, regions, scaler, policy, casts, record, plan, script)


def report(mode: str, path: str) -> dict[str, object]:
    """Run every scenario; say how each went, what was warned of and which features are off."""
    if path:
        sys.meta_path.insert(0, Patched(mode, path))
    results = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import amp_core
        from amp_core._torch import features

        for scenario in SCENARIOS:
            try:
                scenario()
                results[scenario.__name__] = "right"
            except amp_core.TorchFeatureError as error:
                results[scenario.__name__] = f"refused: {error}"
            except Exception as error:
                import traceback

                results[scenario.__name__] = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
    return {
        "path": path,
        "results": results,
        "warnings": [[w.category.__name__, str(w.message), w.filename] for w in caught],
        "off": [s.feature for s in features.statuses() if not s.works],
        "names": {s.feature: s.names for s in features.statuses()},
    }


def main() -> None:
    import torch._dynamo  # noqa: F401  # once for all children: an optimizer imports it

    mode, *paths = sys.argv[1:]
    for path in paths:
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            print(json.dumps(report(mode, path)))
            sys.stdout.flush()
            os._exit(0)
        os.waitpid(child, 0)


main()
