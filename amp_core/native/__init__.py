"""Compiled parts of the core. Each has a form in Python that does the same where this one was not built."""
