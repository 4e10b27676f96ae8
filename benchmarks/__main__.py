"""``python -m benchmarks [GROUP ...]``: run the benchmarks; print Markdown, and write JSON if asked."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import amp_core
from amp_core.common.environment import CPU_CAPABILITY
from amp_core.common.files import why_unwritable
from benchmarks import machine
from benchmarks.ab import Ratio
from benchmarks.plot import save_ratios

GROUPS = (
    "regions",
    "dispatch",
    "gradients",
    "bandwidth",
    "traffic",
    "overlap",
    "casts",
    "debugging",
    "formats",
    "inference",
    "storage",
)
ACCELERATED = ("gradients", "casts")
RESULTS = Path(__file__).parent / "results"


def main() -> None:
    """Run the groups that the command line names, by default all."""
    # No abbreviations: _run_with takes --capability out by its name.
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__, allow_abbrev=False)
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=", ".join(GROUPS))
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--plot", type=Path, help="also draw the ratios into this file")
    parser.add_argument("--device", default="cpu", help="cpu, or an accelerator: " + ", ".join(ACCELERATED))
    parser.add_argument(
        "--capability",
        choices=(*machine.CAPABILITIES, "all"),
        help="the instruction set of both sides, or all that the CPU has in turn (default: the CPU's best)",
    )
    parser.add_argument(
        "--keep", action="store_true", help="write the figures to benchmarks/results, by CPU and capability"
    )
    args = parser.parse_args()
    _refuse_arguments(args)
    machine.refuse_a_mixture()
    if args.capability:
        raise SystemExit(_run_with(args.capability))
    results: dict[str, list[Ratio]] = {}
    header = machine.header(args.device)
    print("\n".join(f"- {name}: {value}" for name, value in header.items()) + "\n")
    for group in args.groups or (GROUPS if args.device == "cpu" else ACCELERATED):
        print(f"## {group}\n\n| what | torch, ms | amp-core, ms | ratio |\n|---|---|---|---|")
        results[group] = []
        for ratio in _ratios(group, args.device):
            results[group].append(ratio)
            print(_row(ratio), flush=True)
        print()
        _write(args, header, results)
    if args.plot:
        save_ratios(results, args.plot)


def _refuse_arguments(args: argparse.Namespace) -> None:
    """Stop before anything is measured if it cannot be, or cannot be written."""
    unknown = [group for group in args.groups if group not in GROUPS]
    if unknown:
        raise SystemExit(f"There is no group {unknown[0]!r}; the groups are {', '.join(GROUPS)}.")
    files = [path for path in (args.json, args.plot) if path is not None]
    if args.capability == "all" and files:
        raise SystemExit(
            "Each capability would overwrite the file of the one before: use --keep, or run each."
        )
    for path in files:
        if why := why_unwritable(path):
            raise SystemExit(f"{path} cannot be written: {why}.")
    try:
        availability = amp_core.get_backend(args.device).availability()
    except amp_core.BackendError as error:
        raise SystemExit(str(error)) from None
    if not availability.usable:
        raise SystemExit(f"{args.device!r} cannot be measured here: {availability.reason}")


def _write(args: argparse.Namespace, header: dict[str, str], results: dict[str, list[Ratio]]) -> None:
    """Write the groups that were measured so far, each with the header that it was measured under."""
    groups = {name: {"machine": header, "rows": [*map(vars, rows)]} for name, rows in results.items()}
    if args.json:
        args.json.write_text(json.dumps(groups, indent=1) + "\n")
    if args.keep:
        RESULTS.mkdir(exist_ok=True)
        kept = RESULTS / f"{machine.slug()}-{header['capability'].lower()}.json"
        former = json.loads(kept.read_text()) if kept.exists() else {}
        kept.write_text(json.dumps({**former, **groups}, indent=1) + "\n")


def _run_with(capability: str) -> int:
    """Run this command again under each capability: torch reads the variable once, when it is loaded."""
    options = list(sys.argv[1:])
    for i, option in reversed(list(enumerate(options))):
        if option.startswith("--capability"):
            del options[i : i + (1 if "=" in option else 2)]
    present = machine.capabilities()
    chosen = present if capability == "all" else (capability,)
    if not set(chosen) <= set(present):
        raise SystemExit(f"This CPU has no {capability}; it has {', '.join(present)}.")
    command = [sys.executable, "-m", "benchmarks", *options]
    runs = [subprocess.run(command, env={**os.environ, CPU_CAPABILITY: name}, check=False) for name in chosen]
    return int(any(run.returncode for run in runs))  # below 0 where a signal ended it


def _ratios(group: str, device: str) -> Iterator[Ratio]:
    if device == "cpu":
        yield from importlib.import_module(f"benchmarks.{group}").run()
    elif group in ACCELERATED:
        yield from importlib.import_module(f"benchmarks.accelerator.{group}").run(device)
    else:
        raise SystemExit(f"{group!r} measures the CPU; on {device!r} there are {', '.join(ACCELERATED)}.")


def _row(ratio: Ratio) -> str:
    if ratio.unit == "B":
        sides = f"{ratio.theirs / 1e6:.0f} MB | {ratio.ours / 1e6:.0f} MB"
    elif not ratio.unit:
        sides = f"{ratio.theirs:.4g} | {ratio.ours:.4g}"
    else:
        sides = f"{ratio.theirs * 1e3:.4g} | {ratio.ours * 1e3:.4g}"
    return f"| {ratio.name} | {sides} | {ratio.ratio:.2f} |"


if __name__ == "__main__":
    main()
