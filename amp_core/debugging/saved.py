"""Save what was recorded to a file, and read it in another process, on another device or version."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import torch

from amp_core._torch.tracing import outside_graphs
from amp_core.common.files import as_path
from amp_core.common.versions import installed_version
from amp_core.debugging.places import Place
from amp_core.errors import AmpError

K = TypeVar("K")
_FORMAT = 1


@outside_graphs  # Dynamo of torch 2.11 crashes in platform.machine()
def environment() -> dict[str, str]:
    """Return the versions and devices that can make two runs differ."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return {
        "amp-core": installed_version("amp-core"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "accelerator": "none" if accelerator is None else _device_name(accelerator),
    }


def _device_name(device: torch.device) -> str:
    module = torch.get_device_module(device)  # a plugin's module need not have names
    return str(module.get_device_name()) if hasattr(module, "get_device_name") else device.type


def write(path: str | PathLike[str], kind: str, data: Mapping[str, Any]) -> None:
    """Write `data` as JSON, marked as `kind`."""
    as_path(path).write_text(json.dumps({"kind": kind, "format": _FORMAT, **data}), encoding="utf-8")


@contextmanager
def reading(path: str | PathLike[str], kind: str) -> Iterator[dict[str, Any]]:
    """Read a file of `write` for a block that takes it apart.

    Raises:
        AmpError: the file is not a saved `kind`, comes from a newer amp-core, or is damaged, which is what an
            error of the block means.
    """
    data = _read(path, kind)
    try:
        yield data
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise AmpError(f"{path} is a damaged {kind}: {type(error).__name__}: {error}") from error


def _read(path: str | PathLike[str], kind: str) -> dict[str, Any]:
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise AmpError(f"{path} is not a saved {kind}: {error}") from error
    if not isinstance(data, dict) or data.get("kind") != kind:
        raise AmpError(f"{path} is not a saved {kind}; save() writes one.")
    if data.get("format") != _FORMAT:
        raise AmpError(f"{path} has format {data.get('format')}, and this amp-core reads format {_FORMAT}.")
    return data


def as_lists(counts: Mapping[Any, Any]) -> list[list[Any]]:
    """Return counts, by keys that are tuples, as plain values for `counted`."""
    return [[*key, count if isinstance(count, int) else asdict(count)] for key, count in counts.items()]


def counted(
    key: Callable[..., K], lists: Iterable[list[Any]], count: Callable[..., Any] | None = None
) -> dict[K, Any]:
    """Take apart what `as_lists` returned, for keys that begin with a phase and a place."""
    return {
        key(phase, Place(*place), *rest): value if count is None else count(**value)
        for phase, place, *rest, value in lists
    }


def differences(here: Mapping[str, str], there: Mapping[str, str]) -> dict[str, str]:
    """Return what differs between two environments, as facts of a report."""
    names = [name for name in {**here, **there} if here.get(name) != there.get(name)]
    return {name: f"{here.get(name, 'none')}  ->  {there.get(name, 'none')}" for name in names}
