"""``amp backends``: every device backend, and what is to be said of it."""

from __future__ import annotations

import argparse
import json
from typing import Any

from amp_core.cli import UsageError

HELP = "list every device backend: status, reason, dtypes, kernels, origin"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """Print the backends; the exit code is 0 whatever their status."""
    rows = rows_of_backends()
    if args.json:
        print(json.dumps(rows, indent=2))
    else:
        _print_table(rows)
    return 0


def rows_of_backends() -> list[dict[str, Any]]:
    """Return one row a device type, of plain values."""
    from amp_core.plugin import backends

    return [
        {"device": name, **vars(status), **_abilities(name, status.status)}
        for name, status in backends().items()
    ]


def _abilities(device_type: str, status: str) -> dict[str, Any]:
    nothing = {"default_dtype": "", "supported_dtypes": [], "kernels": "", "kernels_reason": ""}
    if status not in {"available", "absent"}:
        return nothing
    from amp_core.plugin import get_backend

    backend = get_backend(device_type)
    try:
        kernels = backend.kernels()
        return {
            "default_dtype": _short(backend.default_dtype()),
            "supported_dtypes": [_short(dtype) for dtype in backend.supported_dtypes()],
            "kernels": kernels.name,
            "kernels_reason": kernels.reason,
        }
    except Exception as error:
        # A listing that stops at one broken plugin would hide the others.
        return {**nothing, "kernels_reason": f"{type(error).__name__}: {error}".splitlines()[0]}


def _short(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _print_table(rows: list[dict[str, Any]]) -> None:
    try:
        from rich.console import Console
        from rich.table import Table
    except ModuleNotFoundError:
        raise UsageError('the table needs rich: pip install "amp-core[cli]", or use --json') from None
    from amp_core.regions.torch_state import how

    table = Table(title="amp-core backends")
    for column in ("device", "status", "reason", "dtypes (default first)", "kernels", "from"):
        table.add_column(column, overflow="fold")
    colours = {"available": "green", "absent": "yellow", "failed": "red", "disabled": "red"}
    for row in rows:
        colour = colours[row["status"]]
        dtypes = [row["default_dtype"], *(d for d in row["supported_dtypes"] if d != row["default_dtype"])]
        kernels = f"{row['kernels']}: {row['kernels_reason']}" if row["kernels_reason"] else row["kernels"]
        source = f"{row['distribution']} {row['version']}".strip() or row["plugin"]
        status = f"[{colour}]{row['status']}[/]"
        table.add_row(row["device"], status, row["reason"], ", ".join(dtypes).strip(", "), kernels, source)
    console = Console()
    console.print(table)
    console.print(f"regions are entered by: {how}", highlight=False)
    for row in rows:
        if row["path"]:
            console.print(f"{row['device']}: {row['path']}", soft_wrap=True, highlight=False)
