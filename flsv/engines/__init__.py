"""Engines, which train the clients of a federation and run requests on the clients' data.

Tier: provisional.
"""
