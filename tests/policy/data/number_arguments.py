"""Numbers as arguments of ops with kernels of a policy. For test_installed_kernels.py."""

from __future__ import annotations

from collections.abc import Callable

import torch

from amp_core import OpPolicy, autocast

X, N = torch.linspace(0.5, 2, 6), torch.arange(1, 7)
NUMBERS: dict[str, Callable[[], torch.Tensor]] = {
    "add": lambda: X + 1,
    "sub": lambda: 1 - X,
    "mul": lambda: N * 1.5,
    "div": lambda: 2 / X,
    "floor_divide": lambda: 3 // X,
    "pow": lambda: 2**X,
    "remainder": lambda: X % 2,
    "remainder of a number": lambda: 2 % X,
    "remainder_": lambda: X.clone().remainder_(2),
    "fmod": lambda: torch.fmod(X, 2),
    "gt": lambda: X > 1,
    "where": lambda: torch.where(X > 1, 1.0, X),
    "xlogy": lambda: torch.xlogy(2, X),
    "copysign": lambda: torch.copysign(X, -1),
    "bitwise_and": lambda: N & 1,
    "shift": lambda: 1 << N,
    "clamp": lambda: X.bfloat16().clamp(0, 1),
    "isin": lambda: torch.isin(1.0, X),
    "polynomial": lambda: torch.special.hermite_polynomial_h(X, 2),
    "ldexp": lambda: torch.ldexp(X, N),
    "masked_fill": lambda: X.masked_fill(X > 1, 2.0),
    "addcmul": lambda: torch.addcmul(X, X, X, value=2),
    "std": lambda: torch.std(X),
}

OPS = """
__and__ __lshift__ _to_copy add addcmul bitwise_and bitwise_left_shift clamp copysign div eq floor_divide
fmod gt isin item ldexp masked_fill mul pow reciprocal remainder remainder_ rsub
special_hermite_polynomial_h std sub to where xlogy
"""
policy = OpPolicy.default("cpu").override(dict.fromkeys(OPS.split(), "promote_types"))
firsts = OpPolicy("cpu", dict.fromkeys(("mul", "remainder", "sub", "where", "xlogy"), "match_destination"))
expected = {case: function() for case, function in NUMBERS.items()}
for region in (autocast("cpu", policy=policy), autocast("cpu", policy=firsts), autocast("cpu")):
    with region:
        for case, function in NUMBERS.items():
            assert torch.equal(function(), expected[case]), (case, region)
        torch.nn.Parameter(torch.ones(2))
