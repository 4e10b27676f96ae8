"""Loss scaling: `GradScaler` and the parts that it is composed of."""
