"""Rules of modules in TOML files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given
from torch import nn

from amp_core import Advice, OpPolicy, PolicyError, PrecisionPlan, Recipe, apply_policy
from amp_core.policy.toml import modules_of, parsed, write_modules

from ..drawn import examples


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1))


def test_a_file_does_what_the_rules_do(model: nn.Module, tmp_path: Path) -> None:
    """Rules from a file are not those that were written."""
    rules = {"0": "fp32", "1": {"softmax": "fp32"}}
    with apply_policy(model, rules) as applied:
        text = applied.to_toml()
    path = tmp_path / "modules.toml"
    path.write_text(text)
    with apply_policy(model, path) as again:
        assert again.modules == applied.modules
        assert again.to_toml() == text
        with torch.autocast("cpu"):
            assert model(torch.randn(2, 4)).dtype is torch.float32
            assert model[0](torch.randn(2, 4)).dtype is torch.float32


names = st.text(st.characters(codec="utf-8"), max_size=8)
rules_of_one = st.one_of(
    st.just("fp32"), st.dictionaries(names, st.sampled_from(["fp32", "promote"]), min_size=1)
)


@given(st.dictionaries(names, rules_of_one, min_size=1))
@example({"\x7f": "fp32"})
@examples(100)
def test_round_trip(rules: dict[str, object]) -> None:
    """A glob or op with quotes, dots or control characters in its name is read as another, or not at all."""
    found, _ = modules_of(*parsed(write_modules(rules) + "\n"))
    assert found == rules


@pytest.mark.parametrize("again", [lambda model: model[0], lambda _model: "torch.nn.modules.linear:Linear"])
def test_selectors_with_one_text_keep_the_rules_of_both(
    again: Callable[[nn.Module], object], model: nn.Module, tmp_path: Path
) -> None:
    """A file lacks the rules of a glob, or of a class, that a module or the class's name selects again."""
    first = "0" if isinstance(again(model), nn.Module) else nn.Linear
    rules = {first: {"linear": "fp32", "mm": "fp32"}, "**": {"mm": "promote"}, again(model): {"mm": "banned"}}
    path = tmp_path / "modules.toml"
    with apply_policy(model, rules) as applied:
        path.write_text(applied.to_toml())
        wanted = [applied.explain("0", op)[0].rule for op in ("linear", "mm")]
    assert wanted == ["fp32", "banned"]
    with apply_policy(model, path) as read:
        assert [read.explain("0", op)[0].rule for op in ("linear", "mm")] == wanted
        assert read.explain("1", "mm")[0].rule == "promote"


def test_a_module_with_a_colon_in_its_name_is_no_class(tmp_path: Path) -> None:
    """A file takes the name of a selected module for the path of a class, and cannot be applied."""
    model = nn.ModuleDict({"a:b": nn.Linear(2, 2)})
    path = tmp_path / "modules.toml"
    with apply_policy(model, {model["a:b"]: "fp32"}) as applied:
        path.write_text(applied.to_toml())
    with apply_policy(model, path) as read:
        assert read.modules == ("a:b",)


def test_a_file_keeps_the_order_and_the_ops_of_the_rules(model: nn.Module, tmp_path: Path) -> None:
    """A model read from a file computes in another precision, as a later rule gives way to an earlier one."""
    rules = {
        "**": {torch.ops.aten.softmax: "fp32", torch.ops.aten.mm.default: "fp32", Square: "fp32"},
        "1": "fp32",
        nn.Linear: {"linear": Recipe.mxfp8()},
    }
    path = tmp_path / "modules.toml"
    with apply_policy(model, rules) as applied:
        path.write_text(applied.to_toml())
        wanted = {(name, op): applied.explain(name, op)[0].rule for name in ("0", "1") for op in OPS}
    with apply_policy(model, path) as again:
        assert wanted == {key: again.explain(*key)[0].rule for key in wanted}
    assert wanted["1", "softmax"] == "unchanged", "runs without autocast"
    assert wanted["0", "linear"] == "recipe mxfp8"


class Square(torch.autograd.Function):
    """An autograd function."""


OPS = ("softmax", "aten::mm.default", "linear", Square)


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ('[modules]\n"0" = "fp16"\n', 2, "not a rule for a module"),
        ('[modules]\n\n[modules."nothing.*"]\nsoftmax = "fp32"\n', 3, "matches no module"),
        ('[modules."1"]\nsoftmaks = "fp32"\n', 1, "softmaks"),
        ("modules = 3\n", 1, "must be a table"),
        ('[modules]\n"0" = 1\n', 2, "1 is not a rule for a module"),
        ('[rules]\nmm = "fp32"\n', None, "has no rules for modules"),
        ('[rules]\n0 = "x"\n[modules]\n# 0 = 1\n0 = "bad"\n', 5, "not a rule for a module"),
        ('# a\u2028b\n[modules]\n"0" = "fp16"\n', 3, "not a rule for a module"),
        ('[rules]\n0 = "x"\n[modules."0"]\nsoftmaks = "fp32"\n', 3, "softmaks"),
        # TOML takes these for a rule of an op, and "softmax" and others are both ops and names of modules.
        (
            '[modules]\n1 . softmax = "fp32"\n',
            2,
            r'quotes: "1\.softmax" = \.\.\.; or if .* op, "1" = { softmax',
        ),
        ('[modules]\n\n1.0 = { linear = "fp32" }\n', 3, 'in quotes: "1.0" = '),
        ('[modules.1.0]\nlinear = "fp32"\n', 1, 'in quotes, .*: "1.0" or "0.linear"'),
        ('[modules."1"]\nsoftmax.int = "fp32"\n', 2, 'in quotes: "softmax.int" = '),
        ('[modules]\n"1" = { softmax.int = "fp32" }\n', 2, 'or "softmax.int"'),
    ],
)
def test_bad_files_name_the_line(
    text: str, line: int | None, message: str, model: nn.Module, tmp_path: Path
) -> None:
    """A user has to search the file, or the model is left with half of the rules."""
    path = tmp_path / "modules.toml"
    path.write_text(text, encoding="utf-8")
    before = [dict(vars(m)) for m in model.modules()]
    with pytest.raises(PolicyError, match=message) as caught:
        apply_policy(model, path)
    assert str(caught.value).startswith(f"{path}:{line}:" if line else f"{path}:")
    assert [dict(vars(m)) for m in model.modules()] == before


@pytest.mark.parametrize(
    ("rules", "line"),
    [
        ('[modules."0.1"]\nmm = "fp32"\n[modules.0]\nmm = "wrong"\n', 5),
        ('[modules]\n"a[01]" = "fp32"\na01 = "wrong"\n', 5),
        ('[modules]\n"a b" = "fp32"\nab = "wrong"\n', 5),
        ('[modules]\n"a" = "fp32"\n"a#b" = "wrong"\n', 5),
        ('[modules]\n"a" = "fp32"\n"a=b" = "wrong"\n', 5),
        ('[modules]\n"a" = "fp32"\n"\\u0062" = "wrong"\n', 5),
        ('rules = { mm = "fp32", linear = "wrong" }\n', 3),
    ],
)
def test_an_error_names_the_line_of_its_own_entry(rules: str, line: int, tmp_path: Path) -> None:
    """An error in the rules of `0` names the line of `0.1`, and one in an inline table the first line."""
    path = tmp_path / "rules.toml"
    path.write_text(f'device_type = "cpu"\nbase = "uniform"\n{rules}')
    with pytest.raises(PolicyError, match=rf"rules\.toml:{line}: "):
        Advice.from_toml(path)


def test_quoted_parts_of_a_dotted_key_are_meant(model: nn.Module, tmp_path: Path) -> None:
    """A rule of an op that TOML allows in one line, and that cannot be a mistake, is refused."""
    path = tmp_path / "modules.toml"
    path.write_text('[modules]\n"1".softmax = "fp32"\n')
    with apply_policy(model, path) as applied:
        assert applied.explain("1", "aten::softmax.int")[0].rule == "fp32"


def test_regions_pass_the_modules_over(tmp_path: Path) -> None:
    """One file cannot hold both, as `AMP_POLICY` would refuse it."""
    path = tmp_path / "both.toml"
    path.write_text('device_type = "cpu"\n[rules]\nmm = "fp32"\n[modules]\n"0" = "fp32"\n')
    assert OpPolicy.from_toml(path).rule("mm") == "fp32"


READERS = {
    "policy": OpPolicy.from_toml,
    "plan": PrecisionPlan.from_toml,
    "advice": Advice.from_toml,
    "modules": lambda path: apply_policy(nn.Sequential(nn.Linear(4, 4)), path),
    "recipe": Recipe.from_toml,
}


@pytest.mark.parametrize("reader", READERS)
def test_a_file_in_another_encoding_names_the_line(reader: str, tmp_path: Path) -> None:
    """A file from an editor with another encoding ends in a UnicodeDecodeError that names no file."""
    path = tmp_path / "latin.toml"
    path.write_bytes(b'device_type = "cpu"\n# caf\xe9\n')
    with pytest.raises(PolicyError, match=r"latin\.toml:2: not UTF-8, which TOML must be"):
        READERS[reader](path)


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path) -> None:
    """A file that Windows wrote is refused."""
    path = tmp_path / "windows.toml"
    path.write_text(
        '\ufeffdevice_type = "cpu"\r\n[modules]\r\n"0" = "fp32"\r\n', encoding="utf-8", newline=""
    )
    assert OpPolicy.from_toml(path) == OpPolicy.default("cpu")
    with apply_policy(nn.Sequential(nn.Linear(4, 4)), path) as applied:
        assert applied.modules == ("0",)


@pytest.mark.parametrize("reader", ["plan", "advice"])
@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ("1", "1 is not a rule for a module"),
        ('{ softmaks = "fp32" }', "torch .* has no op 'softmaks'"),
        ('{ softmax = "fp16" }', "Unknown rule 'fp16'"),
        ('{ conv2d = "recipe mxfp8" }', "it takes one scale per tensor"),
    ],
)
def test_module_rules_are_checked_when_the_file_is_read(
    reader: str, rules: str, message: str, tmp_path: Path
) -> None:
    """A wrong file fails hours later, where the rules are applied, or without its name."""
    path = tmp_path / "rules.toml"
    path.write_text(f'device_type = "cpu"\n[modules]\n"0" = {rules}\n')
    with pytest.raises(PolicyError, match=rf"rules\.toml:3: '0': .*{message}"):
        READERS[reader](path)


def test_a_recipe_of_ops_and_modules_is_written_once() -> None:
    """Advice whose rules and modules share a recipe cannot be read again, as TOML refuses a second table."""
    text = (
        'device_type = "cpu"\n[rules]\nmm = "recipe mine"\n[modules."0"]\nlinear = "recipe mine"\n'
        '[recipes.mine.weight]\nelement = "e4m3"\n'
    )
    advice = Advice.from_toml(text)
    again = Advice.from_toml(advice.to_toml())
    assert (again.policy, again.modules) == (advice.policy, advice.modules)


def test_advice_knows_the_recipes_of_its_file(tmp_path: Path) -> None:
    """Advice that was read has rules by a name that means nothing elsewhere."""
    path = tmp_path / "advice.toml"
    path.write_text(
        'device_type = "cpu"\n[modules."0"]\nlinear = "recipe mine"\n'
        '[recipes.mine.weight]\nelement = "e4m3"\n'
    )
    model = nn.Sequential(nn.Linear(4, 4))
    with Advice.from_toml(path).apply(model) as applied:
        assert applied.explain("0", "linear")[0].rule.startswith("recipe mine")
