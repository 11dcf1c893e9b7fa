"""Results of a run: its table, and the sinks that store or show it while the run goes on.

Tier: provisional.
"""
