"""``amp env``: versions, devices and settings, for a bug report."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys

from amp_core.common import environment as _env
from amp_core.common.versions import installed_version

_PACKAGES = (
    "amp-core",
    "torch",
    "pluggy",
    "triton",
    "numpy",
    "lightning",
    "accelerate",
    "transformers",
    "rich",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``amp env``."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print the facts for a bug report, which includes broken backends and packages."""
    packages = {package: installed_version(package) or "not installed" for package in _PACKAGES}
    facts = {"system": _system(), "packages": packages, "devices": _devices(), "settings": _settings()}
    if args.json:
        print(json.dumps(facts, indent=2))
        return 0
    for title, entries in facts.items():
        print(f"{title}:")
        for name, value in entries.items():
            print(f"  {name}: {value}")
    return 0


def _system() -> dict[str, str]:
    return {
        "python": f"{platform.python_version()} ({platform.python_implementation()}, {sys.executable})",
        "platform": platform.platform(),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
    }


def _devices() -> dict[str, str]:
    from amp_core.cli.backends import describe_backends

    devices = {}
    for row in describe_backends():
        kernels = row["kernels"] or row["kernels_reason"]  # without kernels, why there are none
        parts = [row["status"], row["reason"], ", ".join(row["supported_dtypes"]), kernels]
        devices[row["device"]] = "; ".join(filter(None, parts))
    return devices


def _settings() -> dict[str, str]:
    import torch

    names = sorted(name for name in os.environ if name.startswith("AMP_"))
    others = (*_env.VISIBLE_GPUS, _env.CPU_CAPABILITY, _env.C_COMPILER, _env.RANK, "OMP_NUM_THREADS")
    names += [name for name in others if name in os.environ]
    settings = {name: os.environ[name] for name in names}
    settings["CUDA of torch"] = torch.version.cuda or torch.version.hip or "none"
    settings["threads of torch"] = str(torch.get_num_threads())
    return settings
