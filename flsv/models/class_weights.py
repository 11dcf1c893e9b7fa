"""Weights of classes in the loss, for classes of different frequencies."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flsv.utilities.errors import ConfigurationError


def balanced_weights(datamodule: Any, num_classes: int) -> Tensor:
    """Compute class weights ``[M]`` for the loss, inversely proportional to the frequencies."""
    counts = getattr(datamodule, "known_class_counts", None)
    if counts is None or counts.shape[1] != num_classes:
        raise ConfigurationError(
            f"ClassifierClient(class_weights='balanced'): {type(datamodule).__name__} does not say how many samples of "
            f"each class all clients have together. Give {num_classes} numbers that all have agreed upon."
        )
    counts = counts.sum(0).double()
    return torch.where(counts > 0, counts.sum() / (num_classes * counts), 1.0).float()
