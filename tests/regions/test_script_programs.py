"""Random functions of nested regions and branches, of which amp_core.script makes TorchScript.

They have no loops: TorchScript fails in some programs of loops, without regions too.
"""

from __future__ import annotations

import importlib.util
import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from amp_core import autocast, script

from ..alike import same
from ..drawn import programs

OPS = (  # a region that is disabled makes no dtypes equal
    "a = torch.mm(a.float(), b.float())",
    "a = torch.addmm(a.float(), b.float(), b.float())",
    "a = torch.nn.functional.linear(a.float(), b.float())",
    "b = torch.nn.functional.softmax(b, 0)",
    "b = torch.nn.functional.layer_norm(b.float(), [4])",
    "b = torch.cat([a, b])[:4]",
    "b = torch.exp(b.clamp(max=2.0))",
    "a, b = b + 1, a + b",
    "a = decorated(a, b)",
    "b = with_region(a, b, flag)",
)
HEAD = """
import torch
import amp_core

@amp_core.autocast("cpu", dtype=torch.LOW)
def decorated(a, b):
    return torch.mm(a.float(), b.float())

def with_region(a, b, flag: bool):
    with amp_core.autocast("cpu", dtype=torch.LOW, enabled=flag):
        return torch.mm(a.float(), b.float()) + b

{decorator}
def program(a, b, flag: bool, n: int):
"""


def a_region(choose: random.Random) -> str:
    enabled = choose.choice(["", "", ", enabled=False", ", enabled=flag", ", enabled=n > 1"])
    return f'amp_core.autocast("cpu", dtype=torch.LOW{enabled})'


def statements(choose: random.Random, bound: tuple[str, ...] = (), depth: int = 1) -> Iterator[str]:
    for _ in range(choose.randrange(1, 4)):
        head = "" if depth > 3 else choose.choice(["", "", "region", "as", "again", "if"])
        if head == "again" and not bound:
            head = ""
        if not head:
            yield "    " * depth + choose.choice(OPS)
            continue
        name = f"r{depth}"
        inner = (*bound, name) if head == "as" else bound
        yield (
            "    " * depth
            + {
                "region": f"with {a_region(choose)}:",
                "as": f"with {a_region(choose)} as {name}:",
                "again": f"with {choose.choice(bound or ('',))}:",
                "if": f"if {choose.choice(['flag', 'n > 1'])}:",
            }[head]
        )
        yield from statements(choose, inner, depth + 1)


def source(choose: random.Random, dtype: str) -> str:
    """Return a program in one dtype: torch refuses to promote both to each other."""
    decorator = choose.choice(["", f"@{a_region(choose)}"]).replace("flag", "True").replace("n > 1", "True")
    body = ""
    while "autocast" not in body:  # without a region, all is TorchScript's own
        body = "\n".join(statements(choose))
    return f"{HEAD.format(decorator=decorator)}{body}\n    return a, b\n".replace("LOW", dtype)


def loaded(text: str, path: Path) -> Callable[..., Any]:
    """Return the program from a file, where TorchScript looks for its source."""
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.program


def run(program: Callable[..., Any], region: Any, flag: bool, n: int, trains: bool) -> list[Any]:
    """Return the results in a region, and the gradients if it trains."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(4, 4, generator=generator).requires_grad_(trains) for _ in range(2))
    with region:
        results = program(a, b, flag, n)
    assert not torch.is_autocast_enabled("cpu")
    if any(each.requires_grad for each in results):
        sum(each.float().sum() for each in results).backward()
    return [*results, a.grad, b.grad]


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_scripted_programs_compute_as_in_eager_mode(tmp_path: Path) -> None:
    """TorchScript loses a region's casts, in gradients if the region is in a branch, or those of addmm."""
    for number, choose in enumerate(programs(seconds=6)):
        dtype = choose.choice(["bfloat16", "float16"])
        text = source(choose, dtype)
        program = loaded(text, tmp_path / f"drawn_{number}.py")
        scripted = script(program)
        for enabled, trains in itertools.product([False, True], repeat=2):
            region = autocast("cpu", dtype=getattr(torch, dtype), enabled=enabled)
            for flag, n in choose.sample([(True, 1), (True, 2), (False, 1), (False, 2)], 2):
                wanted, got = (run(each, region, flag, n, trains) for each in (program, scripted))
                for one, other in zip(wanted, got, strict=True):
                    assert same(one, other, 0, 0), (text, enabled, trains, flag, n)
