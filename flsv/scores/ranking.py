"""Scores of class probabilities by name: ``"auroc"``, ``"average_precision"`` and ``"f1"``.

With two classes a score is the score of class 1, the positive class (see :mod:`flsv.data.labels`); the AUROC of
a softmax is the same for both classes. With more classes a score is the mean over the classes that occur, each against
the rest ("macro").
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


def auroc(values: Tensor, labels: Tensor) -> Tensor:
    """Compute the area under the ROC curve of finite values for labels 0 and 1."""
    # Places in [0, 1]: torchmetrics passes other numbers through a sigmoid, which makes ties of large ones.
    return binary_auroc(values.unique(return_inverse=True)[1] / len(values), labels)


#: ``{name: function}``: the function computes a score from probabilities of label 1 ``[N]`` and labels 0 or 1 ``[N]``.
CLASS_SCORES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "auroc": auroc,
    "average_precision": binary_average_precision,
    "f1": binary_f1_score,
}


class ClassScore(Metric):
    """Metric that computes the AUROC, average precision or F1 score of probabilities."""

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
        if labels.is_floating_point() or labels.ndim != 1 or len(labels) != len(probabilities):
            raise ValueError("expected one integer class per sample.")
        if probabilities.ndim > 2:
            raise ValueError("expected a logit per sample, or one for each class.")
        self.probabilities.append(probabilities)
        self.labels.append(labels)

    def compute(self) -> Tensor:
        probabilities, labels = dim_zero_cat(self.probabilities), dim_zero_cat(self.labels)
        if len(occur := labels.unique()) < 2:
            raise ValueError(f"the samples are all of class {int(occur)}, and a score needs two classes.")
        probabilities, score = class_1_probabilities(probabilities, labels), CLASS_SCORES[self.name]
        if probabilities.ndim == 1:
            return score(probabilities, labels)
        if self.name == "f1":
            return multiclass_f1_score(probabilities, labels, num_classes=probabilities.shape[1], average="macro")
        return one_against_rest(score, probabilities, labels)


def one_against_rest(score: Callable[[Tensor, Tensor], Tensor], columns: Tensor, labels: Tensor) -> Tensor:
    """Average a score of each class against the rest over the classes that occur."""
    return torch.stack([score(columns[:, c], (labels == c).long()) for c in labels.unique().tolist()]).mean()


def class_1_probabilities(probabilities: Tensor, labels: Tensor) -> Tensor:
    """Return the probabilities of class 1 if there are two classes, else of all."""
    two = probabilities.ndim == labels.ndim + 1 and probabilities.shape[1] == 2
    return probabilities[:, 1] if two else probabilities
