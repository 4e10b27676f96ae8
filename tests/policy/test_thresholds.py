"""Rules with a threshold on work: what they cast, how they read, and the estimate of work."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import amp_core
from amp_core import OpPolicy, PolicyError, autocast
from amp_core.dispatch.work import work
from amp_core.policy import rules

aten = torch.ops.aten
R = torch.randn
RULE = "lower_precision_fp above 10 kFLOP"  # linear of 8 x 8 features and n rows has 128 n FLOP


@pytest.mark.parametrize(
    ("op", "args", "kwargs"),
    [
        (aten.mm.default, (R(3, 4), R(4, 5)), {}),
        (aten.addmm.default, (R(5), R(3, 4), R(4, 5)), {"beta": 1}),
        (aten.bmm.default, (R(2, 3, 4), R(2, 4, 5)), {}),
        (aten.baddbmm.default, (R(2, 3, 5), R(2, 3, 4), R(2, 4, 5)), {}),
        (aten.matmul.default, (R(2, 3, 4), R(4, 5)), {}),
        (aten.matmul.default, (R(3, 4), R(7, 4, 5)), {}),
        (aten.linear.default, (R(2, 3, 4), R(5, 4), R(5)), {}),
        (aten.conv1d.default, (R(2, 4, 9), R(6, 4, 3), None, [2], [1], [1], 1), {}),
        (aten.conv2d.default, (R(2, 4, 9, 8), R(6, 2, 3, 2), None, [2, 1], [1, 0], [2, 1], 2), {}),
        (aten.conv2d.default, (R(2, 4, 9, 8), R(6, 4, 3, 2)), {}),
        (aten.conv2d.default, (R(4, 9, 8), R(6, 4, 3, 2)), {}),
        (aten.conv2d.padding, (R(2, 4, 9, 8), R(6, 4, 3, 3), None, [1, 1], "same"), {}),
        (aten.conv2d.padding, (R(2, 4, 9, 8), R(6, 4, 3, 3), None, [2, 2], "valid"), {}),
        (aten.conv3d.default, (R(1, 2, 5, 5, 5), R(3, 2, 3, 3, 3), None, [1]), {}),
        (aten.convolution.default, (R(2, 4, 9), R(6, 4, 3), None, [1], [0], [1], False, [0], 1), {}),
        (aten.conv_transpose2d.input, (R(2, 4, 5, 5), R(4, 6, 3, 3), None, [2, 2]), {}),
        (aten.scaled_dot_product_attention.default, (R(2, 3, 7, 4), R(2, 3, 5, 4), R(2, 3, 5, 6)), {}),
    ],
)
def test_the_estimate_is_that_of_torch(op, args, kwargs):
    """A threshold would mean another amount of work for another op."""
    with FlopCounterMode(display=False) as counter:
        op(*args, **kwargs)
    assert work(op, args, kwargs) == counter.get_total_flops()


def test_other_ops_count_elements():
    """An op without a formula has no work, or fails."""
    assert work(aten.prelu.default, (R(3, 4), R(1)), {}) == 12
    assert work(aten.cat.default, ([R(2), R(3)],), {}) == 3


def nested(*shapes, layout=torch.strided):
    """Return a nested tensor of tensors of these shapes."""
    return torch.nested.as_nested_tensor([R(*shape) for shape in shapes], layout=layout)


def heads():
    return nested((2, 3, 4), (2, 5, 4))


def jagged():
    return nested((3, 4), (5, 4), layout=torch.jagged)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("op", "call", "flop"),
    [
        ("linear", lambda: F.linear(nested((3, 4), (5, 4)), R(6, 4)), 2 * 8 * 4 * 6),
        ("matmul", lambda: torch.matmul(nested((3, 4), (5, 2)), nested((4, 6), (2, 7))), 2 * (72 + 70)),
        ("bmm", lambda: torch.bmm(nested((3, 4), (5, 2)), nested((4, 6), (2, 7))), 2 * (72 + 70)),
        (
            "scaled_dot_product_attention",
            lambda: F.scaled_dot_product_attention(x := heads(), x, x),
            2 * 2 * 8 * 34,
        ),
        ("linear", lambda: F.linear(jagged(), R(6, 4)), 2 * 8 * 4 * 6),
        ("matmul", lambda: jagged() @ R(4, 6), 2 * 8 * 4 * 6),
        ("matmul", lambda: (x := jagged()).transpose(1, 2) @ x, 2 * 8 * 4 * 4),
    ],
)
def test_nested_tensors_count_what_they_consist_of(op, call, flop):
    """A product of nested tensors ends in an internal error of torch, or no amount of work is enough."""
    for more, dtype in ((0, torch.float32), (-1, torch.bfloat16)):
        policy = OpPolicy("cpu", {op: f"lower_precision_fp above {flop + more} FLOP"})
        with autocast("cpu", policy=policy), torch.no_grad():
            assert call().dtype is dtype


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_jagged_attention_has_a_threshold():
    """Torch computes it with products of nested tensors inside, which have no sizes."""
    rows = nested((3, 2, 4), (5, 2, 4), layout=torch.jagged).transpose(1, 2)
    policy = OpPolicy.default("cpu").override({"matmul": "lower_precision_fp above 1 FLOP"})
    with autocast("cpu", policy=policy):
        got = F.scaled_dot_product_attention(rows, rows, rows)
    with autocast("cpu"):
        assert torch.equal(got.values(), F.scaled_dot_product_attention(rows, rows, rows).values())


def test_what_a_product_is_added_to_is_no_factor():
    """The work of addmv would be that of its two vectors, so that no threshold lets it run low."""
    sums = [(aten.addmv, (R(3), R(3, 4), R(4))), (aten.addmm, (R(3, 5), R(3, 4), R(4, 5)))]
    sums += [(op, (R(3, 5), R(2, 3, 4), R(2, 4, 5))) for op in (aten.addbmm, aten.baddbmm)]
    assert [work(op.default, args, {}) for op, args in sums] == [24, 120, 240, 240]
    assert work(aten.mv.default, (R(3, 4), R(4)), {}) == 24


def test_products_of_vectors_have_a_threshold():
    """torch.dot under a threshold ends in a bare StopIteration, as its argument has a name of its own."""
    assert work(aten.dot.default, (R(4), R(4)), {}) == work(aten.vdot.default, (R(4), R(4)), {}) == 8
    with autocast("cpu", policy=OpPolicy("cpu", {"dot": "lower_precision_fp above 1 FLOP"})):
        assert torch.dot(R(4), R(4)).dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("op", "call"),
    [
        ("conv2d", lambda: F.conv2d(R(1, 3, 5, 5), R(2, 3, 3, 3), stride=0)),
        ("conv2d", lambda: F.conv2d(R(1, 3, 5, 5), R(2, 3, 3, 3), padding=(1, 1, 1))),
        ("conv2d", lambda: F.conv2d(R(1, 3, 5, 5), R(2, 3))),
        ("scaled_dot_product_attention", lambda: F.scaled_dot_product_attention(R(3), R(3), R(3))),
        ("_grouped_mm", lambda: torch._grouped_mm(R(3), R(3), torch.tensor([1], dtype=torch.int32))),
    ],
)
def test_the_op_says_what_is_wrong_with_a_call(op, call):
    """The estimate of the work fails first, with a ZeroDivisionError or words about zip()."""
    policies = [
        OpPolicy("cpu", {op: rule}) for rule in ("lower_precision_fp", "lower_precision_fp above 1 FLOP")
    ]
    errors = []
    for policy in policies:
        with pytest.raises(RuntimeError) as raised, autocast("cpu", policy=policy):
            call()
        errors.append(str(raised.value).splitlines()[0])
    assert errors[0] == errors[1]


@pytest.mark.parametrize("backward", [False, True])
def test_large_calls_are_cast_and_small_ones_widened(backward):
    """The threshold decides the wrong way, or a small call gets operands of two dtypes."""
    policy = OpPolicy.default("cpu").override({"linear": RULE})
    layer = nn.Linear(8, 8)
    with autocast("cpu", policy=policy):
        large, small = layer(R(100, 8)), layer(R(50, 8).bfloat16())
    assert (large.dtype, small.dtype) == (torch.bfloat16, torch.float32)
    if backward:
        (large.float().sum() + small.sum()).backward()
        assert layer.weight.grad.dtype == torch.float32


def test_record_and_explain_show_the_number():
    """A user cannot see why one call of an op ran in float32 and another did not."""
    policy = OpPolicy.default("cpu").override({"linear": RULE}, origin="here")
    assert str(policy.explain("linear")).endswith(
        "lower_precision_fp above 10 kFLOP (here); cast eligible arguments to the dtype of the region if the "
        "call has more work than 10 kFLOP, else to float32"
    )
    layer = nn.Linear(8, 8)
    with amp_core.record() as r, autocast("cpu", policy=policy):
        layer(R(100, 8)), layer(R(50, 8))
    assert {key.rule: key.dtypes for key in r.ops} == {
        f"{RULE}: 12.8 kFLOP": "bfloat16",
        f"{RULE}: 6.4 kFLOP": "float32",
    }


def test_files_regions_and_modules():
    """A threshold is lost in TOML, in a float32 region or in a module's rules."""
    policy = OpPolicy.default("cpu").override({"linear": RULE})
    assert OpPolicy.from_toml(policy.to_toml()) == policy
    model = nn.Sequential(nn.Linear(8, 8))
    with autocast("cpu", dtype=torch.float32, policy=policy):
        assert model(R(100, 8)).dtype == torch.float32
    with amp_core.apply_policy(model, {"0": {"linear": RULE}}), autocast("cpu"):
        assert (model(R(100, 8)).dtype, model(R(10, 8)).dtype) == (torch.bfloat16, torch.float32)


def test_compiled_regions():
    """A compiled region forgets the threshold."""
    policy = OpPolicy.default("cpu").override({"linear": RULE})
    torch.compiler.reset()

    @torch.compile(backend="aot_eager", dynamic=False)
    def run(x, weight):
        with autocast("cpu", policy=policy):
            return F.linear(x, weight)

    assert run(R(100, 8), R(8, 8)).dtype == torch.bfloat16
    assert run(R(10, 8), R(8, 8)).dtype == torch.float32


@pytest.mark.parametrize(
    ("op", "run", "make"),
    [
        ("linear", lambda x: F.linear(x, x.new_ones(8, 8)), lambda n: R(n, 8)),
        ("conv2d", lambda x: F.conv2d(x, x.new_ones(8, 3, 3, 3), padding=1), lambda n: R(n, 3, 8, 8)),
        (
            "scaled_dot_product_attention",
            lambda x: F.scaled_dot_product_attention(x, x, x),
            lambda n: R(n, 4, 8),
        ),
        ("matmul", lambda x: x @ x.new_ones(8, 8), lambda n: R(n, 8)),
        ("_grouped_mm", lambda x: F.grouped_mm(x, x.new_ones(x.shape[0], 8, 16)), lambda n: R(n, 8, 8)),
    ],
)
def test_sizes_stay_dynamic(op, run, make):
    """A compiled model is compiled anew for each size of its batch, or not at all."""
    policy = OpPolicy.default("cpu").override({op: "lower_precision_fp above 100 FLOP"})
    counter = CompileCounterWithBackend("aot_eager")
    torch.compiler.reset()

    @torch.compile(backend=counter, fullgraph=True)
    def compiled(x):
        with autocast("cpu", policy=policy):
            return run(x)

    for n in (3, 5, 8):
        batch = make(n)
        torch._dynamo.mark_dynamic(batch, 0)
        assert compiled(batch).dtype is torch.bfloat16
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    ("rule", "hint"),
    [
        ("fp32 above 8 MFLOP", "fp32 takes no threshold; "),
        ("lower_precision_fp above", "did you mean 'lower_precision_fp'"),
        ("lower_precision_fp above 8", "'8' is no amount of work; "),
        ("lower_precision_fp above -1 MFLOP", "'-1 MFLOP' is no amount of work; "),
        (8, "the rules are"),
    ],
)
def test_other_thresholds_are_refused(rule, hint):
    """A rule that means nothing is taken as one without a threshold."""
    right = "'lower_precision_fp above 8 MFLOP' for calls above some work"
    with pytest.raises(PolicyError, match=f"for 'linear': {hint}.*{right}"):
        OpPolicy("cpu", {"linear": rule})


@pytest.mark.parametrize("flop", [0, 999, 12_800, 8.4e6, 3e9, 2e13, 3e16])
def test_a_threshold_reads_back(flop):
    """`advise` writes a rule that cannot be read."""
    assert rules.threshold(rules.above(flop)) == pytest.approx(flop, rel=1e-3)
