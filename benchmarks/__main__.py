"""``python -m benchmarks [GROUP ...]``: run the benchmarks; print Markdown, and write JSON if asked."""

from __future__ import annotations

import argparse
import importlib
import json
import platform
from collections.abc import Iterator
from pathlib import Path

import torch

import amp_core
from benchmarks.ab import Ratio
from benchmarks.plot import save_ratios

GROUPS = ("regions", "dispatch", "gradients", "bandwidth", "traffic", "overlap", "casts", "insight")
ACCELERATED = ("gradients", "casts")


def main() -> None:
    """Run the groups that the command line names, by default all."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=", ".join(GROUPS))
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--plot", type=Path, help="also draw the ratios into this file")
    parser.add_argument("--device", default="cpu", help="cpu, or an accelerator: " + ", ".join(ACCELERATED))
    args = parser.parse_args()
    found = amp_core.get_backend(args.device).availability()
    if not found.usable:
        raise SystemExit(f"{args.device!r} cannot be measured here: {found.reason}")
    results: dict[str, list[Ratio]] = {}
    print(f"{_machine(args.device)}\n")
    for group in args.groups or (GROUPS if args.device == "cpu" else ACCELERATED):
        print(f"## {group}\n\n| what | torch, ms | amp-core, ms | ratio |\n|---|---|---|---|")
        results[group] = []
        for ratio in _ratios(group, args.device):
            results[group].append(ratio)
            print(_row(ratio), flush=True)
        print()
    if args.json:
        figures = {group: [vars(r) for r in found] for group, found in results.items()}
        args.json.write_text(
            json.dumps({"machine": _machine(args.device), "seconds": figures}, indent=1) + "\n"
        )
    if args.plot:
        save_ratios(results, args.plot)


def _ratios(group: str, device: str) -> Iterator[Ratio]:
    if device == "cpu":
        yield from importlib.import_module(f"benchmarks.{group}").run()
    elif group in ACCELERATED:
        yield from importlib.import_module(f"benchmarks.accelerator.{group}").run(device)
    else:
        raise SystemExit(f"{group!r} measures the CPU; on {device!r} there are {', '.join(ACCELERATED)}.")


def _row(found: Ratio) -> str:
    if found.unit == "B":
        sides = f"{found.theirs / 1e6:.0f} MB | {found.ours / 1e6:.0f} MB"
    else:
        sides = f"{found.theirs * 1e3:.4g} | {found.ours * 1e3:.4g}"
    return f"| {found.name} | {sides} | {found.ratio:.2f} |"


def _machine(device: str) -> str:
    kernels = amp_core.get_backend(device).kernels()
    name = torch.backends.cpu.get_cpu_capability()
    if device != "cpu":
        name = torch.get_device_module(device).get_device_name()
    return (
        f"torch {torch.__version__}, Python {platform.python_version()}, {torch.get_num_threads()} threads, "
        f"{name}; kernels: {kernels.name} ({kernels.reason})"
    )


if __name__ == "__main__":
    main()
