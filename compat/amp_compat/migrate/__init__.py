"""``amp migrate``: rewrite deprecated mixed-precision calls and report those to rewrite by hand.

It rewrites only unambiguous code; anything else stays unchanged and is reported with a reason. Nothing here
imports torch, so worker processes start quickly.
"""
