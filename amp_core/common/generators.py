"""Save and restore the random generators."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor


def kept_generators(device_type: str) -> AbstractContextManager[None]:
    """Restore torch's generators of the CPU, and of the accelerator if it has this type, after a block."""
    accelerator = torch.accelerator.current_accelerator()
    on_accelerator = accelerator is not None and accelerator.type == device_type
    devices = [torch.accelerator.current_device_index()] if on_accelerator else []
    return torch.random.fork_rng(devices, device_type=device_type if on_accelerator else "cpu")


Generators = tuple[object, Tensor, "Tensor | None"]
"""The states of Python's, the CPU's and the current accelerator's generator."""


def generator_states() -> Generators:
    """Return the states of the generators that a forward pass draws from by default."""
    module = _accelerator()
    return random.getstate(), torch.get_rng_state(), None if module is None else module.get_rng_state()


@contextmanager
def with_generators(states: Generators) -> Iterator[None]:
    """Let the generators continue from `states` in a block, and afterwards from where they were."""
    before = generator_states()
    try:
        _set_generators(states)
        yield
    finally:
        _set_generators(before)


def _set_generators(states: Generators) -> None:
    of_python, of_cpu, of_accelerator = states
    random.setstate(of_python)  # type: ignore[arg-type]
    torch.set_rng_state(of_cpu)
    module = _accelerator()
    if module is not None and of_accelerator is not None:
        module.set_rng_state(of_accelerator)


def _accelerator() -> Any:
    """Return the module of the accelerator in use; None without one, or if it has no generator."""
    accelerator = torch.accelerator.current_accelerator()
    module: Any = None if accelerator is None else torch.get_device_module(accelerator)
    if not hasattr(module, "get_rng_state") or not getattr(module, "is_initialized", lambda: True)():
        return None
    return module


@contextmanager
def seeded(seed: int, device_type: str) -> Iterator[None]:
    """Seed torch and `random` for a block, and restore their state afterwards."""
    state = random.getstate()
    with kept_generators(device_type):
        torch.manual_seed(seed % 2**64)  # more is an error
        random.seed(seed)
        try:
            yield
        finally:
            random.setstate(state)
