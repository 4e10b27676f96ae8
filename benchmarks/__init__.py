"""Every figure that amp-core claims, as a ratio against torch.amp measured in the same process."""
