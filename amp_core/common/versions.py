"""Versions of installed distributions."""

from __future__ import annotations

from importlib import metadata


def installed_version(distribution: str) -> str:
    """Return the version of `distribution`; empty if it is not installed, or its metadata is missing."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""
