"""Optimal transport between data sets: distances, the federated protocol, and values of clients and samples. Callers
pass features, which are not computed here.
"""
