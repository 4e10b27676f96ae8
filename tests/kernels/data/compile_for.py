"""Compiles the programs for a GPU that need not be there, and prints as JSON what its code holds.

``python compile_for.py nvidia|amd``
"""

from __future__ import annotations

import json
import sys
from typing import Any

import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_program

from amp_core.kernels import triton_norms
from amp_core.kernels import triton_programs as programs

TARGETS = {"nvidia": GPUTarget("cuda", 90, 32), "amd": GPUTarget("hip", "gfx942", 64)}
PATTERNS = {
    "nvidia": {
        "wide loads": "ld.global.v4",
        "wide stores": "st.global.v4",
        "to bfloat16": "cvt.rn.bf16x2",
        "float64": ".f64",
    },
    "amd": {"wide loads": "load_dwordx4", "wide stores": "store_dwordx4", "float64": "_f64"},
}
TABLE = dict.fromkeys(
    ("addresses", "targets", "sizes", "row_tensor", "row_start", "first_row", "end_row", "words"), "*i64"
)
NUMBERS = {"first": "i32", "end": "i32", "rows": "i32", "count": "i32", "order": "fp32", "interval": "i32"}
STATE = {"hysteresis": "i32", "growth_tracker": "*i32", "hysteresis_left": "*i32", "scale": "*fp32"}
WORDS = dict.fromkeys(("growth_bits", "backoff_bits", "min_bits", "max_bits", *"abcdefgh"), "i64")


def count(maker: str, program: Any, **constants: Any) -> dict[str, int]:
    """Compile `program`; return how often each pattern stands in its code."""
    wide = "*fp64" if constants.get("ACC") == tl.float64 and "FLAG" not in constants else "*fp32"
    parts = dict.fromkeys(("units", "sums", "norms", "norm"), wide)
    flags = dict.fromkeys(("nonfinite", "found_inf", "factor"), "*fp32")
    types = {**TABLE, **NUMBERS, **STATE, **WORDS, **parts, **flags}
    if "row_tensor" in program.arg_names:
        types["first_row"] = "i32"
    signature = {name: types.get(name, "constexpr") for name in program.arg_names}
    held = {(program.arg_names.index(name),): value for name, value in constants.items()}
    made = compile_program(
        ASTSource(program, signature, held), target=TARGETS[maker], options=programs.OPTIONS
    )
    code = made.asm["ptx" if maker == "nvidia" else "amdgcn"]
    return {name: code.count(pattern) for name, pattern in PATTERNS[maker].items()}


def main(maker: str) -> None:
    """Compile every program in the forms that are launched."""
    found = {}
    block, parts = {"BLOCK": programs.BLOCK}, {"PARTS": triton_norms.PARTS}
    for dtype in (tl.float32, tl.bfloat16, tl.float16, tl.float64):
        acc = {"ACC": tl.float64 if dtype == tl.float64 else tl.float32}
        for order in (2, 1, 0, -1):
            found[f"measure {dtype} {order}"] = count(
                maker, triton_norms.measure_rows, DTYPE=dtype, ORDER=order, **acc, **block
            )
        found[f"scale {dtype}"] = count(maker, programs.scale_rows, DTYPE=dtype, FLAG=True, **acc, **block)
    for source, target in ((tl.float32, tl.bfloat16), (tl.float32, tl.float16), (tl.bfloat16, tl.float32)):
        found[f"cast {source} {target}"] = count(
            maker, programs.move_rows, SOURCE=source, TARGET=target, ACC=tl.float32, ADD=False, **block
        )
    for source in (tl.float32, tl.bfloat16):
        found[f"add {source} fp32"] = count(
            maker, programs.move_rows, SOURCE=source, TARGET=tl.float32, ACC=tl.float32, ADD=True, **block
        )
    for acc in (tl.float32, tl.float64):
        for order in (2, -1):
            some = {"ORDER": order, "ACC": acc, **parts}
            found[f"tensors {acc} {order}"] = count(maker, triton_norms.measure_tensors, **some)
            found[f"total {acc} {order}"] = count(maker, triton_norms.measure_total, **some)
    found["update"] = count(maker, programs.update_scale, BUDGET=True, EVERY=False)
    found["words"] = count(maker, programs.write_words)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
