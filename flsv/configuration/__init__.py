"""The configuration of a federation, and the identity of a fit. Both are fixed before it starts.

Tier: provisional.
"""
