"""Rules for many modules of a large model."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from amp_core import PrecisionPlan, apply_policy
from amp_core.regions.selecting import matches

from ..counted import calls_of


@pytest.mark.parametrize("selector_of", [lambda model, name: name, lambda model, name: model[int(name)]])
def test_a_rule_for_each_module_takes_linear_time(selector_of: Callable[[Any, str], Any]) -> None:
    """Each rule that `advise` has found for one module is compared with all modules: minutes for many."""

    def calls(count: int) -> int:
        model = nn.Sequential(*[nn.Linear(1, 1) for _ in range(count)])
        rules = {selector_of(model, str(number)): {"linear": "fp32"} for number in range(count)}
        applied = []
        result = calls_of(lambda: applied.append(apply_policy(model, rules)))
        assert applied[0].modules == tuple(map(str, range(count)))
        applied[0].remove()
        return result

    calls(2)
    assert calls(160) < 5 * calls(40)


def test_a_file_of_rules_takes_linear_time() -> None:
    """Each rule of a file looks through all of its lines: a plan for thousands of modules hangs."""

    def calls(count: int) -> int:
        rules = "".join(f'[modules."{number}"]\nlinear = "fp32"\n' for number in range(count))
        return calls_of(lambda: PrecisionPlan.from_toml(f'device_type = "cpu"\n{rules}'))

    calls(2)
    assert calls(160) < 5 * calls(40)


def test_names_of_shared_modules_and_names_like_globs() -> None:
    """A module is selected by its first name alone, or a name with brackets selects another module."""
    shared = nn.Linear(1, 1)
    model = nn.ModuleDict({"a": shared, "b": shared, "[b]": nn.Linear(1, 1)})
    for selector, expected in (("b", "a"), ("[b]", "a"), ("[[]b]", "[b]"), (model["[b]"], "[b]"), ("", "")):
        with apply_policy(model, {selector: "fp32"}) as applied:
            assert applied.modules == (expected,)


def test_a_glob_of_many_parts_takes_linear_time() -> None:
    """A glob with several ``**`` tries all ways to divide each name of a deep model among them: it hangs."""

    def calls(count: int) -> int:
        return calls_of(lambda: matches("a." * count + "b", "**.*.**.*.**.*.**.*.c"))

    assert not matches("a.b", "**.c")
    assert calls(80) < 5 * calls(20)


def test_a_long_name_selects_its_module() -> None:
    """The name of a module deep in a model ends in an error about recursion if it has a wildcard."""
    parts = 2 * sys.getrecursionlimit()
    assert matches("a." * parts + "b", "a." * parts + "?")
    assert not matches("a." * parts + "b", "a." * parts + "?.**.c")
