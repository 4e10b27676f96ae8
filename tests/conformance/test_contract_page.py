"""The promises of the contract, from which its page is made, and the code say the same."""

from __future__ import annotations

import pytest

from amp_core.kernels import Kernels, ScaledProducts
from amp_core.plugin import Backend
from amp_core.plugin.contract import HOOKS, KERNELS, SCALED_PRODUCTS


@pytest.mark.parametrize(
    ("promises", "cls"), [(HOOKS, Backend), (KERNELS, Kernels), (SCALED_PRODUCTS, ScaledProducts)]
)
def test_every_hook_promises_something_and_nothing_else_does(promises, cls):
    """A hook could be added without a word on what it promises, or one be promised that is gone."""
    methods = {n for n, value in vars(cls).items() if callable(value) and not n.startswith("_")}
    assert set(promises) == methods


@pytest.mark.parametrize("cls", [Backend, Kernels, ScaledProducts])
def test_every_member_is_described(cls):
    """The page made from the docstrings would have a bare name."""
    methods = [value for n, value in vars(cls).items() if callable(value) and not n.startswith("_")]
    assert all(method.__doc__ for method in methods)
