"""`OpPolicy` as a value: made, changed, compared, explained, saved."""

from __future__ import annotations

import contextlib
import copy
import pickle
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from amp_core import OpPolicy, PolicyError, apply_policy, autocast
from amp_core.policy import RULES, names, rules

from ..drawn import examples

CPU = OpPolicy.default("cpu")


def test_override_changes_a_copy_and_says_where() -> None:
    """Changing a policy in place would change what other regions compute."""
    changed = CPU.override({"softmax": "fp32"})
    assert CPU.rule("softmax") == "unchanged"
    assert changed.rule("softmax") == "fp32"
    (line,) = changed.explain("softmax")
    assert line.op == "aten::softmax.int"
    assert f"{Path(__file__).name}:" in line.origin
    assert "default of cpu" in str(changed.explain("mm"))


def test_explain_of_an_op_without_a_rule() -> None:
    """The commonest question has an answer too."""
    assert "cpu has no rule for it" in str(CPU.explain("aten::add.Tensor"))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("softmax", {"aten::softmax.int"}),
        ("aten::softmax.int", {"aten::softmax.int"}),
        ("aten::sum.default", {"aten::sum.default"}),
        ("cross_entropy", {"aten::cross_entropy_loss.default"}),
        ("torch.nn.functional.linear", {"aten::linear.default"}),
        (torch.ops.aten.mm, {"aten::mm.default", "aten::mm.dtype"}),
        (torch.ops.aten.mm.default, {"aten::mm.default"}),
        ("index_put_", {"aten::index_put_.default"}),
        ("fft_fft?", {"aten::fft_fft2.default", "aten::fft_fftn.default"}),
    ],
)
def test_names_of_ops(name: object, expected: set[str]) -> None:
    """A name means the overloads that autocast can see, or exactly the one that is named."""
    found = {names.full_name(o) for o in names.overloads(name)}
    assert expected <= found
    assert not any("out" in n.partition(".")[2] for n in found)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"softmx": "fp32"}, "Did you mean 'softmax'"),
        ({"softmax": "fp23"}, "did you mean 'fp32'"),
        ({"softmax": 32}, "Unknown rule 32"),
        ({"linear": "fp32_append_dtype"}, "no overload that also takes a dtype"),
        ({"mm": "fp32_set_opt_dtype"}, "no optional dtype argument"),
        ({"exp": "match_destination"}, "first argument is not a tensor, or no other argument is"),
        ({"aten::softmax.out_of_it": "fp32"}, "has no overload 'out_of_it'; it has: int"),
        ({"prims::nothing": "fp32"}, "import the module that defines this one"),
        ({"name": "fp32"}, "has no op 'name'"),  # an attribute of what holds the ops
        ({"aten::_dir": "fp32"}, "has no op 'aten::_dir'"),
        ({"torch.linalg.inv": "fp32"}, "Did you mean 'linalg_inv'"),
        ({"F.gelu": "fp32"}, "Did you mean 'gelu'"),
        ({"F.cross_entropy": "fp32"}, "Did you mean 'cross_entropy'"),  # as "cross_entropy_loss" is known
        ({"F.grid_sample": "fp32"}, "Did you mean 'grid_sampler'"),
        ({"aten.mm.default": "fp32"}, "Did you mean 'mm'"),  # as torch prints the op
        ({"torch.ops.aten.softmax.int": "fp32"}, "Did you mean 'softmax'"),
        ({"pkg.mod:Cls": "promote"}, "an autograd function can have only lower_precision_fp, fp32"),
        ({"no_such_*": "fp32"}, "matches no op"),
        ({"no_such_library::*": "fp32"}, "matches no op .* First import the module that defines its ops"),
        ({"unsqueez[e]": "fp32"}, "returns no view"),
        ({"aten::device": "fp32"}, "takes no tensor"),
        ({7: "fp32"}, "not by 7"),
        ({"": "fp32"}, "not by ''"),
    ],
)
def test_bad_changes_say_what_is_wrong(changes: dict[object, object], text: str) -> None:
    """A wrong op or rule must not pass silently, nor as a KeyError."""
    with pytest.raises(PolicyError, match=".*" + text.replace("(", r"\(")):
        CPU.override(changes)  # type: ignore[arg-type]


_PIECES = [
    *("aten", "mm", "::", ".", ":", "*", "[", "?", "torch.", "name", "default", "__class__", "op", "_"),
    *("\udcff", "\0", "\n", " ", "1", "é", "prim", "os:path", "higher_order", "load_library"),
]


@given(st.lists(st.sampled_from(_PIECES), min_size=1, max_size=5).map("".join))
@examples(60)
def test_any_text_names_ops_or_is_refused(name: str) -> None:
    """A name that torch cannot look up ends in an error of torch's bindings, many lines long."""
    for use in (OpPolicy.default("cpu").explain, lambda text: OpPolicy("cpu", {text: "fp32"})):
        with contextlib.suppress(PolicyError):
            use(name)


def test_a_glob_leaves_views_alone() -> None:
    """What a program writes to a view is lost, as the view is one of a cast."""
    x = torch.zeros(2, 2, dtype=torch.bfloat16)
    with autocast("cpu", policy=CPU.override({"*": "fp32"})):
        x[0].add_(1)
        x.view(-1)[3] = 2
        assert (x + 1).dtype is torch.float32
    assert x.tolist() == [[1, 1], [0, 2]]


def test_rules_must_be_a_mapping() -> None:
    """A list of ops is the likeliest mistake of someone who comes from Paddle."""
    with pytest.raises(PolicyError, match="a mapping from op to rule, not list"):
        CPU.override(["softmax"])  # type: ignore[arg-type]


def test_diff_and_equality() -> None:
    """Policies compare by what they do, not by where it came from."""
    changed = CPU.override({"softmax": "fp32"})
    assert dict(CPU.diff(changed)) == {"aten::softmax.int": ("unchanged", "fp32")}
    assert str(CPU.diff(changed)) == "aten::softmax.int: unchanged -> fp32"
    assert changed.override({"softmax": "unchanged"}).diff(CPU) == {}
    assert changed == CPU.override({"aten::softmax.int": "fp32"})
    assert hash(changed) == hash(CPU.override({"aten::softmax.int": "fp32"}))
    assert changed != CPU


def test_cpu_and_cuda_share_few_rules_and_uniform_mends_it() -> None:
    """The same model gets other dtypes per device; `uniform` gives the same ones."""
    cpu, cuda = CPU.rules.items(), OpPolicy.default("cuda").rules.items()
    assert len(cpu & cuda) < 60
    assert OpPolicy.uniform("cpu").rules == OpPolicy.uniform("cuda").rules == OpPolicy.uniform("mps").rules
    assert OpPolicy.uniform("mps").rule("softmax") == rules.FP32_SET_OPT_DTYPE


def test_rule_of_an_ambiguous_name() -> None:
    """Two overloads with two rules: saying one of them would be a guess."""
    cuda = OpPolicy.default("cuda").override({"aten::norm.Scalar": "fp32"})
    with pytest.raises(PolicyError, match="different rules"):
        cuda.rule("norm")


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))])
def test_copies(duplicate: object) -> None:
    """A policy travels to worker processes."""
    changed = CPU.override({"softmax": "fp32"})
    assert duplicate(changed) == changed  # type: ignore[operator]


def test_a_pickle_of_another_torch() -> None:
    """A policy, or a model with rules, has one for an op that this torch lacks, and cannot be loaded."""
    policy = CPU.override({"erfinv": "fp32", "softmax": "fp32"})
    saved = pickle.dumps(policy).replace(b"aten::erfinv.", b"aten::erfold.")
    assert pickle.loads(saved) == CPU.override({"erfinv": "unchanged", "softmax": "fp32"})
    model = torch.nn.Sequential(torch.nn.Softmax(-1))
    apply_policy(model, {"0": {"erfinv": "fp32", "softmax": "fp32"}}, device_type="cpu")
    read = pickle.loads(pickle.dumps(model).replace(b"aten::erfinv.", b"aten::erfold."))
    with autocast("cpu"):
        assert read(torch.ones(2, dtype=torch.bfloat16)).dtype is torch.float32


OPS = ["softmax", "mm", "linear", "aten::sum.dim_IntList", "layer_norm", "cat", "index_put", "exp"]
NOT_DEFINED = 'odd"name\\of::an_op'
ANYWHERE = [
    r for r in RULES if r not in ("fp32_set_opt_dtype", "fp32_append_dtype", "match_destination", "native")
]


@given(st.dictionaries(st.sampled_from([*OPS, NOT_DEFINED]), st.sampled_from(ANYWHERE)))
@example({NOT_DEFINED: "fp32"})
@examples(40)
def test_toml_round_trip(changes: dict[str, str]) -> None:
    """What was written is read back, whatever was changed."""
    policy = CPU.override(changes)
    assert OpPolicy.from_toml(policy.to_toml()) == policy


def test_files_and_overrides_do_not_check_again_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each line of a file costs a check of the whole policy: a second for a hundred lines."""
    text = OpPolicy.uniform("cpu").to_toml()
    resolved: list[str] = []
    full_names = names.full_names
    monkeypatch.setattr(names, "full_names", lambda name: resolved.append(name) or full_names(name))
    OpPolicy.from_toml(text)
    assert len(resolved) <= len(text.splitlines())


def test_toml_from_a_file_says_where(tmp_path: Path) -> None:
    """`explain` leads to the line of the file."""
    path = tmp_path / "policy.toml"
    path.write_text('device_type = "cpu"\n\n[rules]\nmm = "fp32"\n"aten::softmax.int" = "fp32"\n')
    policy = OpPolicy.from_toml(path)
    assert policy.explain("softmax")[0].origin == f"{path}:5"
    assert policy.rule("mm") == "fp32"


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("[rules\nmm = 1\n", None, "not TOML"),
        ('device_type = "cpu"\n[rules]\nmm = "fp33"\n', 3, "Unknown rule 'fp33'"),
        ('device_type = "cpu"\n[rules]\nsoftmx = "fp32"\n', 3, "Did you mean 'softmax'"),
        ('device_type = "cpu"\n[rules]\nsoftmax.int = "fp32"\n', 3, 'in quotes: "softmax.int" = '),
        ('device_type = "cpu"\n[rules.softmax]\nint = "fp32"\n', 3, 'in quotes: "softmax.int" = '),
        ('[rules]\naten.softmax.int = "fp32"\n', 2, 'in quotes: "aten.softmax.int" = '),
        ('device_type = "cpu"\n[rules.aten.softmax]\nint = "fp32"\n', 3, 'in quotes: "aten.softmax.int" = '),
        ('device_type = "cpu"\n[modules.a]\nmm = "fp32"\n[rules]\nmm = "fp33"\n', 5, "Unknown rule 'fp33'"),
        ('device_type = "cpu"\n[modul.a]\nmm = "fp32"\n', 2, "unknown key 'modul'"),
        ('device_type = "cpu"\ndtype = "bf16"\n', 2, "unknown key 'dtype'"),
        ('device_type = "cpu"\nbase = "best"\n', 2, "unknown base 'best'"),
        ('device_type = "cpu"\nrules = 3\n', 2, "rules must be a table"),
        ("[rules]\n\n", None, "names no device"),
        ("device_type = 1\n\n", 1, "without an index, not for 1"),
        ('base = "uniform"\ndevice_type = "auto"\n', 2, "not for 'auto'"),
        ('base = "none"\ndevice_type = "cuda:0"\n', 2, "without an index"),
    ],
)
def test_bad_toml_names_file_and_line(text: str, line: int | None, message: str, tmp_path: Path) -> None:
    """The author of a file needs the line."""
    path = tmp_path / "p.toml"
    path.write_text(text)
    with pytest.raises(PolicyError) as caught:
        OpPolicy.from_toml(str(path))
    assert str(caught.value).startswith(f"{path}:{line}: " if line else f"{path}: ")
    assert message in str(caught.value)
    if message == "not TOML":
        assert "line 1" in str(caught.value)


def test_toml_bases() -> None:
    """A file can start from nothing, the device's default, or the policy that is equal everywhere."""
    assert len(OpPolicy.from_toml('base = "none"\n[rules]\nmm = "fp32"\n', "cpu")) == 2
    assert OpPolicy.from_toml('base = "uniform"\n', "cpu") == OpPolicy.uniform("cpu")
    with pytest.raises(PolicyError, match="is for 'cuda', not for 'cpu'"):
        OpPolicy.from_toml('device_type = "cuda"\n', "cpu")
    with pytest.raises(PolicyError, match=r"^A policy is for one type"):  # no line of the file is wrong
        OpPolicy.from_toml('base = "none"\n', "cuda:0")


def test_a_policy_for_a_device_that_is_not_installed_is_saved_and_read() -> None:
    """A policy that was made where the plugin is missing cannot be written; or reading it names no file."""
    policy = OpPolicy("npu_of_none", {"mm": "fp32"})
    text = policy.to_toml()
    assert 'base = "uniform"' in text
    assert OpPolicy.from_toml(text) == policy
    with pytest.raises(PolicyError, match=r'line 1: .*npu_of_none.*base = "uniform"|1: .*npu_of_none'):
        OpPolicy.from_toml('device_type = "npu_of_none"\n')
