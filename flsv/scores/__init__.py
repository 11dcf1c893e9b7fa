"""Scores of a model's predictions, as torchmetrics metrics. No module here uses clients, coalitions or
contributions.

Tier: provisional.
"""

#: Names of the scores that :class:`flsv.scores.class_scores.ClassScores` computes.
OWN_SCORES = ("accuracy", "balanced_accuracy", "auroc")
