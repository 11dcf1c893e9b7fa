"""Optimal transport between data sets: distances, the federated protocol, and values of clients and samples; features
are given, not made, here.
"""
