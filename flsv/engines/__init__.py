"""Engines, which run the clients of a federation: in one process, in batches, on several ranks or at remote sites."""
