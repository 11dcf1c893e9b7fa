"""A Lightning project, federated."""
