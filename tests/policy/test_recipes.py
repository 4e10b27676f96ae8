"""Recipes as rules: which bits each product gets, in every kind of program, and what is refused."""

from __future__ import annotations

import copy
import math
import pickle
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import amp_core
from amp_core import EmulationWarning, GradScaler, OpPolicy, PolicyError, Recipe, autocast
from amp_core.dispatch import activate, runners
from amp_core.formats import E4M3, Quantization, quantize

from ..drawn import programs

LOW = torch.bfloat16
CPU = OpPolicy.default("cpu")
NAMES = [name for name in Recipe.names() if name != "fp8_delayed"]
ROWS = Quantization(E4M3, "row")
OWN = Recipe(ROWS, None, Quantization(E4M3, 5), name="rows of inputs")


def region(rule: Any, op: str = "linear") -> autocast:
    return autocast("cpu", dtype=LOW, policy=CPU.override({op: rule}))


def quantised(tensor: Tensor, how: Quantization | None, dim: int, rotated: bool) -> Tensor:
    if how is None:
        return tensor.float()
    seed = int(torch.randint(2**62, ())) if how.rounding == "stochastic" else None
    return quantize(tensor, how, dim, seed=seed).dequantize(rotated=rotated)


def product(recipe: Recipe, name: str, a: Tensor, b: Tensor) -> Tensor:
    """Return one of the three products of `recipe`, written out."""
    first, second = recipe.operands(name)
    return quantised(a, first, -1, name == "grad_weight") @ quantised(b, second, -2, name == "grad_weight")


def by_hand(recipe: Recipe, x: Tensor, w: Tensor, b: Tensor, grad: Tensor) -> list[Tensor]:
    """Return the output and the gradients of ``linear``, each product written out."""
    rows = math.prod(x.shape[:-1])
    x2, w, g2 = x.to(LOW).reshape(rows, x.shape[-1]), w.to(LOW), grad.reshape(rows, w.shape[0]).float()
    y = (product(recipe, "output", x2, w.t()) + b.to(LOW)).to(LOW).view(*x.shape[:-1], w.shape[0])
    grad_x = product(recipe, "grad_input", g2, w).to(LOW).view(x.shape)
    grad_w = product(recipe, "grad_weight", x2.t(), g2).to(LOW).t()
    return [y, grad_x.float(), grad_w.float()]


@pytest.mark.parametrize("recipe", [*map(Recipe.named, NAMES), OWN], ids=lambda recipe: recipe.name)
@pytest.mark.parametrize(
    ("shape", "out"), [((2, 3, 40), 24), ((5, 7), 3), ((7,), 5), ((0, 8), 4), ((131, 130), 129)]
)
def test_the_three_products_of_linear(recipe: Recipe, shape: tuple[int, ...], out: int) -> None:
    """A product quantises along the wrong dimension, by the wrong role, or rounds once too often."""
    torch.manual_seed(0)
    x, w, b = torch.randn(shape), torch.randn(out, shape[-1]), torch.randn(out)
    leaves = [t.clone().requires_grad_() for t in (x, w, b)]
    with region(recipe):
        y = F.linear(*leaves)
    grad = torch.randn(y.shape).to(LOW)
    torch.manual_seed(1)
    y.backward(grad)
    torch.manual_seed(1)
    wanted = by_hand(recipe, x, w, b, grad)
    for mine, theirs in zip([y, leaves[0].grad, leaves[1].grad], wanted, strict=True):
        assert mine.dtype is theirs.dtype
        assert torch.equal(mine, theirs)


R = torch.randn
CALLS: dict[str, list[tuple[Any, tuple[Tensor, ...], dict[str, Any]]]] = {
    "mm": [(torch.mm, (R(3, 5), R(5, 4)), {})],
    "bmm": [(torch.bmm, (R(2, 3, 5), R(2, 5, 4)), {}), (torch.bmm, (R(0, 3, 5), R(0, 5, 4)), {})],
    "addmm": [
        (torch.addmm, (R(4), R(3, 5), R(5, 4)), {}),
        (torch.addmm, (R(4) * torch.nan, R(3, 5), R(5, 4)), {"beta": 0, "alpha": 0.5}),
    ],
    "baddbmm": [(torch.baddbmm, (R(2, 3, 4), R(2, 3, 5), R(2, 5, 4)), {"beta": 2})],
    "matmul": [
        (torch.matmul, (R(*a), R(*b)), {})
        for a, b in [
            ((5,), (5,)),
            ((3, 5), (5,)),
            ((5,), (2, 5, 4)),
            ((2, 3, 5), (5, 4)),
            ((2, 1, 3, 5), (6, 5, 4)),
            ((3, 0), (0, 4)),
            ((0, 5), (5, 4)),
        ]
    ],
}


@pytest.mark.parametrize("op", CALLS)
def test_every_op_that_takes_a_recipe(op: str) -> None:
    """An op multiplies other matrices, has another shape, or forgets a factor or the bias."""
    how = Recipe.fp8_rowwise()
    for function, args, kwargs in CALLS[op]:
        low = [t.to(LOW) for t in args]
        first, second = low[-2:]
        left = quantize(first, how.input, -1).dequantize()
        right = quantize(second, how.weight, -2 if second.dim() > 1 else -1).dequantize()
        wanted = function(*(t.float() for t in low[:-2]), left, right, **kwargs)
        leaves = [t.clone().requires_grad_() for t in args]
        with region(how, op):
            got = function(*leaves, **kwargs)
        assert (got.dtype, got.shape) == (LOW, wanted.shape)
        torch.testing.assert_close(got, wanted.to(LOW), rtol=1e-2, atol=1e-5)
        got.float().sum().backward()
        assert all(t.grad is None or t.grad.shape == t.shape for t in leaves)


@pytest.mark.parametrize("op", ["addmm", "baddbmm"])
def test_what_is_added_is_rounded_once(op: str) -> None:
    """What addmm adds is rounded to the region's dtype before it is added, if it has a factor."""
    batch = () if op == "addmm" else (2,)
    bias, a, b = (R(*batch, *shape).to(LOW) for shape in ((6, 4), (6, 8), (8, 4)))
    how = Recipe.fp8_rowwise()
    exact = quantize(a, how.input, -1).dequantize() @ quantize(b, how.weight, -2).dequantize()
    with region(how, op):
        got = getattr(torch, op)(100 * bias, a, b, beta=1 / 3)
    assert torch.equal(got, torch.add(exact, 100 * bias, alpha=1 / 3).to(LOW))


@pytest.mark.parametrize("rule", [Recipe.fp8_rowwise(), "low_in_fp32_out", "lower_precision_fp"])
@pytest.mark.parametrize("op", ["addmm", "baddbmm"])
def test_what_is_added_zero_times_has_a_gradient(op: str, rule: Any) -> None:
    """The gradient of what is added is missing, so an optimizer does not decay it, or its NaN is added."""
    shapes = ((1,), (3, 4), (4, 5)) if op == "addmm" else ((2, 1, 5), (2, 3, 4), (2, 4, 5))
    bias, a, b = (R(*shape).requires_grad_() for shape in shapes)
    with torch.no_grad():
        bias.fill_(math.nan)
    with region(rule, op):
        result = getattr(torch, op)(bias, a, b, beta=0)
    result.sum().backward()
    assert result.isfinite().all()
    assert bias.grad is not None
    assert torch.equal(bias.grad, torch.zeros_like(bias))
    with region(rule, op):
        assert torch.equal(
            getattr(torch, op)(a @ b, a, b, beta=True), getattr(torch, op)(a @ b, a, b, beta=1)
        )


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (F.linear, [(3, 4), (5, 6)]),
        (torch.mm, [(3, 4), (3, 4, 5)]),
        (torch.bmm, [(3, 4), (4, 4)]),
        (torch.matmul, [(2, 3, 4), (3, 4, 5)]),
        (torch.addmm, [(9,), (3, 4), (4, 5)]),
        (F.linear, [(3, 4), (5, 4), (4,)]),
    ],
)
def test_wrong_shapes_raise_as_in_torch(function: Any, shapes: list[tuple[int, ...]]) -> None:
    """An op multiplies what torch refuses, or raises an error that names the emulation."""
    args = [R(*shape) for shape in shapes]
    with pytest.raises(RuntimeError) as plain, autocast("cpu", dtype=LOW):
        function(*args)
    with pytest.raises(RuntimeError) as ours, region("recipe mxfp8", function.__name__):
        function(*args)
    assert str(ours.value).splitlines()[0] == str(plain.value).splitlines()[0]


@pytest.mark.parametrize(
    "call",
    [
        lambda: F.linear(R(3, 4), R(5, 4), R(2, 3, 5)),
        lambda: F.linear(R(3, 4), R(5, 4), R(5).double()),
        lambda: torch.addmm(torch.ones(5, dtype=torch.int64), R(3, 4), R(4, 5)),
        lambda: F.conv2d(R(1, 3, 5, 5), R(2, 3, 3, 3), R(1)),
        lambda: F.conv2d(R(1, 3, 5, 5), R(2, 3, 3, 3), R(2).double()),
        lambda: F.conv_transpose2d(R(1, 4, 5, 5), R(4, 3, 3, 3), R(1), groups=2),
        lambda: F.conv1d(R(3), R(3)),
        lambda: F.conv1d(R(2, 3, 5), R(4, 3, 2), R(1, 4)),
        lambda: F.conv_transpose1d(R(2, 3, 5), R(3, 4, 2), R(1, 4)),
        lambda: F.linear(R(3, 4), R(4), R(1)),
        lambda: torch.addmm(R(3), R(3, 4), R(4, 5), beta=0),
    ],
)
def test_calls_that_torch_refuses_are_refused(call: Any) -> None:
    """A bias of a wrong shape or dtype is broadcast in silence: under a recipe, a wrong model trains."""
    with pytest.raises(RuntimeError), autocast("cpu", dtype=LOW):
        call()
    policy = OpPolicy("cpu", dict.fromkeys(("linear", "addmm", "conv*d"), Recipe.fp8_tensorwise()))
    with pytest.raises(RuntimeError), autocast("cpu", dtype=LOW, policy=policy):
        call()


def test_what_autocast_does_not_cast_is_not_quantised() -> None:
    """float64 and integers lose their precision, or a float32 region is quantised."""
    for dtype in (torch.float64, torch.int32):
        x = torch.ones(2, 2, dtype=dtype)
        with region("recipe mxfp4"):
            assert F.linear(x, x).dtype is dtype
    x = R(3, 8)
    with region("recipe mxfp4"), autocast("cpu", dtype=torch.float32):
        assert torch.equal(F.linear(x, x), x @ x.t())


@pytest.mark.parametrize("op", ["conv_tbc", "softmax", "scaled_dot_product_attention", "einsum"])
def test_other_ops_take_no_recipe(op: str) -> None:
    """A rule is accepted that has no effect."""
    with pytest.raises(
        PolicyError, match="only these ops take a recipe: addmm, baddbmm, bmm, linear, matmul, mm"
    ):
        CPU.override({op: Recipe.mxfp8()})


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ("recipe mxfp9", "no recipe 'mxfp9'; the recipes are fp8_tensorwise"),
        ("recipe mxfp8 above", "Unknown rule 'recipe mxfp8 above'"),
        ("recipe mxfp8 above 3 cows", "'3 cows' is no amount of work, such as '8 MFLOP'"),
        ("mxfp8", "write 'recipe mxfp8'"),
        (Recipe.mxfp8, "it is a method. Call it"),
        (Recipe.mxfp8().input, "Pass a Recipe, which has three roles"),
        (["mxfp8"], "the rules are lower_precision_fp"),
    ],
)
def test_rules_that_mean_nothing_are_refused(rule: Any, text: str) -> None:
    """A misspelt recipe is no recipe, and nobody says so."""
    with pytest.raises(PolicyError, match=text):
        CPU.override({"linear": rule})


def test_a_policy_shows_its_recipes() -> None:
    """A rule cannot be told from another recipe's, or a policy is lost on its way to another process."""
    policy = CPU.override(
        {"linear": Recipe.mxfp8(), "mm": OWN, "bmm": "recipe nvfp4 above 8 MFLOP"}, origin="here"
    )
    assert policy.rule("linear") == "recipe mxfp8"
    assert policy.rule("mm").startswith("recipe rows-of-inputs:")
    text = str(policy.explain("aten::mm.default"))
    assert "input e4m3 per row, weight as it is, grad_output e4m3 per block of 5" in text
    assert str(policy.explain("aten::bmm.default")).endswith(
        "calls with at most 8 MFLOP of work are not quantised"
    )
    assert CPU.diff(policy)["aten::linear.default"] == ("lower_precision_fp", "recipe mxfp8")
    assert pickle.loads(pickle.dumps(policy)) == policy
    other = Recipe(ROWS, ROWS, None, name="rows of inputs")
    assert CPU.override({"mm": other}) != CPU.override({"mm": OWN})


FILE = """
device_type = "cpu"

[rules]
linear = "recipe mine above 8 MFLOP"

[modules."0"]
linear = "recipe mine"

[recipes.mine.input]
element = "e4m3"
granularity = "row"
"""


def test_files_define_recipes(tmp_path: Path) -> None:
    """A recipe of one's own is lost on its way to a file or a module, or a mistake has no line."""
    mine = Recipe(ROWS, None, None, name="mine")
    policy = OpPolicy.from_toml(FILE)
    assert policy.rule("linear").size == "8 MFLOP"
    assert policy.rule("linear").recipe == mine
    path, again = tmp_path / "policy.toml", tmp_path / "again.toml"
    for own in (policy, CPU.override({"mm": OWN, "bmm": "recipe nvfp4"})):
        path.write_text(own.to_toml())
        assert OpPolicy.from_toml(path) == own
    path.write_text(FILE)
    model = nn.Sequential(nn.Linear(8, 8))
    with amp_core.apply_policy(model, path) as applied:
        again.write_text(applied.to_toml())
    x = R(4, 8)
    for source in (path, again, {"0": {"linear": mine}}):
        with amp_core.apply_policy(model, source), autocast("cpu", dtype=LOW):
            got = model(x)
        with region(mine):
            assert torch.equal(got, model(x))
    for old, new, message in [
        ('"row"', '"rows"', r":10: \[input\]: granularity must be"),
        ("recipe mine above", "recipe mime above", r":5: There is no recipe 'mime'.* mine"),
        ("recipes.mine.", "recipes.mxfp8.", "'mxfp8' is a published recipe"),
        ("[recipes.mine.input]", "[recipes]", ":10: recipes must be tables"),
        ("recipes.mine.", 'recipes."my own".', ":10: 'my own' is not one word"),
        ("[recipes.mine.input]", "[recipes.less]\n[recipes.mine.input]", ":10: quantises nothing"),
    ]:
        with pytest.raises(PolicyError, match=message):
            OpPolicy.from_toml(FILE.replace(old, new))


def test_a_threshold_leaves_small_calls_alone() -> None:
    """A small product is quantised, or a large one is not."""
    x, w = R(100, 8), R(8, 8)
    for rows, recipe in ((100, True), (10, False)):
        with region("recipe mxfp4 above 10 kFLOP"):
            got = F.linear(x[:rows], w)
        with region("recipe mxfp4") if recipe else autocast("cpu", dtype=LOW):
            assert torch.equal(got, F.linear(x[:rows], w))


def test_modules_have_recipes_of_their_own() -> None:
    """The first and last layers cannot be left out."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    x = R(4, 8)
    with autocast("cpu", dtype=LOW), amp_core.apply_policy(model, {"1": {"linear": Recipe.mxfp4()}}):
        got = model(x)
    with autocast("cpu", dtype=LOW):
        h = model[0](x)
        with region(Recipe.mxfp4()):
            h = model[1](h)
        assert torch.equal(got, model[2](h))


@pytest.mark.parametrize("where", ["input", "weight", "gradient"])
@pytest.mark.parametrize("name", NAMES)
def test_a_scaler_sees_an_overflow(name: str, where: str) -> None:
    """Quantising turns inf into the largest value of the format, and the optimizer steps on it."""
    for value in (torch.inf, torch.nan):
        model, x = nn.Linear(40, 33), R(6, 40)
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), GradScaler("cpu", init_scale=1.0)
        with torch.no_grad():
            {"input": x, "weight": model.weight, "gradient": torch.ones(4, 3)}[where][3, 2] = value
        with region(f"recipe {name}"):
            y = model(x)
        factor = torch.ones_like(y)
        factor[2, 1] = value if where == "gradient" else 1.0
        scaler.scale((y * factor).float().square().sum()).backward()
        scaler.step(optimizer)
        assert scaler.last_step[optimizer].skipped


class Net(nn.Module):
    """Layers that share a weight, broadcast, and get views."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(20, 33), nn.Linear(33, 20), nn.LayerNorm(20)
        self.free = nn.Parameter(R(20, 20))

    def body(self, x: Tensor) -> Tensor:
        x = x + self.norm(self.down(F.gelu(self.up(x)))) @ self.free
        return F.linear(x.transpose(0, 1), self.up.weight).transpose(0, 1)

    def forward(self, x: Tensor, again: Any = None) -> Tensor:
        if again is None:
            return self.body(x)
        return checkpoint(self.body, x, use_reentrant=False, context_fn=lambda: (nullcontext(), again))


NET = Net()


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


X = R(4, 6, 20, generator=generator(1))


def results(policy: OpPolicy, around: Any = nullcontext, again: bool = False) -> list[Tensor]:
    """Return output and gradients of one step in a region with `policy`."""
    net = copy.deepcopy(NET)
    with around(net):
        with autocast("cpu", dtype=LOW, policy=policy):
            y = net(X, autocast("cpu", dtype=LOW, policy=policy) if again else None)
        if threading.current_thread() is threading.main_thread():
            torch.manual_seed(2)  # of torch's generator, which threads share
        y.float().square().sum().backward()
    return [y.detach(), *(p.grad for p in net.parameters() if p.grad is not None)]


def check(got: list[Tensor], wanted: list[Tensor]) -> None:
    assert len(got) == len(wanted) > 6
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


AROUND: dict[str, Any] = {
    "nothing": lambda _: nullcontext(),
    "cached_casts": amp_core.cached_casts,
    "record": amp_core.record,
    "guard": amp_core.guard,
}


def test_programs_of_several_features() -> None:
    """A scope of casts, an observer, a checkpoint or another thread changes what a recipe computes."""
    other = results(CPU.override({"linear": "recipe mxfp4"}))
    for chance in programs(most=12):
        rules = {
            op: f"recipe {chance.choice(NAMES)}" for op in chance.choice(["linear", "linear matmul"]).split()
        }
        policy = CPU.override(rules)
        wanted = results(policy)
        with ThreadPoolExecutor(1) as pool:
            beside = pool.submit(results, CPU.override({"linear": "recipe mxfp4"}))
            check(results(policy, AROUND[chance.choice([*AROUND])], chance.random() < 0.5), wanted)
            check(beside.result(), other)


@pytest.mark.slow
def test_compiled_programs() -> None:
    """A graph quantises otherwise, breaks, or keeps the recipe of its first call."""

    def run(x: Tensor, w: Tensor, policy: OpPolicy) -> Tensor:
        with autocast("cpu", dtype=LOW, policy=policy):
            return F.linear(x.sin(), w)

    def gradients(call: Any, policy: OpPolicy) -> list[Tensor]:
        leaves = [R(6, 40, generator=generator(0)).requires_grad_(), R(33, 40, generator=generator(1))]
        call(leaves[0], leaves[1].requires_grad_(), policy).float().square().sum().backward()
        return [t.grad for t in leaves]

    torch._dynamo.reset()
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    for rule in ("recipe mxfp4", "recipe fp8_tensorwise above 1 kFLOP"):
        policy = CPU.override({"linear": rule})
        for mine, theirs in zip(gradients(compiled, policy), gradients(run, policy), strict=True):
            assert torch.equal(mine, theirs)


def test_replicas_average_the_gradients(one_rank: None) -> None:
    """DistributedDataParallel misses the gradients of quantised products."""
    policy, net = CPU.override({"linear": "recipe mxfp8", "matmul": "recipe fp8_tiles"}), copy.deepcopy(NET)
    replica = nn.parallel.DistributedDataParallel(net)
    with autocast("cpu", dtype=LOW, policy=policy):
        y = replica(X)
    y.float().square().sum().backward()
    check([y.detach(), *(p.grad for p in net.parameters())], results(policy))


@pytest.mark.slow
def test_graphs_draw_random_numbers_anew() -> None:
    """A graph rounds the gradients of every step by the same random numbers, which adds up to a bias."""
    policy = CPU.override({"linear": "recipe nvfp4"})

    def run(x: Tensor, w: Tensor) -> Tensor:
        with autocast("cpu", dtype=LOW, policy=policy):
            return F.linear(x, w)

    x, w = R(64, 64, requires_grad=True), R(64, 64)
    torch._dynamo.reset()
    compiled, grads = torch.compile(run, backend="aot_eager", fullgraph=True), []
    for seed in (0, 1, 0):
        torch.manual_seed(seed)
        y = compiled(x, w)
        grads += torch.autograd.grad(y, x, R(64, 64, generator=generator(0)).to(LOW))
    assert torch.equal(grads[0], grads[2])
    assert not torch.equal(grads[0], grads[1])


def test_a_checkpoint_that_forgets_the_policy_raises() -> None:
    """PyTorch recomputes without the recipe, and gradients belong to other activations."""
    with region("recipe mxfp8"):
        y = checkpoint(NET, X, use_reentrant=False)
    with pytest.raises(RuntimeError, match="different number of tensors"):
        y.float().sum().backward()


def test_no_second_derivative() -> None:
    """The gradient of a quantised gradient is taken to be zero."""
    x, w = R(3, 8, requires_grad=True), R(4, 8, requires_grad=True)
    with region("recipe mxfp8"):
        y = F.linear(x, w)
    (grad,) = torch.autograd.grad(y.float().square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated twice"):
        grad.sum().backward()


def test_a_record_counts_what_a_format_cannot_hold() -> None:
    """Saturated and flushed elements go unseen, or belong to another layer, role or pass."""
    model, x = nn.Sequential(nn.Linear(32, 8), nn.Linear(8, 8)), torch.ones(4, 32)
    x[0, 0], x[1, :2] = 7.9, torch.tensor([1000.0, 1e-3])
    policy = CPU.override({"linear": Recipe.mxfp4()}, origin="here")
    with amp_core.record() as outer, amp_core.record(model) as r, autocast("cpu", dtype=LOW, policy=policy):
        model(x).float().sum().backward()
    assert [*outer.quantized.values()] == [*r.quantized.values()]
    counts = quantize(x.to(LOW), Recipe.mxfp4().input).counts.tolist()
    by_place = {(k.place.module, k.phase, k.role): c for k, c in r.quantized.items()}
    first = by_place["0", "forward", "input"]
    assert [first.inf, first.nan, first.saturated, first.flushed] == counts
    assert (first.calls, first.elements) == (1, x.numel())
    assert min(counts[2:]) > 0
    backward = {key: count.calls for key, count in by_place.items() if key[1] == "backward"}
    assert backward == {
        ("1", "backward", "input"): 1,
        ("1", "backward", "weight"): 1,
        ("1", "backward", "grad_output"): 2,
        ("0", "backward", "input"): 1,
        ("0", "backward", "grad_output"): 1,
    }
    products = {(k.phase, k.kernel, k.dtypes, k.rule) for k in r.ops if "mm" in k.kernel}
    assert products == {(phase, "aten::mm", "e2m1", "recipe mxfp4") for phase in ("forward", "backward")}
    assert not any(key.widened for key in r.ops)


def test_a_saved_record_keeps_the_counts(tmp_path: Path) -> None:
    """A record that was loaded has lost what a recipe did."""
    with amp_core.record() as r, region("recipe mxfp4"):
        F.linear(R(4, 8), R(4, 8))
    r.save(tmp_path / "record")
    loaded = amp_core.Recording.load(tmp_path / "record")
    assert loaded.quantized == r.quantized != {}
    assert "Quantised operands" in str(loaded)


def test_compare_rehearses_a_format() -> None:
    """A rehearsal runs without the recipe, or in the layers that the policy keeps in float32."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(32, 16), nn.GELU(), nn.Linear(16, 4)), R(8, 32)

    def compared(**how: Any) -> amp_core.Comparison:
        return amp_core.compare(lambda: model(x).float().square().mean(), "cpu", **how)

    plain, by_name, by_policy = (
        compared(),
        compared(format="mxfp4"),
        compared(policy=CPU.override({"linear": Recipe.mxfp4()})),
    )
    assert not plain.quantized
    assert plain.gradient_error < by_name.gradient_error == by_policy.gradient_error
    assert {key.role for key in by_name.quantized} == {"input", "weight", "grad_output"}
    assert "Quantised operands" in str(by_name)
    assert not compared(format="mxfp4", policy=CPU.override({"linear": "fp32"})).quantized
    with pytest.raises(PolicyError, match="no recipe 'mxfp5'"):
        compared(format="mxfp5")


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # jvp's own, of two categories
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("transform", ["grad", "vmap", "jvp"])
def test_transforms_are_refused(transform: str, inside: bool) -> None:
    """A transform takes linear apart, and computes without the recipe."""
    x, w = R(3, 8), R(4, 8)

    def loss(x: Tensor) -> Tensor:
        with region("recipe mxfp8") if inside else nullcontext():
            return F.linear(x, w).float().sum()

    run = {
        "grad": lambda: torch.func.grad(loss)(x),
        "vmap": lambda: torch.func.vmap(loss)(x),
        "jvp": lambda: torch.func.jvp(loss, (x,), (x,)),
    }[transform]
    with (
        pytest.raises(PolicyError, match=r"torch\.func"),
        nullcontext() if inside else region("recipe mxfp8"),
    ):
        run()


@pytest.mark.parametrize("rule", ["fp32", "unchanged", "lower_precision_fp"])
@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap])
def test_transforms_are_refused_whatever_rules_the_parts_have(transform: Any, rule: str) -> None:
    """A rule for addmm takes the place of the refusal, and linear computes without its recipe."""
    w = R(4, 8)
    policy = CPU.override({**dict.fromkeys(["addmm", "mm", "matmul"], rule), "linear": Recipe.mxfp8()})
    for bias in (None, R(4)):
        run = transform(lambda x, bias=bias: F.linear(x, w, bias).float().sum())
        with autocast("cpu", dtype=LOW, policy=policy), pytest.raises(PolicyError, match=r"torch\.func"):
            run(R(3, 8))


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap])
@pytest.mark.parametrize(
    ("op", "call"),
    [
        ("conv1d", lambda x: F.conv1d(x, torch.ones(4, 3, 3))),
        ("conv1d", lambda x: F.conv1d(x, torch.ones(4, 3, 3), padding="same")),
        ("conv_transpose1d", lambda x: F.conv_transpose1d(x, torch.ones(3, 4, 3))),
    ],
)
def test_transforms_of_convolutions_are_refused(transform: Any, op: str, call: Any) -> None:
    """A convolution computes without its recipe: a transform makes another op of it."""
    run = transform(lambda x: call(x).float().sum())
    with region("recipe fp8_tensorwise", op), pytest.raises(PolicyError, match=r"torch\.func"):
        run(R(2, 3, 8))
    with region("recipe fp8_tensorwise"):
        assert run(R(2, 3, 8)).isfinite().all()


@pytest.mark.parametrize("op", ["linear", "conv1d"])
def test_batches_of_gradients_are_refused(op: str) -> None:
    """autograd.grad(is_grads_batched=True) ends in an error about data pointers."""
    x, w = R(3, 8), R(3, 8)
    w.requires_grad_()
    with region("recipe fp8_tensorwise", op):
        y = F.linear(x, w) if op == "linear" else F.conv1d(x[None], w[..., None].expand(-1, -1, 3)[:, :3])
    with pytest.raises(PolicyError, match="got a batch of gradients"):
        torch.autograd.grad(y.float().sum(-1).flatten(), w, torch.eye(3), is_grads_batched=True)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_forward_mode_is_refused() -> None:
    """Forward-mode differentiation asks the user for the jvp of a function that they did not write."""
    x, w = R(3, 8), R(3, 8)
    with (
        torch.autograd.forward_ad.dual_level(),
        pytest.raises(PolicyError, match="forward-mode"),
        region("recipe mxfp8"),
    ):
        F.linear(torch.autograd.forward_ad.make_dual(x, x), w)


@pytest.mark.filterwarnings("ignore:`torch.jit.trace` is deprecated")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_traces_are_refused() -> None:
    """torch.jit.trace ends in an internal assert of torch."""
    x, w = R(3, 8), R(3, 8)
    with region("recipe mxfp8"), pytest.raises(PolicyError, match="cannot record"):
        torch.jit.trace(lambda x: F.linear(x, w), (x,))


def test_sparse_and_nested_tensors_are_refused() -> None:
    """A sparse operand is quantised as something else."""
    with pytest.raises(PolicyError, match="sparse and nested"), region("recipe mxfp8", "mm"):
        torch.mm(R(3, 4).to_sparse(), R(4, 5))


@pytest.mark.parametrize("name", NAMES)
def test_a_small_model_learns(name: str) -> None:
    """The gradients of a recipe lead nowhere."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))
    optimizer, x = torch.optim.Adam(model.parameters(), lr=1e-2), R(64, 16)
    targets, losses = x[:, :4].argmax(-1), []
    for _ in range(30):
        with region(f"recipe {name}"):
            loss = F.cross_entropy(model(x), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_float8_as_the_dtype_of_a_region() -> None:
    """The short form does nothing, or changes other ops and rules of one's own."""
    x = R(8, 32)
    short = autocast("cpu", dtype=torch.float8_e4m3fn)
    assert short.fast_dtype is LOW
    with short, region(Recipe.fp8_rowwise(), "mm"):
        wanted = torch.mm(x, x.t())
    with short:
        assert torch.equal(torch.mm(x, x.t()), wanted)
        assert torch.softmax(x, -1).dtype is torch.softmax(x, -1).dtype
    exact = CPU.override({"mm": "fp32"})
    with autocast("cpu", dtype=torch.float8_e4m3fn, policy=exact):
        assert torch.mm(x, x.t()).dtype is torch.float32
        assert torch.equal(x @ x.t(), wanted)
    with pytest.raises(PolicyError, match="must be an OpPolicy"):
        autocast("cpu", dtype=torch.float8_e4m3fn, policy="fp8")
    by_size = CPU.override({"mm": "lower_precision_fp above 8 MFLOP"})  # as of advise(goal="speed")
    with pytest.raises(PolicyError, match=r"dtype=torch\.float8_e4m3fn cannot quantise mm, .* above 8 MFLOP"):
        autocast("cpu", dtype=torch.float8_e4m3fn, policy=by_size)
    with pytest.raises(PolicyError, match="format=mxfp8 cannot quantise mm"):
        amp_core.compare(lambda: None, "cpu", policy=by_size, format="mxfp8")
    torch.set_autocast_dtype("cpu", torch.float16)
    try:
        assert autocast("cpu", dtype=torch.float8_e4m3fn).fast_dtype is LOW
    finally:
        torch.set_autocast_dtype("cpu", LOW)


def test_emulation_is_said_once() -> None:
    """A user takes the time of a rehearsal for that of the format."""
    runners._warned.clear()
    activate._prepared_once.cache_clear()
    with pytest.warns(EmulationWarning, match="emulated on 'cpu'") as caught:
        region("recipe mxfp8")
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the suite's own filter lets this warning pass
        region("recipe mxfp4")


def test_a_warning_of_a_tool_is_at_the_line_of_its_user() -> None:
    """A warning from inside `compare` is shown at a line of contextlib."""
    runners._warned.clear()
    activate._prepared_once.cache_clear()
    layer = nn.Linear(4, 4)
    with pytest.warns(EmulationWarning) as caught:
        amp_core.compare(lambda: layer(R(2, 4)).sum(), "cpu", format="mxfp8")
    assert {warning.filename for warning in caught} == {__file__}
