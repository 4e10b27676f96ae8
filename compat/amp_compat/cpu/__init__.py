"""Mirror of the part of `torch.cpu` that is deprecated."""
