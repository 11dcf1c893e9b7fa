"""Contributions in rounds that another framework, or a training loop of your own, runs.

Tier: provisional.
"""
