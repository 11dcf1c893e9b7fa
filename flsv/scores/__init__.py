"""Scores of a model's predictions, as torchmetrics. No module here uses clients, coalitions or contributions."""
