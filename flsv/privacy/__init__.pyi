from .accounting import gaussian_epsilon as gaussian_epsilon
from .gaussian import GaussianPrivacy as GaussianPrivacy, warn_of_noise as warn_of_noise
