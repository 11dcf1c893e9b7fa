"""Differential privacy for clients' updates: clipping, noise, and the accounting of epsilon."""

from flsv.privacy.gaussian import GaussianPrivacy, gaussian_epsilon, warn_of_noise

__all__ = ["GaussianPrivacy", "gaussian_epsilon", "warn_of_noise"]
