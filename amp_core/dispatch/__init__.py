"""Apply an `OpPolicy` on torch's Autocast dispatch keys.

If the policy equals the one compiled into torch, amp-core adds no cost per op.
"""
