"""Validate process groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def check_group(process_group: object, name: str = "process_group") -> ProcessGroup:
    """Return `process_group` if this rank can use it.

    Raises:
        TypeError: it is not a process group, or this rank is not a member of it.
    """
    from torch import distributed

    if distributed.is_available() and isinstance(process_group, distributed.ProcessGroup):
        return process_group
    raise TypeError(
        f"{name} must be a torch.distributed.ProcessGroup that this rank is a member of, got "
        f"{process_group!r}. On ranks that are not members, torch.distributed.new_group returns a number "
        f"instead of a group; pass no group there."
    )
