"""Regions: `autocast`, its decorator, `disable`, `custom_fwd` and `custom_bwd`."""

from amp_core.regions import graphs  # noqa: F401  # registers regions with Dynamo
