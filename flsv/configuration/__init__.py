"""The configuration of a federation, and the fingerprint of a fit. Both are fixed before it starts.

Tier: provisional.
"""
