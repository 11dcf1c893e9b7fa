"""Scores of class probabilities by name: ``"auroc"``, ``"average_precision"``, ``"f1"``.

Of two classes they are class 1's; of more, the mean over the classes that occur, each against the rest ("macro").
"""

from __future__ import annotations

from abc import ABC, abstractmethod
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


class ClassScore(Metric, ABC):
    """A score of probabilities ``[B]`` of class 1, or ``[B, M]``, against integer classes ``[B]``; more is better.

    Raises:
        ValueError: other shapes, or labels that are no integers.
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False
    probabilities: list[Tensor]
    labels: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
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
        """The score of all batches.

        Raises:
            ValueError: the samples are all of one class.
        """
        probabilities, labels = dim_zero_cat(self.probabilities), dim_zero_cat(self.labels)
        if len(labels.unique()) < 2:
            raise ValueError(f"the samples are all of class {int(labels[0])}, and two classes are to be told apart.")
        return self.score(class_1(probabilities, labels), labels)

    @abstractmethod
    def score(self, probabilities: Tensor, labels: Tensor) -> Tensor:
        """The score of ``[N]``, or of ``[N, M]`` with M > 2."""


class AUROC(ClassScore):
    """Area under the receiver operating characteristic.

    Example:
        >>> auroc = AUROC()
        >>> auroc.update(torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.7, 0.3]]), torch.tensor([0, 1, 1]))
        >>> auroc.compute()
        tensor(1.)
    """

    def score(self, probabilities: Tensor, labels: Tensor) -> Tensor:
        return _one_against_the_rest(binary_auroc, probabilities, labels)


class AveragePrecision(ClassScore):
    """Area under the curve of precision and recall, as steps."""

    def score(self, probabilities: Tensor, labels: Tensor) -> Tensor:
        return _one_against_the_rest(binary_average_precision, probabilities, labels)


class F1(ClassScore):
    """Harmonic mean of precision and recall of what is most probable; of two classes that of class 1."""

    def score(self, probabilities: Tensor, labels: Tensor) -> Tensor:
        if probabilities.ndim == 1:
            return binary_f1_score(probabilities, labels)
        return multiclass_f1_score(probabilities, labels, num_classes=probabilities.shape[1], average="macro")


#: By the name that stands for it.
CLASS_SCORES: dict[str, type[ClassScore]] = {"auroc": AUROC, "average_precision": AveragePrecision, "f1": F1}


def class_1(probabilities: Tensor, labels: Tensor) -> Tensor:
    """Of probabilities of two classes ``[B, 2, ...]``, those of class 1 ``[B, ...]``; others as they are.

    Example:
        >>> class_1(torch.tensor([[0.8, 0.2]]), torch.tensor([0]))
        tensor([0.2000])
    """
    two = probabilities.ndim == labels.ndim + 1 and probabilities.shape[1] == 2
    return probabilities[:, 1] if two else probabilities


def is_binary(metric: Metric) -> bool:
    """Whether it is one of torchmetrics' for two classes, which take one number per sample."""
    return type(metric).__module__.startswith("torchmetrics.classification") and type(metric).__name__.startswith("Bin")


def update_by_logits(metric: Metric, logits: Tensor, y: Tensor) -> None:
    """Give a metric a batch's logits ``[B, M]`` and classes ``[B]``; of two, one for two classes is given class 1's."""
    metric.update(class_1(logits.softmax(1), y) if is_binary(metric) else logits, y)


def _one_against_the_rest(of: Callable[[Tensor, Tensor], Tensor], probabilities: Tensor, labels: Tensor) -> Tensor:
    if probabilities.ndim == 1:
        return of(probabilities, labels)
    return torch.stack([of(probabilities[:, c], (labels == c).long()) for c in labels.unique().tolist()]).mean()
