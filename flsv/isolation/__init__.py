"""Copies of a run's objects, and its program's state and files put back, so that a run can be repeated in its process.

Tier: provisional.
"""
