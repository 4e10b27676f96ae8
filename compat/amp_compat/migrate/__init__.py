"""``amp migrate``: rewrite calls of deprecated mixed-precision names, and report what needs a human.

What is certain is rewritten; what is not stays as it was and is reported with the reason. Nothing here
imports torch, so that worker processes start quickly.
"""
