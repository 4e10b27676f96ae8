"""What every layer may use: call sites, containers, device types, environment variables."""
