"""Scores of a model's predictions, as torchmetrics metrics. No module here uses clients, coalitions or
contributions.

Tier: provisional.
"""

import lazy_loader

#: Names of the scores that :class:`flsv.scores.class_scores.ClassScores` computes.
OWN_SCORES = ("accuracy", "balanced_accuracy", "auroc")

__getattr__, __dir__, _lazy_names = lazy_loader.attach_stub(__name__, __file__)
__all__ = [*_lazy_names, "OWN_SCORES"]
