"""The module that pytest collects for `amp_core.testing.check` and ``--amp-device``; not for other use."""

from amp_core.testing.runner import SUBJECTS

globals().update(SUBJECTS[-1])
