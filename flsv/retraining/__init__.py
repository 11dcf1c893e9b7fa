"""Training of coalitions' models: during the federation's fit, or after it, side by side or one after the other; no
estimator of values from them.
"""

from flsv.retraining.retrained_utility import RetrainedUtility

__all__ = ["RetrainedUtility"]
