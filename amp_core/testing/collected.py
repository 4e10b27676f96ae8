"""The module that pytest collects for `amp_core.testing.check`; not for other use."""

from amp_core.testing.runner import _SUBJECT

TestBackend = _SUBJECT[-1]
