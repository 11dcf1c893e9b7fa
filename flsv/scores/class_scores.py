"""Scores of a classifier, which also suit imbalanced classes: accuracy, balanced accuracy and AUROC."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from flsv.scores.ranking import auroc, one_against_rest
from flsv.utilities.host_copies import to_host

NAN = float("nan")


#: Names of the scores that :class:`ClassScores` computes.
OWN_SCORES = ("accuracy", "balanced_accuracy", "auroc")
#: Largest number of classes for which the AUROC is computed, because it needs all logits, sorted for each class.
MOST_RANKED = 100


class ClassScores(Metric):
    """Metric that computes accuracy, balanced accuracy and AUROC of logits ``[B, M]`` for classes ``[B]``.

    - ``accuracy``: share of samples that are classified correctly.
    - ``balanced_accuracy``: the share of a class's samples that are classified correctly, averaged over the classes
      that occur, as scikit-learn's ``balanced_accuracy_score``. torchmetrics' macro accuracy also includes a class that
      does not occur but is predicted, with recall 0.
    - ``auroc``: the probability that a sample of a class gets a larger probability for this class than a sample of
      another class, averaged over the classes that occur. A model that always gives the rarer class a probability
      below 1/2 may still have a high AUROC. The AUROC is NaN if fewer than two classes occur, if a logit is NaN, and
      for more than 100 classes.

    The states are not persistent: they are never part of a ``state_dict``.

    Args:
        num_classes: number of classes M.
        options: keyword arguments of ``torchmetrics.Metric``.

    Example:
        >>> scores = ClassScores(num_classes=3)
        >>> scores.update(torch.tensor([[2.0, 0, 0], [2, 0, 0], [0, 2, 0], [0, 0, 2]]), torch.tensor([0, 0, 1, 1]))
        >>> {name: value.item() for name, value in scores.compute().items()}
        {'accuracy': 0.75, 'balanced_accuracy': 0.75, 'auroc': 0.875}
    """

    is_differentiable = False
    higher_is_better: bool | None = True
    full_state_update = False

    correct: Tensor
    support: Tensor
    logits: list[Tensor]
    labels: list[Tensor]

    def __init__(self, num_classes: int, **options: Any) -> None:
        super().__init__(**options)
        self.num_classes = num_classes
        self.add_state("correct", torch.zeros(num_classes, dtype=torch.long), dist_reduce_fx="sum")
        self.add_state("support", torch.zeros(num_classes, dtype=torch.long), dist_reduce_fx="sum")
        self.add_state("logits", [], dist_reduce_fx="cat")
        self.add_state("labels", [], dist_reduce_fx="cat")

    def update(self, logits: Tensor, y: Tensor) -> None:
        """Add a batch to the scores.

        Args:
            logits: logits of the batch, ``[B, M]``.
            y: classes of the samples, integers ``[B]``.
        """
        # bincount and boolean indices would make the host wait for the device.
        y = y.long()  # cross_entropy also accepts labels of type uint8
        self.support.index_add_(0, y, torch.ones_like(y))
        self.correct.index_add_(0, y, (logits.argmax(dim=1) == y).long())
        if self.num_classes <= MOST_RANKED:
            self.logits.append(logits.detach())
            self.labels.append(y)

    def compute(self) -> dict[str, Tensor]:
        """Return the scores as scalars by name; NaN before the first batch."""
        return self._from_host()[0]

    def _from_host(self) -> tuple[dict[str, Tensor], int]:
        """Return the scores by name, and the number of classes that occur; copy all numbers to the CPU at once."""
        ranked = [log_odds(dim_zero_cat(self.logits)), dim_zero_cat(self.labels)] if self.logits else []
        correct, support, *ranked = to_host([self.correct, self.support, *ranked])
        present = support > 0
        accuracy = correct.sum() / support.sum()
        scores = {
            "accuracy": accuracy,
            "balanced_accuracy": (correct[present] / support[present]).mean(),
            "auroc": (_macro_auroc(*ranked) if ranked else accuracy * NAN).to(accuracy),
        }
        return {name: score.to(self.correct.device) for name, score in scores.items()}, int(present.sum())


def macro_auroc(logits: Tensor, labels: Tensor) -> Tensor:
    """Compute the area under the ROC curve of each class against the rest, averaged over the classes that occur.

    The result is NaN if fewer than two classes occur, or a logit is NaN.

    Args:
        logits: logits of all samples, ``[N, M]``.
        labels: classes of all samples, integers ``[N]``.

    Example:
        >>> macro_auroc(torch.tensor([[2.0, 1.0], [1.0, 1.5], [0.0, 1.0]]), torch.tensor([0, 0, 1])).item()
        1.0
    """
    return _macro_auroc(*to_host([log_odds(logits), labels]))


def _macro_auroc(odds: Tensor, labels: Tensor) -> Tensor:
    """Compute :func:`macro_auroc` from log-odds ``[N, M]`` and classes ``[N]`` on the CPU."""
    if len(labels.unique()) < 2 or odds.isnan().any():
        return torch.tensor(NAN)
    return one_against_rest(auroc, odds, labels)


def log_odds(logits: Tensor) -> Tensor:
    """Compute the log-odds log(p / (1 - p)), float64 ``[N, M]``, of the classes' softmax probabilities p.

    They have the same order as the probabilities, and stay distinct where probabilities round to 1."""
    logits = logits.detach().double()
    best = logits.argmax(1, keepdim=True)
    others = logits.scatter(1, best, -torch.inf).logsumexp(1, keepdim=True)
    first = logits.gather(1, best) - others
    log_p = logits.log_softmax(1)
    # For all but the most probable class p is at most 1/2, so that 1 - p loses no digits.
    return (log_p - torch.log1p(-log_p.exp().clamp(max=0.5))).scatter(1, best, first)


def plain_scores(counts: ClassScores) -> dict[str, float]:
    """Return the scores of ``counts``, a metric, as Python numbers by name; before its first batch they are NaN,
    without the warning of torchmetrics.

    Example:
        >>> plain_scores(ClassScores(2))
        {'accuracy': nan, 'balanced_accuracy': nan, 'auroc': nan}
    """
    if not counts.update_called:
        return dict.fromkeys(OWN_SCORES, NAN)
    return {name: value.item() for name, value in counts.compute().items()}


class EpochScores(ClassScores):
    """Metric that computes an epoch's loss and the scores of :class:`ClassScores`, the AUROC only if it is defined.

    The loss is the weighted mean of the batches' mean losses.

    Args:
        num_classes: number of classes M.

    Example:
        >>> scores = EpochScores(num_classes=3)
        >>> logits = torch.tensor([[2.0, 0, 0], [2, 0, 0], [0, 2, 0], [0, 0, 2]])
        >>> scores.update(logits, torch.tensor([0, 0, 0, 0]), loss=torch.tensor(0.5), weight=4)
        >>> {name: value.item() for name, value in scores.compute().items()}
        {'loss': 0.5, 'accuracy': 0.5, 'balanced_accuracy': 0.5}
    """

    higher_is_better = None  # True of the accuracies, False of the loss

    loss: Tensor
    weight: Tensor

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        self.add_state("loss", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("weight", torch.tensor(0.0), dist_reduce_fx="sum")

    # For mypy: torchmetrics' update takes anything.
    def update(self, logits: Tensor, y: Tensor, loss: Tensor, weight: Tensor | float) -> None:  # type: ignore[override]
        """Add a batch to the scores.

        Args:
            logits: logits of the batch, ``[B, M]``.
            y: classes of the samples, integers ``[B]``.
            loss: mean loss of the batch, a scalar.
            weight: weight of the batch: the number of samples B, or the sum of the samples' weights in the loss.
        """
        super().update(logits, y)
        self.loss += loss * weight
        self.weight += weight

    def compute(self) -> dict[str, Tensor]:
        """Return scalars by name: ``loss``, ``accuracy``, ``balanced_accuracy`` and, if there are at most 100 classes
        of which two or more occur, ``auroc``."""
        scores, occurring = self._from_host()
        if not self.logits or occurring < 2:
            del scores["auroc"]
        return {"loss": self.loss / self.weight, **scores}
