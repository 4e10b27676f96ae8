"""What pytest collects when `amp_core.testing.check` runs it; of no use otherwise."""

from amp_core.testing.runner import _SUBJECT

TestBackend = _SUBJECT[-1]
