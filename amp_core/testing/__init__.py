"""The conformance kit: behaviour that every backend must show, for makers of devices to inherit."""
