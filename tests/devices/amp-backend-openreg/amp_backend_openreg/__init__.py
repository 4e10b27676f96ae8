"""The amp-core backend of ``openreg`` devices."""
