"""``python -m benchmarks [GROUP ...]``: run the benchmarks; print Markdown, and write JSON if asked."""

from __future__ import annotations

import argparse
import importlib
import json
import platform
from pathlib import Path

import torch

import amp_core
from benchmarks.ab import Ratio
from benchmarks.plot import save_ratios

GROUPS = ("regions", "dispatch", "gradients", "bandwidth", "traffic", "casts")


def main() -> None:
    """Run the groups that the command line names, by default all."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=", ".join(GROUPS))
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--plot", type=Path, help="also draw the ratios into this file")
    args = parser.parse_args()
    results: dict[str, list[Ratio]] = {}
    print(f"{_machine()}\n")
    for group in args.groups or GROUPS:
        print(f"## {group}\n\n| what | torch, ms | amp-core, ms | ratio |\n|---|---|---|---|")
        results[group] = []
        for found in importlib.import_module(f"benchmarks.{group}").run():
            results[group].append(found)
            print(_row(found), flush=True)
        print()
    if args.json:
        figures = {group: [vars(r) for r in found] for group, found in results.items()}
        args.json.write_text(json.dumps({"machine": _machine(), "seconds": figures}, indent=1) + "\n")
    if args.plot:
        save_ratios(results, args.plot)


def _row(found: Ratio) -> str:
    if found.unit == "B":
        sides = f"{found.theirs / 1e6:.0f} MB | {found.ours / 1e6:.0f} MB"
    else:
        sides = f"{found.theirs * 1e3:.4g} | {found.ours * 1e3:.4g}"
    return f"| {found.name} | {sides} | {found.ratio:.2f} |"


def _machine() -> str:
    kernels = amp_core.get_backend("cpu").kernels()
    return (
        f"torch {torch.__version__}, Python {platform.python_version()}, {torch.get_num_threads()} threads, "
        f"{torch.backends.cpu.get_cpu_capability()}; kernels: {kernels.name} ({kernels.reason})"
    )


if __name__ == "__main__":
    main()
