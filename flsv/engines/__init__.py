"""Engines, which run the clients of a federation: in one process, in batches, on several ranks or at remote sites;
nothing that values or aggregates what they send.
"""
