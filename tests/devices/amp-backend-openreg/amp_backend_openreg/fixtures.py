"""What ``openreg`` devices cannot do, found by running the kit on torch_openreg of torch 2.9.1."""

from __future__ import annotations

from amp_core.testing import BackendFixtures


class OpenregFixtures(BackendFixtures):
    """Torch's example of a device, without what it shows no kernels for."""

    # `view_as_real` falls back to the CPU and gives a copy, and `abs` takes float32 alone.
    supports_complex = False
