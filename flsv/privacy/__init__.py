"""Differential privacy for updates, its accounting, and the gradient-inversion attack that it defends against."""

from flsv.privacy.accounting import gaussian_epsilon
from flsv.privacy.gaussian import GaussianPrivacy
from flsv.privacy.inversion import Inversion, invert_gradient
from flsv.privacy.notice import warn_of_noise

__all__ = ["GaussianPrivacy", "Inversion", "gaussian_epsilon", "invert_gradient", "warn_of_noise"]
