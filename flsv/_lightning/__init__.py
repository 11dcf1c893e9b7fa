"""Code that uses private interfaces of Lightning, which any release may change. It does not depend on contributions.

Tier: provisional.
"""
