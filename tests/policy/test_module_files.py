"""Rules of modules in TOML files."""

from __future__ import annotations

from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn

from amp_core import OpPolicy, PolicyError, apply_policy
from amp_core.policy.toml import read_modules, write_modules


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


names = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=8)
rules_of_one = st.one_of(
    st.just("fp32"), st.dictionaries(names, st.sampled_from(["fp32", "promote"]), min_size=1)
)


@given(st.dictionaries(names, rules_of_one, min_size=1))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_round_trip(rules: dict[str, object]) -> None:
    """A glob or op with quotes or dots in its name comes back as another."""
    found, _ = read_modules(write_modules(rules) + "\n")
    assert found == rules


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ('[modules]\n"0" = "fp16"\n', 2, "not a rule for a module"),
        ('[modules]\n\n[modules."nothing.*"]\nsoftmax = "fp32"\n', 3, "matches no module"),
        ('[modules."1"]\nsoftmaks = "fp32"\n', 1, "softmaks"),
        ("modules = 3\n", 1, "must be a table"),
        ('[rules]\nmm = "fp32"\n', None, "has no rules for modules"),
    ],
)
def test_bad_files_name_the_line(
    text: str, line: int | None, message: str, model: nn.Module, tmp_path: Path
) -> None:
    """A user has to search the file, or the model is left with half of the rules."""
    path = tmp_path / "modules.toml"
    path.write_text(text)
    before = [dict(vars(m)) for m in model.modules()]
    with pytest.raises(PolicyError, match=message) as caught:
        apply_policy(model, path)
    assert str(caught.value).startswith(f"{path}:{line}:" if line else f"{path}:")
    assert [dict(vars(m)) for m in model.modules()] == before


def test_regions_pass_the_modules_over(tmp_path: Path) -> None:
    """One file cannot hold both, as `AMP_POLICY` would refuse it."""
    path = tmp_path / "both.toml"
    path.write_text('device_type = "cpu"\n[rules]\nmm = "fp32"\n[modules]\n"0" = "fp32"\n')
    assert OpPolicy.from_toml(path).rule("mm") == "fp32"
