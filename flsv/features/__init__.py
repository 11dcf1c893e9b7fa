"""Features in which samples are compared: pixels, principal components, a backbone's, or the model's own."""

from flsv.features.backbone import Backbone
from flsv.features.base import FEATURES, PCA, Features, Moments, Penultimate, Pixels, make_features

__all__ = ["FEATURES", "PCA", "Backbone", "Features", "Moments", "Penultimate", "Pixels", "make_features"]
