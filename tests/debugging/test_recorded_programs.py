"""Random models and steps: what a recording counts, against a count by hand below and above autocast."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import amp_core
from amp_core import OpPolicy, autocast
from amp_core._torch.autograd import backward_pass, current_autograd_node

from .. import alike
from ..drawn import programs

SIZE = 6
OUTSIDE = "(outside)"
RULES = ["fp32", "lower_precision_fp", "unchanged", "promote", "lower_precision_fp above 60 FLOP"]
RULED = ["linear", "matmul", "bmm", "softmax", "layer_norm", "mm", "cat", "einsum", "sum", "addmm", "cumsum"]


class Sine(torch.autograd.Function):
    """A function whose gradient consists of several ops."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (x.cos() ** 2) * 0.5


def with_gradient(x: Tensor, weight: Tensor) -> Tensor:
    start = x.detach().requires_grad_()
    torch.autograd.backward((start.float() @ weight).tanh().sum(), inputs=[start])
    return x if start.grad is None else x + start.grad


def without_gradient(x: Tensor, weight: Tensor) -> Tensor:
    with torch.no_grad():
        return F.linear(x.float(), weight)


def copied(x: Tensor, weight: Tensor) -> Tensor:
    return torch.empty(x.shape).copy_(x) + weight.mean()


FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": lambda x, w: F.linear(x.float(), w).tanh() + F.linear(x.float(), w),
    "matmul": lambda x, w: torch.matmul(x.float(), w),
    "einsum": lambda x, w: torch.einsum("bi,ij->bj", x.float(), w),
    "bmm": lambda x, w: torch.bmm(x[None].float(), w[None])[0],
    "addmm": lambda x, w: torch.addmm(w[0], x.float(), w),
    "softmax": lambda x, _: torch.softmax(x, -1),
    "layer_norm": lambda x, _: F.layer_norm(x, (SIZE,)),
    "in place": lambda x, w: (x * 1.5).add_(w[0].to(x.dtype)).mul_(0.5),
    "cat": lambda x, _: torch.cat([x, x.float()], -1)[..., :SIZE],
    "half": lambda x, _: x.half(),
    "double": lambda x, _: x.double().float(),
    "cumsum": lambda x, _: torch.cumsum(x, -1) * 0.1,
    "complex": lambda x, _: (torch.complex(x.float(), x.float()) * 2j).real + 0,
    "function": lambda x, _: Sine.apply(x),
    "derivative": with_gradient,
    "constant": lambda x, w: x + without_gradient(x, w),
    "copied": copied,
}


class Block(nn.Module):
    """Layers and functions, one after the other, some in a region of their own or in a checkpoint."""

    def __init__(self, draw: Random, depth: int, layers: list[nn.Module]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(SIZE, SIZE) * 0.3)
        self.layers = nn.ModuleList()
        self.steps: list[tuple[str, Any]] = []
        for _ in range(draw.randrange(1, 4)):
            kind = draw.choice(["layer", "checkpoint", "function", "function", "region"])
            if kind in ("layer", "checkpoint"):
                self.steps.append((kind, len(self.layers)))
                self.layers.append(drawn_layer(draw, depth, layers))
            else:
                self.steps.append((kind, (draw.choice([*FUNCTIONS]), drawn_region(draw))))

    def forward(self, x: Tensor) -> Tensor:
        for kind, what in self.steps:
            if kind == "layer":
                x = self.layers[what](x.float())
            elif kind == "checkpoint":
                x = checkpoint(self.layers[what], x.float(), use_reentrant=False)
            else:
                name, region = what
                with autocast("cpu", **region) if kind == "region" else ExitStack():
                    x = FUNCTIONS[name](x, self.weight)
        return x


def drawn_layer(draw: Random, depth: int, layers: list[nn.Module]) -> nn.Module:
    """Return a new layer, or one that has another place already."""
    makers: list[Callable[[], nn.Module]] = [
        lambda: nn.Linear(SIZE, SIZE),
        lambda: nn.LayerNorm(SIZE),
        lambda: nn.Sequential(nn.Linear(SIZE, SIZE), nn.ReLU(inplace=True)),
        lambda: draw.choice(layers) if layers else nn.Identity(),
        lambda: Block(draw, depth - 1, layers) if depth else nn.GELU(),
    ]
    layers.append(layer := draw.choice(makers)())
    return layer


def drawn_policy(draw: Random) -> OpPolicy | None:
    rules = {op: draw.choice(RULES) for op in draw.sample(RULED, 3)}
    return None if draw.random() < 0.5 else OpPolicy.default("cpu").override(rules)


def drawn_region(draw: Random) -> dict[str, Any]:
    dtype = draw.choice([torch.bfloat16, torch.float16])
    return {"dtype": dtype, "enabled": draw.random() < 0.8, "policy": drawn_policy(draw)}


def drawn_program(seed: int) -> tuple[nn.Module, Callable[[], list[Tensor | None]]]:
    """Return a model, and what trains it for a step or two and returns results and gradients."""
    draw, layers = Random(seed), list[nn.Module]()
    torch.manual_seed(seed)
    model = nn.Sequential(*[Block(draw, 2, layers) for _ in range(draw.randrange(1, 4))])
    region, inside, steps = drawn_region(draw), draw.random() < 0.3, draw.randrange(1, 3)
    kind = draw.choice([torch.optim.SGD, torch.optim.Adam])
    optimizer = kind(model.parameters(), lr=0.01, **{draw.choice(["fused", "foreach"]): True})

    def run() -> list[Tensor | None]:
        torch.manual_seed(0)
        results: list[Tensor | None] = []
        for _ in range(steps):
            model.zero_grad()
            with autocast("cpu", **region):
                result = model(torch.randn(3, SIZE))
                loss = result.float().square().mean()
                if inside and loss.requires_grad:
                    torch.autograd.backward(loss)
            if not inside and loss.requires_grad:
                torch.autograd.backward(loss)
            results += [result.detach().clone(), *[p.grad for p in model.parameters()]]
            optimizer.step()
        return results

    return model, run


class Count(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts ops and casts by hand: modules by hooks, and those of a gradient by a mark on its node."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: Counter[tuple[str, ...]] = Counter()
        self.casts: Counter[tuple[str, ...]] = Counter()
        self._names = {module: name for name, module in model.named_modules()}
        self._weights = {id(p): name for name, p in model.named_parameters()}
        self._calls: list[tuple[nn.Module, int]] = []
        self._known: dict[Any, int] = {}
        self._kept: list[Tensor] = []  # so that no other tensor gets its memory

    def counted(self, run: Callable[[], Any]) -> Any:
        with ExitStack() as stack:
            stack.callback(register_module_forward_pre_hook(self._came).remove)
            stack.callback(register_module_forward_hook(self._left, always_call=True).remove)
            forget = register_optimizer_step_post_hook(lambda *_: self._known.clear())
            stack.callback(forget.remove)
            stack.enter_context(Marks(self))
            stack.enter_context(self)
            return run()

    def _came(self, module: nn.Module, given: Any) -> None:
        if self._calls:
            self.mark(given)
        self._calls.append((module, backward_pass()))

    def _left(self, _module: nn.Module, _given: Any, result: Any) -> None:
        self.mark(result)
        self._calls.pop()

    @property
    def here(self) -> str:
        return self._names[self._calls[-1][0]] if self._calls else OUTSIDE

    def mark(self, value: Any) -> None:
        """Note the module that runs on the nodes that have none yet."""
        todo = [t.grad_fn for t in tree_leaves(value) if isinstance(t, Tensor) and not t.is_inference()]
        while todo:
            node = todo.pop()
            if node is not None and "place" not in node.metadata:
                node.metadata["place"] = self.here
                todo += [before for before, _ in node.next_functions]

    def _where(self) -> tuple[str, str]:
        task = backward_pass()
        if self._calls and self._calls[-1][1] == task:
            return "forward", self.here
        node: Any = current_autograd_node()
        if node is None:
            return "forward" if task == -1 else "backward", OUTSIDE
        if "AccumulateGrad" in node.name():
            name = self._weights.get(id(node.variable))
            return "backward", OUTSIDE if name is None else name.rpartition(".")[0]
        if "place" not in node.metadata:  # a checkpoint repeats it, where torch turns `Marks` off
            raise LookupError
        return "backward", node.metadata["place"]

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        name, where = op._schema.name, self._where()
        if name in ("aten::_to_copy", "aten::copy_"):
            self._cast(*((args[0], result) if name == "aten::_to_copy" else (args[1], args[0])), where)
        writes = op._schema.name.endswith("_")  # those on lists return nothing
        given, made = floats((args, kwargs)), floats(result) or (floats(args[0]) if writes else [])
        aliases = [each.alias_info for each in op._schema.returns]
        is_view = bool(aliases) and all(info is not None and not info.is_write for info in aliases)
        if given and made and not is_view and name.removeprefix("aten::") not in COPIES:
            dtypes = "+".join(
                str(d)[6:] for d in sorted({t.dtype for t in given}, key=lambda d: (d.itemsize, str(d)))
            )
            full = f"{name}.{op._overloadname}".removesuffix(".default")
            self.ops[(*where, full, dtypes, str(made[0].dtype)[6:])] += 1
        return result

    def _cast(self, source: Tensor, result: Tensor, where: tuple[str, str]) -> None:
        if source.dtype is result.dtype or len(floats((source, result))) < 2:
            return
        name = self._weights.get(id(source), "")
        key = *where, str(source.dtype)[6:], str(result.dtype)[6:], name
        memory = name or (source.data_ptr(), source.shape, source.stride())
        call, version = (memory, source.dtype, result.dtype), source._version
        self.casts[(*key, "calls")] += 1
        self.casts[(*key, "nbytes")] += result.numel() * result.element_size()
        if where[0] == "forward":
            self.casts[(*key, "repeats")] += self._known.get(call) == version
            self._known[call] = version
            self._kept.append(source)


COPIES = {"_to_copy", "_unsafe_view", "clone", "copy_", "detach", "empty_like", "fill_", "new_zeros"}
COPIES |= {"ones_like", "zero_", "zeros_like"}


class Marks(TorchFunctionMode):
    """Marks the nodes of each result."""

    def __init__(self, count: Count) -> None:
        super().__init__()
        self._count = count

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._count.mark(result)
        return result


def floats(value: Any) -> list[Tensor]:
    return [t for t in tree_leaves(value) if isinstance(t, Tensor) and t.is_floating_point()]


def same(one: list[Tensor | None], other: list[Tensor | None]) -> bool:
    return all(alike.same(a, b, 0, 0) for a, b in zip(one, other, strict=True))


def check(seed: int) -> bool:
    _, run = drawn_program(seed)
    try:
        expected = run()
    except RuntimeError:  # such as an op that has no kernel for these dtypes
        return False
    model, run = drawn_program(seed)
    with amp_core.record(model) as recording:
        recorded = run()
    model, run = drawn_program(seed)
    count = Count(model)
    assert same(expected, recorded), seed
    try:
        counted = count.counted(run)
    except LookupError:
        return False
    assert same(expected, counted), seed
    ops: Counter[tuple[str, ...]] = Counter()
    for op, calls in recording.ops.items():
        place = op.place.module if op.place.model else OUTSIDE
        ops[op.phase, place, op.kernel, op.dtypes, op.result] += calls
    assert ops == count.ops, seed
    casts: Counter[tuple[str, ...]] = Counter()
    for key, cast in recording.casts.items():
        place = key.place.module if key.place.model else OUTSIDE
        for figure in ("calls", "nbytes", "repeats"):
            casts[key.phase, place, key.source, key.result, key.weight, figure] += getattr(cast, figure)
    assert casts == count.casts, seed
    return True


def test_recorded_programs() -> None:
    """A recording counts an op or a cast twice, not at all or for another module, or changes a result."""
    checked = [check(draw.randrange(10**9)) for draw in programs(6.0)]
    assert sum(checked) > 5
