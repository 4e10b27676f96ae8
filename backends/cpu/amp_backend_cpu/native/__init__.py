"""The compiled library of the CPU's kernels, where it was built, and its source."""
