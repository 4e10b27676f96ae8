"""``amp backends``: every device backend and its status."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from amp_core.cli.tables import print_table

if TYPE_CHECKING:
    from amp_core.plugin import Backend


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """Print the backends; always exit with 0."""
    from amp_core._torch.features import statuses

    rows, features = describe_backends(), [status._asdict() for status in statuses()]
    if args.json:
        print(json.dumps({"backends": rows, "features": features}, indent=2))
    else:
        _print_table(rows)
        for row in rows:
            for line in filter(None, _details(row)):
                print(f"{row['device']}: {line}")
        _print_features(features)
    return 0


def describe_backends() -> list[dict[str, Any]]:
    """Return one row of plain values per device type."""
    from amp_core.plugin import backends

    return [
        {"device": name, **vars(status), **_abilities(name, status.status)}
        for name, status in backends().items()
    ]


def _abilities(device_type: str, status: str) -> dict[str, Any]:
    nothing = {
        "default_dtype": "",
        "supported_dtypes": [],
        "kernels": "",
        "kernels_reason": "",
        "native_formats": [],
        "emulated_formats": {},
    }
    if status not in {"available", "absent"}:
        return nothing
    from amp_core.common.text import dtype_name
    from amp_core.plugin import get_backend

    backend = get_backend(device_type)
    try:
        kernels = backend.kernels()
        return {
            "default_dtype": dtype_name(backend.default_dtype()),
            "supported_dtypes": [dtype_name(dtype) for dtype in backend.supported_dtypes()],
            "kernels": kernels.name,
            "kernels_reason": kernels.reason,
            **_formats(backend),
        }
    except Exception as error:
        # One broken plugin must not hide the others.
        return {**nothing, "kernels_reason": " ".join(f"{type(error).__name__}: {error}".split())}


def _formats(backend: Backend) -> dict[str, Any]:
    """Return the recipes whose products the device has, and the others with what it emulates and why."""
    from amp_core.formats import Recipe
    from amp_core.kernels.scaled import emulated

    products = backend.scaled_products()
    reasons = {name: emulated(products, Recipe.named(name)) for name in Recipe.names()}
    return {
        "native_formats": [name for name, each in reasons.items() if not each],
        "emulated_formats": {name: each for name, each in reasons.items() if each},
    }


def _print_table(rows: list[dict[str, Any]]) -> None:
    columns = ("device", "status", "dtypes (default first)", "kernels", "from")
    colours = {"available": "green", "absent": "yellow", "failed": "red", "disabled": "red"}
    print_table("amp-core backends", columns, [_cells(row) for row in rows], colours)


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    dtypes = [row["default_dtype"], *(d for d in row["supported_dtypes"] if d != row["default_dtype"])]
    source = f"{row['distribution']} {row['version']}".strip() or row["plugin"]
    return (row["device"], row["status"], ", ".join(filter(None, dtypes)), row["kernels"], source)


def _details(row: dict[str, Any]) -> Iterator[str]:
    """Yield what has no room in the table."""
    yield row["reason"]
    if row["kernels_reason"]:
        yield f"kernels: {row['kernels_reason']}" if row["kernels"] else row["kernels_reason"]
    if row["status"] == "available" and row["kernels"]:
        yield from _formats_in_words(row)
    yield row["path"]


def _formats_in_words(row: dict[str, Any]) -> Iterator[str]:
    by_reason: dict[str, list[str]] = {}
    for name, reasons in row["emulated_formats"].items():
        every = len(reasons) == 3 and len({*reasons.values()}) == 1
        said = [*reasons.values()][:1] if every else [f"{k}: {v}" for k, v in reasons.items()]
        by_reason.setdefault("; ".join(said), []).append(name)
    yield f"native formats: {', '.join(row['native_formats']) or 'none'}"
    for text, names in by_reason.items():
        yield f"emulated: {', '.join(names)} ({text})"


def _print_features(features: list[dict[str, Any]]) -> None:
    off = [feature for feature in features if not feature["works"]]
    print(f"features that depend on private torch names: {len(features) - len(off)} of {len(features)} work")
    for feature in off:
        print(f"off: {feature['feature']}: {feature['reason']}")
