"""Optimal transport between data sets: distances, the federated protocol, and values of clients and samples. Callers
pass features. This package computes none.
"""
