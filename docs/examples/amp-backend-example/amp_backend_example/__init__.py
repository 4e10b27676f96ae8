"""``npy``, a device whose memory is NumPy arrays, and its amp-core backend."""
