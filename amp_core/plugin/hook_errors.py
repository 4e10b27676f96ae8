"""What is wrong with a plugin's hooks, where pluggy does not say it, or not what to write instead."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import pluggy

from amp_core.plugin import hookspecs


def has_methods(plugin: type) -> bool:
    """Whether a hook of the class needs an instance: pluggy would call it without one."""
    found = [getattr(plugin, hook, None) for hook in hookspecs.__all__]
    return any(inspect.isfunction(each) and "self" in inspect.signature(each).parameters for each in found)


@contextmanager
def hooks_named() -> Iterator[None]:
    """Add the hooks that there are to pluggy's error of one that is unknown or takes something else."""
    try:
        yield
    except pluggy.PluginValidationError as error:
        hooks = {name: inspect.signature(getattr(hookspecs, name)) for name in hookspecs.__all__}
        known = ", ".join(f"{name}({', '.join(hook.parameters)})" for name, hook in hooks.items())
        text = f"{error}. The hooks of amp-core are {known}; each may leave out arguments."
        raise pluggy.PluginValidationError(error.plugin, text) from error
