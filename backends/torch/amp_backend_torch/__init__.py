"""Backends for devices that torch supports itself, with facts that torch does not expose."""
