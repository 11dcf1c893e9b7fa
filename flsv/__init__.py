"""Federated learning on PyTorch Lightning in which every participant's contribution is measured while it happens."""

__version__ = "0.1.0"
