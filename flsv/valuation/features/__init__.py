"""Features by which samples are compared: pixels, principal components, and inputs of the classifier head of a backbone
or of the trained model.
"""

from flsv.valuation.features.backbone import Backbone
from flsv.valuation.features.base import FEATURES, PCA, Features, Moments, Penultimate, Pixels, make_features

__all__ = ["FEATURES", "PCA", "Backbone", "Features", "Moments", "Penultimate", "Pixels", "make_features"]
