"""The deprecated names of `torch.cuda.amp` and `torch.cpu.amp`, over amp_core."""
