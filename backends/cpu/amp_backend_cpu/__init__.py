"""The CPU backend of amp-core. ``hooks`` registers it; ``backend`` describes the device."""
