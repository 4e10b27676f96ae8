"""Mirror of the part of `torch.cuda` that is deprecated."""
