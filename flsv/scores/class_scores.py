"""Scores of a classifier: accuracy, balanced accuracy, AUROC, average precision and F1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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

from flsv.scores import OWN_SCORES
from flsv.utilities.host_copies import to_host
from flsv.utilities.plain_values import to_three_digits


def auroc(values: Tensor, labels: Tensor) -> Tensor:
    """Compute the area under the ROC curve of finite values for labels 0 and 1."""
    # Ranks in [0, 1]: torchmetrics passes other numbers through a sigmoid, which makes ties of large ones.
    _, ranks = values.unique(return_inverse=True)
    return binary_auroc(ranks / len(values), labels)


#: ``{name: function}``: the function computes a score from probabilities of label 1 ``[N]`` and labels 0 or 1 ``[N]``.
CLASS_SCORES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "auroc": auroc,
    "average_precision": binary_average_precision,
    "f1": binary_f1_score,
}


class ClassScore(Metric):
    """Metric that computes the AUROC, average precision or F1 score of probabilities."""

    # With two classes, the score of class 1, the positive class. With more, the classes' mean score ("macro"), without
    # classes that do not occur.

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
        are_class_numbers = labels.ndim == 1 and not labels.is_floating_point()
        if not are_class_numbers or len(labels) != len(probabilities):
            raise ValueError("expected one integer class per sample.")
        if probabilities.ndim > 2:
            raise ValueError("expected a logit per sample, or one for each class.")
        self.probabilities.append(probabilities)
        self.labels.append(labels)

    def compute(self) -> Tensor:
        labels = dim_zero_cat(self.labels)
        classes = labels.unique()
        if len(classes) < 2:
            raise ValueError(
                f"the samples are all of class {int(classes)}, and a score needs two classes."
            )

        score = CLASS_SCORES[self.name]
        probabilities = class_1_probabilities(dim_zero_cat(self.probabilities), labels)
        if probabilities.ndim == 1:
            return score(probabilities, labels)
        if self.name == "f1":
            num_classes = probabilities.shape[1]
            scores = multiclass_f1_score(
                probabilities, labels, num_classes=num_classes, average="none"
            )
            return scores[classes].mean()  # a class that is only predicted has no samples to score
        return one_against_rest(score, probabilities, labels)


def one_against_rest(
    score: Callable[[Tensor, Tensor], Tensor],
    columns: Tensor,
    labels: Tensor,
) -> Tensor:
    """Average ``score(column, label is this class)`` over the classes that occur, one class against the rest."""
    class_scores = []
    for class_index in labels.unique().tolist():
        is_class = (labels == class_index).long()
        class_scores.append(score(columns[:, class_index], is_class))
    return torch.stack(class_scores).mean()


def class_1_probabilities(probabilities: Tensor, labels: Tensor) -> Tensor:
    """Return the probabilities of class 1 if there are two classes, else of all."""
    has_class_columns = probabilities.ndim == labels.ndim + 1
    if has_class_columns and probabilities.shape[1] == 2:
        return probabilities[:, 1]
    return probabilities


NAN = float("nan")


#: Largest number of classes for which the AUROC is computed, because it needs all logits, sorted for each class.
MAX_RANKED_CLASSES = 100


class ClassScores(Metric):
    """Metric that computes accuracy, balanced accuracy and AUROC of logits ``[B, M]``."""

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
        no_samples = torch.zeros(num_classes, dtype=torch.long)
        self.add_state("correct", no_samples, dist_reduce_fx="sum")
        self.add_state("support", no_samples.clone(), dist_reduce_fx="sum")
        self.add_state("logits", [], dist_reduce_fx="cat")
        self.add_state("labels", [], dist_reduce_fx="cat")

    def update(self, logits: Tensor, y: Tensor) -> None:
        # bincount and boolean indices would make the host wait for the device.
        y = y.long()  # cross_entropy also accepts labels of type uint8
        self.support.index_add_(0, y, torch.ones_like(y))
        is_correct = logits.argmax(dim=1) == y
        self.correct.index_add_(0, y, is_correct.long())
        if self.num_classes <= MAX_RANKED_CLASSES:
            self.logits.append(logits.detach())
            self.labels.append(y)

    def compute(self) -> dict[str, Tensor]:
        """Return the scores as scalars by name."""
        scores, _ = self._scores_and_classes()
        return scores

    def _scores_and_classes(self) -> tuple[dict[str, Tensor], int]:
        """Return the scores by name, and the number of classes, with one copy to the CPU."""
        # Copied to the host at once: each copy waits for the device.
        inputs = [self.correct, self.support]
        if self.logits:
            logits = dim_zero_cat(self.logits)
            inputs += [log_odds(logits), dim_zero_cat(self.labels)]
        correct, support, *auroc_inputs = to_host(inputs)

        occurs = support > 0  # [M]: the classes that have samples
        accuracy = correct.sum() / support.sum()
        scores = {
            "accuracy": accuracy,
            "balanced_accuracy": (correct[occurs] / support[occurs]).mean(),
            "auroc": torch.full_like(accuracy, NAN),
        }
        if auroc_inputs:
            odds, labels = auroc_inputs
            scores["auroc"] = _macro_auroc(odds, labels).to(accuracy)

        device = self.correct.device
        device_scores = {name: score.to(device) for name, score in scores.items()}
        return device_scores, int(occurs.sum())


def macro_auroc(logits: Tensor, labels: Tensor) -> Tensor:
    """Average the AUROC of each class against the rest over the classes that occur.

    Example:
        >>> macro_auroc(torch.tensor([[2.0, 1.0], [1.0, 1.5], [0.0, 1.0]]), torch.tensor([0, 0, 1])).item()
        1.0
    """
    return _macro_auroc(*to_host([log_odds(logits), labels]))


def _macro_auroc(odds: Tensor, labels: Tensor) -> Tensor:
    """Compute :func:`macro_auroc` from log-odds ``[N, M]`` and classes ``[N]`` on the CPU."""
    num_classes = len(labels.unique())
    if num_classes < 2 or odds.isnan().any():
        return torch.tensor(NAN)
    return one_against_rest(auroc, odds, labels)


def log_odds(logits: Tensor) -> Tensor:
    """Compute log(p / (1 - p)), float64 ``[N, M]``, of the softmax probabilities p."""
    logits = logits.detach().double()

    # For the most probable class, 1 - p is the sum of the other classes' probabilities: 1 minus p would lose digits.
    best_class = logits.argmax(1, keepdim=True)
    best_logit = logits.gather(1, best_class)
    other_logits = logits.scatter(1, best_class, -torch.inf)
    log_odds_of_best = best_logit - other_logits.logsumexp(1, keepdim=True)

    # All others have p of at most 1/2.
    log_p = logits.log_softmax(1)
    p = log_p.exp().clamp(max=0.5)
    log_odds_of_others = log_p - torch.log1p(-p)
    return log_odds_of_others.scatter(1, best_class, log_odds_of_best)


def plain_scores(counts: ClassScores) -> dict[str, float]:
    """Return the scores by name, as Python numbers of three digits, NaN before the first batch."""
    if not counts.update_called:
        return dict.fromkeys(OWN_SCORES, NAN)
    scores = counts.compute()
    # As clients tell them, in one process, too.
    return {name: to_three_digits(score.item()) for name, score in scores.items()}


class EpochScores(ClassScores):
    """Metric that computes an epoch's loss and the scores of :class:`ClassScores`."""

    higher_is_better = None  # True of the accuracies, False of the loss

    loss: Tensor
    weight: Tensor

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        self.add_state("loss", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("weight", torch.tensor(0.0), dist_reduce_fx="sum")

    # For mypy: torchmetrics' update takes anything.
    def update(self, logits: Tensor, y: Tensor, loss: Tensor, weight: Tensor | float) -> None:  # type: ignore[override]
        super().update(logits, y)
        self.loss += loss * weight
        self.weight += weight

    def compute(self) -> dict[str, Tensor]:
        """Return the loss and the scores as scalars by name."""
        scores, num_classes = self._scores_and_classes()
        if not self.logits or num_classes < 2:
            del scores["auroc"]
        return {"loss": self.loss / self.weight, **scores}
