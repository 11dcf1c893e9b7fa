"""Weights of classes in the loss, for classes of different frequencies."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flsv.utilities.errors import ConfigurationError


def balanced_weights(datamodule: Any, num_classes: int) -> Tensor:
    """Compute class weights for the loss, float32 ``[M]``, inversely proportional to the classes' frequencies.

    With M classes and N training samples of all clients together, of which N_c are of class c, the weight of class c is
    N / (M N_c), or 1 if N_c is 0.

    Args:
        datamodule: data module with the attribute ``known_class_counts``, int64 ``[num_clients, M]``.
        num_classes: number of classes M.

    Raises:
        ConfigurationError: the data module does not know the clients' class counts, for example because the data are at
            other sites.

    Example:
        >>> from types import SimpleNamespace
        >>> balanced_weights(SimpleNamespace(known_class_counts=torch.tensor([[6, 1], [3, 0]])), 2)
        tensor([0.5556, 5.0000])
    """
    counts = getattr(datamodule, "known_class_counts", None)
    if counts is None or counts.shape[1] != num_classes:
        raise ConfigurationError(
            f"ClassifierClient(class_weights='balanced'): {type(datamodule).__name__} does not say how many samples of "
            f"each class all clients have together. Give {num_classes} numbers that all have agreed upon."
        )
    counts = counts.sum(0).double()
    return torch.where(counts > 0, counts.sum() / (num_classes * counts), 1.0).float()
