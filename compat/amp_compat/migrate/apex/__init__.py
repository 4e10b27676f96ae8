"""NVIDIA apex's amp, which apex deleted in May 2025: to `amp_compat.apex`, or to torch.amp."""
