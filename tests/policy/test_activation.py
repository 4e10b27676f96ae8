"""A policy in force: per region and thread, and gone afterwards."""

from __future__ import annotations

import importlib.util
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import amp_core
from amp_core import OpPolicy, PolicyError, PrecisionPlan, get_backend
from amp_core.dispatch.activate import activation
from amp_core.dispatch.engine import engine
from amp_core.dispatch.runners import table_of
from amp_core.errors import AmpWarning
from amp_core.plugin import Availability, Backend
from amp_core.plugin.registry import Registry
from amp_core.testing.fixtures import serving

pytestmark = pytest.mark.usefixtures("nothing_left")
CPU = OpPolicy.default("cpu")
SOFT = CPU.override({"softmax": "fp32"})
BACKEND = get_backend("cpu")
X = torch.randn(8, 8)
LOW, HIGH = torch.bfloat16, torch.float32


def softmax_dtype() -> torch.dtype:
    return torch.softmax(X.bfloat16(), -1).dtype


def test_native_policy_costs_nothing() -> None:
    """With torch's own rules nothing may be installed, so nothing can be slower."""
    assert activation(BACKEND, None) is None
    assert len(activation(BACKEND, CPU).table) == 0


def test_only_ops_that_differ_are_installed(region) -> None:
    """An op that is not overridden must keep torch's C++ kernel."""
    before = {*engine("cpu")._installed}
    for op in ("hypot", "fmod"):  # no other test changes both
        with region(CPU.override({op: "fp32"})):
            pass
    added = {"aten::hypot.default", "aten::fmod.Tensor", "aten::fmod.Scalar"}
    assert engine("cpu")._installed.keys() - before <= added <= engine("cpu")._installed.keys()


def test_scopes_nest(region) -> None:
    """A region within a region has its own policy, one without a policy keeps the outer one."""
    with region(SOFT):
        assert softmax_dtype() is HIGH
        with region(CPU.override({"mm": "fp32"})):
            assert (softmax_dtype(), torch.mm(X, X).dtype) == (LOW, HIGH)
        with region(CPU):
            assert softmax_dtype() is LOW
        with region():
            assert softmax_dtype() is HIGH
        with torch.autocast("cpu", enabled=False):
            assert softmax_dtype() is LOW
        assert (softmax_dtype(), torch.mm(X, X).dtype) == (HIGH, LOW)
    with region():
        assert softmax_dtype() is LOW


def test_two_threads_with_two_policies(region) -> None:
    """The dispatcher is shared by all threads, the policy is not."""
    policies = [
        SOFT,
        CPU.override({"softmax": "banned"}),
        None,
        CPU.override({"softmax": "lower_precision_fp"}),
    ]
    together = threading.Barrier(len(policies))
    seen: list[object] = [None] * len(policies)

    def work(index: int) -> None:
        with region(policies[index]):
            together.wait()
            try:
                seen[index] = {torch.softmax(X.half(), -1).dtype for _ in range(200)}
            except RuntimeError as error:
                seen[index] = str(error)
            together.wait()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(policies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    banned = (
        "aten::softmax.int is banned by the op policy. Run it where autocast is off, or give it another rule "
        "by OpPolicy.override()."
    )
    assert seen == [{HIGH}, banned, {torch.float16}, {LOW}]


def test_a_thread_without_a_policy_runs_torch_kernels(region) -> None:
    """While another thread overrides mm, this one must still get torch's own mm."""
    inside, done = threading.Event(), threading.Event()

    def other() -> None:
        with region(CPU.override({"mm": "fp32", "exp": "fp32"})):
            inside.set()
            done.wait(10)

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait(10)
    try:
        with torch.autocast("cpu"):
            assert torch.mm(X, X).dtype is LOW
            assert torch.exp(X.bfloat16()).dtype is LOW
        assert torch.mm(X, X).dtype is HIGH
    finally:
        done.set()
        thread.join()


def test_an_exception_in_a_region_leaves_nothing(region) -> None:
    """A crash in a training step must not change the dtype of the next."""
    with pytest.raises(ZeroDivisionError), region(SOFT):
        raise ZeroDivisionError


def test_a_policy_of_another_device() -> None:
    """Cuda rules on a cpu region would be a silent no-op."""
    with pytest.raises(
        PolicyError, match=r"cannot apply to a region on 'cpu'; start from OpPolicy.default\('cpu'\)"
    ):
        activation(BACKEND, OpPolicy.default("cuda"))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"softmax": "fp32"}, r"not dict\. Change the device's policy: .*override"),
        (Path("policy.toml"), r"from_toml\(path\) reads a file"),
        ("policy.toml", r"not str\. OpPolicy\.from_toml"),
        (amp_core.Recipe.mxfp8(), r"not Recipe\. Make it a rule: .*'linear': recipe"),
        (amp_core.PrecisionPlan(CPU), r"not PrecisionPlan\. Pass its `policy`"),
        (amp_core.Advice(CPU, {}, None), r"not Advice\. Pass its `policy`"),
        (3, r"not int\.$"),
    ],
)
def test_what_is_no_policy(given: Any, words: str) -> None:
    """Who passes the advice, a plan, a file or rules in place of a policy has to look up how to get one."""
    with pytest.raises(PolicyError, match=words):
        amp_core.autocast("cpu", policy=given)


def imported_anew(name: str) -> Any:
    """Return the module as it is after ``%autoreload``, or where `sys.modules` has lost it."""
    spec = importlib.util.find_spec(name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_objects_of_an_amp_core_imported_before() -> None:
    """In a notebook that imports amp_core anew: "policy= must be an OpPolicy, not OpPolicy"."""
    other = imported_anew("amp_core.policy.op_policy").OpPolicy("cpu", {})
    anew = r"that of an amp_core that was imported before this one\. Make it anew, or restart Python\."
    for refuse in (lambda: activation(BACKEND, other), lambda: PrecisionPlan(other)):
        with pytest.raises(PolicyError, match=f"must be an OpPolicy, not {anew}"):
            refuse()
    earlier = imported_anew("amp_core.plugin.interface").Backend
    methods = dict.fromkeys(earlier.__abstractmethods__, lambda _: None)
    backend = type("Cpu", (earlier,), {"device_type": "cpu", **methods})()
    with pytest.raises(TypeError, match=f"no amp_core.plugin.Backend instance; it derives from {anew}"):
        Registry().add(backend)


def test_a_device_that_torch_has_no_autocast_for() -> None:
    """An override for a device without an Autocast key cannot work."""
    with pytest.raises(PolicyError, match="does not support autocast for device type 'vulkan'"):
        table_of(OpPolicy("vulkan", {"mm": "fp32"}))


def test_environment_variable(region, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """AMP_POLICY changes the default of regions that name no policy, with no change to the script."""
    path = tmp_path / "p.toml"
    path.write_text('[rules]\nsoftmax = "fp32"\n')
    monkeypatch.setenv("AMP_POLICY", str(path))
    with region():
        assert softmax_dtype() is HIGH
    with region(CPU):
        assert softmax_dtype() is LOW
    path2 = tmp_path / "q.toml"
    path2.write_text('device_type = "cuda"\n[rules]\nsoftmax = "lower_precision_fp"\n')
    monkeypatch.setenv("AMP_POLICY", str(path2))
    assert activation(BACKEND, None) is None
    function = tmp_path / "f.toml"
    function.write_text('[rules]\n"amp_core_not_imported:Function" = "fp32"\n')
    monkeypatch.setenv("AMP_POLICY", str(function))
    assert activation(BACKEND, None) is not None
    wrong = tmp_path / "wrong.toml"
    wrong.write_text('[rules]\nsoftmax = "fp23"\n')
    for bad in (tmp_path / "missing.toml", wrong):
        monkeypatch.setenv("AMP_POLICY", str(bad))
        with pytest.raises(PolicyError, match="AMP_POLICY"):
            activation(BACKEND, None)


def test_custom_ops_are_included(region) -> None:
    """An op of torch.library takes a rule like any other."""

    @torch.library.custom_op("amp_policy_test::double", mutates_args=())
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    for op in ("amp_policy_test::double", double, torch.ops.amp_policy_test.double):
        with region(CPU.override({op: "lower_precision_fp"})):
            assert double(X).dtype is LOW
    assert double(X).dtype is HIGH
    with pytest.raises(PolicyError, match="Did you mean 'amp_policy_test::double'"):
        CPU.override({"amp_policy_test::doubel": "fp32"})


def test_a_mutable_custom_op_keeps_its_write(region) -> None:
    """Torch's register_autocast writes to a cast copy and loses it (pytorch#65788)."""

    @torch.library.custom_op("amp_policy_test::add_one_", mutates_args=("x",))
    def add_one_(x: torch.Tensor, y: torch.Tensor) -> None:
        assert x.dtype is y.dtype is LOW
        x.add_(1)

    x = torch.zeros(4)
    with region(CPU.override({"amp_policy_test::add_one_": "lower_precision_fp"})):
        add_one_(x, torch.zeros(4))
    assert torch.equal(x, torch.ones(4))
    assert x.dtype is HIGH


WRITES = {
    "add_": lambda: X.clone().add_(X, alpha=2),
    "relu_": lambda: X.clone().relu_(),
    "cumsum_": lambda: X.clone().cumsum_(0),
    "aten::mm.out": lambda: torch.mm(X, X.T, out=torch.empty(X.shape[0], X.shape[0])),
    "aten::mul.out": lambda: torch.mul(X, X, out=torch.empty(0)),  # is resized
    "arange": lambda: torch.arange(0.0, 1.0, 0.1),  # consists of arange.out
}


@pytest.mark.parametrize("rule", ["lower_precision_fp", "low_in_fp32_out", "fp32"])
@pytest.mark.parametrize("op", WRITES)
def test_an_op_that_writes_under_a_rule(region, op, rule) -> None:
    """What it writes is lost, or an output that it resizes keeps its size."""
    with region(CPU.override({op: rule})):
        result = WRITES[op]()
    assert result.dtype is HIGH
    tolerance = 0 if rule == "fp32" else 0.1
    torch.testing.assert_close(result, WRITES[op](), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("rule", ["lower_precision_fp", "low_in_fp32_out", "fp32"])
@pytest.mark.parametrize("dtype", [HIGH, LOW])
def test_a_tensor_that_an_op_writes_twice(region, dtype, rule) -> None:
    """A tensor that is in a list twice has two casts, and the write to one of them is lost."""
    x = torch.ones(3, dtype=dtype)
    with region(CPU.override({"_foreach_mul_": rule, "_foreach_addcmul_": rule})):
        torch._foreach_mul_([x, x], 2.0)
        assert x.tolist() == [4, 4, 4]
        torch._foreach_addcmul_((x, x), [x, x], [torch.ones(3)] * 2)
    assert x.tolist() == [16, 16, 16]


def test_match_destination(region) -> None:
    """Index and scatter ops with another dtype than their destination raise in torch on cpu."""
    where = torch.tensor([0, 1])
    with pytest.raises(RuntimeError), region():
        torch.index_add(torch.zeros(3, dtype=LOW), 0, where, torch.ones(2))
    with region(OpPolicy.uniform("cpu")):
        assert torch.index_add(torch.zeros(3, dtype=LOW), 0, where, torch.ones(2)).dtype is LOW
        assert torch.scatter_add(torch.zeros(3), 0, where, torch.ones(2, dtype=LOW)).dtype is HIGH
    x = torch.zeros(3)
    with region(CPU.override({"index_put_": "match_destination"})):
        x[where] = torch.ones(2, dtype=torch.float16)
        assert x.tolist() == [1, 1, 0]


def test_promote_types(region) -> None:
    """fp16 with bf16 raises in torch's promote; torch.promote_types knows the answer."""
    a, b = torch.ones(3, dtype=torch.float16), torch.ones(3, dtype=LOW)
    with pytest.raises(RuntimeError, match="Unexpected floating ScalarType"), region():
        torch.cat([a, b])
    with region(CPU.override({"cat": "promote_types"})):
        assert torch.cat([a, b]).dtype is HIGH
        assert torch.cat([b, b]).dtype is LOW
        with pytest.raises(PolicyError, match="cast one of them"):
            torch.cat([a, torch.ones(3).to(torch.float8_e4m3fn)])


def test_fp32_if_mixed(region) -> None:
    """rms_norm on inputs that agree should not be upcast (pytorch#188955)."""
    w16, w32, x = torch.ones(8, dtype=LOW), torch.ones(8), X.bfloat16()
    with region(CPU.override({"rms_norm": "fp32_if_mixed"})):
        assert torch.nn.functional.rms_norm(x, (8,), w16).dtype is LOW
        assert torch.nn.functional.rms_norm(x, (8,), w32).dtype is HIGH


def test_hint_instead_of_a_ban(region, monkeypatch: pytest.MonkeyPatch) -> None:
    """binary_cross_entropy is an error on cuda; the hint comes once, at the caller's line."""
    monkeypatch.setattr("amp_core.dispatch.target_dtype._hinted", set())
    p, y = torch.rand(4, dtype=LOW), torch.rand(4)
    bce = torch.nn.functional.binary_cross_entropy
    with region(CPU.override({"binary_cross_entropy": "fp32_with_hint"})):
        with pytest.warns(UserWarning, match="binary_cross_entropy_with_logits") as warned:
            assert bce(p, y).dtype is HIGH
        assert warned[0].filename == __file__
        bce(p, y)  # warnings are errors here: a second one would fail
    with (
        region(CPU.override({"binary_cross_entropy": "banned"})),
        pytest.raises(RuntimeError, match="unsafe to autocast"),
    ):
        bce(p, y)


@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM", "RNNCell", "GRUCell", "LSTMCell"])
def test_recurrent_layers_run_in_low_precision_as_a_whole(kind: str) -> None:
    """The state of a recurrent layer stays in float32 and makes half of its ops float32."""
    layer = getattr(torch.nn, kind)(4, 4)
    x = torch.randn(2, 4) if kind.endswith("Cell") else torch.randn(3, 2, 4)
    with amp_core.autocast("cpu", policy=OpPolicy.uniform("cpu")), amp_core.record() as recording:
        outputs = layer(x)
    assert {t.dtype for t in torch.utils._pytree.tree_leaves(outputs)} == {LOW}
    assert {key.dtypes for key in recording.ops if key.kernel != "aten::_to_copy"} == {"bfloat16"}
    sum(t.float().sum() for t in torch.utils._pytree.tree_leaves(outputs)).backward()
    assert {weight.grad.dtype for weight in layer.parameters()} == {HIGH}


def test_packed_sequences_run_in_low_precision() -> None:
    """The overload for packed sequences is forgotten."""
    packed = torch.nn.utils.rnn.pack_padded_sequence(torch.randn(3, 2, 4), torch.tensor([3, 2]))
    with amp_core.autocast("cpu", policy=OpPolicy.uniform("cpu")):
        assert torch.nn.GRU(4, 4)(packed)[0].data.dtype is LOW


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: torch.nn.functional.avg_pool3d(x.view(1, 4, 4, 4), 2),
        lambda x: torch.polar(x, x).abs(),
        lambda x: torch.view_as_complex(x.view(-1, 2)).abs(),
        torch.matrix_exp,
        lambda x: torch.linalg.matrix_rank(x) * 1.0,
        lambda x: torch.linalg.matrix_rank(x, atol=torch.tensor(0.1)) * 1.0,
    ],
)
def test_uniform_runs_in_float32_what_the_cpu_has_only_there(region, compute) -> None:
    """A model of 3D convolutions and pools, or of rotations by complex numbers, fails in `uniform` alone."""
    with region(OpPolicy.uniform("cpu")):
        assert compute(X.bfloat16()).dtype is HIGH


def test_float32_policy(region) -> None:
    """A float32 region on a device where torch refuses the dtype."""
    low = X.bfloat16()
    with region(OpPolicy.float32("cpu")):
        outs = [torch.mm(low, low), torch.softmax(low, -1), torch.exp(low), torch.sum(low)]
        assert {o.dtype for o in outs} == {HIGH}


def test_a_device_without_any_rule_is_warned_about() -> None:
    """A user trains in "mixed precision" on a device where autocast changes nothing."""

    class Bare(Backend):
        device_type = "hpu"
        api_version = 1

        def availability(self) -> Availability:
            return Availability(True, "made for a test")

        def default_dtype(self) -> torch.dtype:
            return torch.bfloat16

        def supported_dtypes(self) -> tuple[torch.dtype, ...]:
            return (torch.bfloat16,)

        def op_policy(self) -> OpPolicy:
            return OpPolicy("hpu")

    with serving(Bare()):
        with pytest.warns(
            AmpWarning, match=r"no.* cast rule for any op.*OpPolicy\.uniform\('hpu'\)"
        ) as caught:
            amp_core.autocast("hpu")
        assert caught[0].filename == __file__
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            amp_core.autocast("hpu", policy=OpPolicy.uniform("hpu"))


def test_one_compilation_a_policy() -> None:
    """Every entry of a region compiles anew, or two policies share one graph."""
    one, other = (
        OpPolicy.default("cpu").override({"softmax": rule}) for rule in ("fp32", "lower_precision_fp")
    )
    counter = CompileCounterWithBackend("eager")

    def inside(x: torch.Tensor, policy: OpPolicy | None) -> torch.Tensor:
        with amp_core.autocast("cpu", policy=policy):
            return torch.softmax(torch.mm(x, x), -1)

    torch._dynamo.reset()
    compiled = torch.compile(inside, fullgraph=True, backend=counter)
    for count, policy in ((1, one), (1, one), (2, other), (2, one), (3, None), (3, other)):
        assert compiled(X, policy).dtype is inside(X, policy).dtype
        assert counter.frame_count == count
