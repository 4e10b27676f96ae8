"""Migrate NVIDIA's ``apex.amp``, removed from apex in May 2025, to `amp_compat.apex` or ``torch.amp``."""
