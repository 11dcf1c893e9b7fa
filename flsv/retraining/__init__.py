"""Training of coalitions' models, during the federation's fit or after it.

Tier: provisional.
"""

from flsv.retraining.retrained_utility import RetrainedUtility

__all__ = ["RetrainedUtility"]
