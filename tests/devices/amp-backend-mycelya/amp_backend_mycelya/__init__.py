"""The amp-core backend of ``mycelya`` devices."""
