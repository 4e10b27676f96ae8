"""Helpers for every layer: call sites, containers, device types, environment variables."""
