"""Devices that torch serves itself: what amp-core needs to know of them and torch does not tell."""
