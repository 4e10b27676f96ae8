"""The CUDA backend of amp-core. ``hooks`` registers it, ``backend`` says what the device can do."""
