"""Optimal transport between data sets given by features: distances, the federated protocol, and values of clients and
samples.
"""
