"""Regions: `autocast`, its decorator, `disable`, `custom_fwd` and `custom_bwd`."""
