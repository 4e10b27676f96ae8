"""The parts of `GradScaler`: which gradients an optimizer has, and what is remembered of a step."""
