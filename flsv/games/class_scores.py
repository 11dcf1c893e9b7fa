"""Scores of class probabilities by name: ``"auroc"``, ``"average_precision"`` and ``"f1"``.

With two classes they are those of class 1; with more, the mean over the classes that occur, each against the rest
("macro").
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.functional.classification import (
    binary_auroc,
    binary_average_precision,
    binary_f1_score,
    multiclass_f1_score,
)
from torchmetrics.utilities import dim_zero_cat

#: By the name that stands for it: of one class's probabilities ``[N]`` against 0 and 1.
CLASS_SCORES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "auroc": binary_auroc,
    "average_precision": binary_average_precision,
    "f1": binary_f1_score,
}


class ClassScore(Metric):
    """torchmetrics' score of probabilities ``[B]`` of class 1, or ``[B, M]``, against integer classes ``[B]``; more is
    better. Of more than two classes those that occur count; F1 takes what is most probable, so that a class that is
    predicted and does not occur counts, too, with 0.

    Args:
        name: in ``CLASS_SCORES``.

    Raises:
        ValueError: other shapes, labels that are no integers; in ``compute``, samples that are all of one class.

    Example:
        >>> auroc = ClassScore("auroc")
        >>> auroc.update(torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.7, 0.3]]), torch.tensor([0, 1, 1]))
        >>> auroc.compute()
        tensor(1.)
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False
    probabilities: list[Tensor]
    labels: list[Tensor]

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.add_state("probabilities", [], dist_reduce_fx="cat")
        self.add_state("labels", [], dist_reduce_fx="cat")

    def update(self, probabilities: Tensor, labels: Tensor) -> None:
        """One batch."""
        if labels.is_floating_point() or labels.ndim != 1 or len(labels) != len(probabilities):
            raise ValueError("expected one integer class per sample.")
        if probabilities.ndim > 2:
            raise ValueError("expected a logit per sample, or one for each class.")
        self.probabilities.append(probabilities)
        self.labels.append(labels)

    def compute(self) -> Tensor:
        """The score of all batches."""
        probabilities, labels = dim_zero_cat(self.probabilities), dim_zero_cat(self.labels)
        occur = labels.unique().tolist()
        if len(occur) < 2:
            raise ValueError(f"the samples are all of class {occur[0]}, and two classes are to be told apart.")
        found, score = class_1_probabilities(probabilities, labels), CLASS_SCORES[self.name]
        if found.ndim == 1:
            return score(found, labels)
        if self.name == "f1":
            return multiclass_f1_score(found, labels, num_classes=found.shape[1], average="macro")
        return torch.stack([score(found[:, c], (labels == c).long()) for c in occur]).mean()


def class_1_probabilities(probabilities: Tensor, labels: Tensor) -> Tensor:
    """Of probabilities of two classes ``[B, 2, ...]``, those of class 1 ``[B, ...]``; others as they are.

    Example:
        >>> class_1_probabilities(torch.tensor([[0.8, 0.2]]), torch.tensor([0]))
        tensor([0.2000])
    """
    two = probabilities.ndim == labels.ndim + 1 and probabilities.shape[1] == 2
    return probabilities[:, 1] if two else probabilities
