"""Scores of a model's predictions, as torchmetrics; nothing that knows clients, coalitions or contributions."""
