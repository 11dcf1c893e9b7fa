"""Contributions to rounds that other frameworks, or loops of your own, run.

Tier: provisional.
"""
