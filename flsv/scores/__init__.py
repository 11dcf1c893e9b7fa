"""Scores of a model's predictions, as torchmetrics metrics. No module here uses clients, coalitions or
contributions.

Tier: provisional.
"""
