"""Classes of unequal sizes: scores that the largest class alone does not raise, and weights of classes in the loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.functional.classification import binary_auroc
from torchmetrics.utilities import dim_zero_cat

from flsv.utilities.errors import ConfigurationError

NAN = float("nan")


#: Names of the scores of :class:`ClassScores`, by which clients' own models are scored.
OWN_SCORES = ("accuracy", "balanced_accuracy", "auroc")
#: Largest number of classes for which the AUROC is computed: it keeps all logits and sorts them for each class.
MOST_RANKED = 100


class ClassScores(Metric):
    """Metric of accuracy, balanced accuracy and AUROC of logits ``[B, M]`` for classes ``[B]``.

    - ``accuracy``: share of samples that are classified correctly.
    - ``balanced_accuracy``: mean over the classes that occur of the share of their samples that are classified
      correctly. torchmetrics' macro accuracy differs where a class does not occur but is predicted: it counts there
      as recall 0. This one is scikit-learn's ``balanced_accuracy_score``.
    - ``auroc``: how often a sample of a class is given a larger probability of it than one of another class, the mean
      over the classes that occur. A model that always gives the rarer class a probability below 1/2 may still rank
      both well. NaN where fewer than two classes occur or a logit is NaN, and for more than 100 classes.

    Its states are not persistent: they never enter a ``state_dict``.

    Args:
        num_classes: M.
        options: arguments of ``torchmetrics.Metric``.

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
        """Count a batch.

        Args:
            logits: ``[B, M]``.
            y: classes ``[B]``, integers.
        """
        # bincount and boolean indices would make the host wait for the device.
        y = y.long()  # cross_entropy takes bytes, too
        self.support.index_add_(0, y, torch.ones_like(y))
        self.correct.index_add_(0, y, (logits.argmax(dim=1) == y).long())
        if self.num_classes <= MOST_RANKED:
            self.logits.append(logits.detach())
            self.labels.append(y)

    def compute(self) -> dict[str, Tensor]:
        """Compute the scores, scalars by name; NaN before the first batch."""
        present = self.support > 0
        accuracy = self.correct.sum() / self.support.sum()
        ranked = macro_auroc(dim_zero_cat(self.logits), dim_zero_cat(self.labels)) if self.logits else accuracy * NAN
        return {
            "accuracy": accuracy,
            "balanced_accuracy": (self.correct[present] / self.support[present]).mean(),
            "auroc": ranked.to(accuracy),
        }


def macro_auroc(logits: Tensor, labels: Tensor) -> Tensor:
    """Compute the area under the ROC curve of each class against the rest, averaged over the classes that occur.

    It is NaN where fewer than two classes occur, or a logit is NaN.

    Args:
        logits: ``[N, M]``.
        labels: integer classes ``[N]``.

    Example:
        >>> macro_auroc(torch.tensor([[2.0, 1.0], [1.0, 1.5], [0.0, 1.0]]), torch.tensor([0, 0, 1])).item()
        1.0
    """
    labels, odds = labels.cpu(), log_odds(logits).cpu()
    occur = labels.unique().tolist()
    if len(occur) < 2 or odds.isnan().any():
        return torch.tensor(NAN)
    # Places in [0, 1]: torchmetrics passes other numbers through a sigmoid, which makes ties of large ones.
    places = [odds[:, c].unique(return_inverse=True)[1] / len(odds) for c in occur]
    return torch.stack([binary_auroc(place, (labels == c).int()) for place, c in zip(places, occur)]).mean()


def log_odds(logits: Tensor) -> Tensor:
    """Compute each class's log-odds against all others together, float64 ``[N, M]``, from logits ``[N, M]``.

    They have the order of the softmax's probabilities, and are still distinct where these round to 1.
    """
    logits = logits.detach().double()
    best = logits.argmax(1, keepdim=True)
    others = logits.scatter(1, best, -torch.inf).logsumexp(1, keepdim=True)
    first = logits.gather(1, best) - others
    log_p = logits.log_softmax(1)
    # For all but the most probable class p is at most 1/2, so that 1 - p loses no digits.
    return (log_p - torch.log1p(-log_p.exp().clamp(max=0.5))).scatter(1, best, first)


def plain_scores(counts: ClassScores) -> dict[str, float]:
    """Convert the scores to Python numbers, without a warning where nothing was counted.

    Example:
        >>> plain_scores(ClassScores(2))
        {'accuracy': nan, 'balanced_accuracy': nan, 'auroc': nan}
    """
    if not counts.update_called:
        return dict.fromkeys(OWN_SCORES, NAN)
    return {name: value.item() for name, value in counts.compute().items()}


class EpochScores(ClassScores):
    """Metric of an epoch: :class:`ClassScores` without an undefined AUROC, and the loss.

    The loss is the sum of the batches' mean losses, each times its weight, over the sum of weights.

    Args:
        num_classes: M.

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
        """Count a batch.

        Args:
            logits: ``[B, M]``.
            y: classes ``[B]``, integers.
            loss: mean loss of the batch, a scalar.
            weight: divisor of that mean: B, or the sum of the samples' weights.
        """
        super().update(logits, y)
        self.loss += loss * weight
        self.weight += weight

    def compute(self) -> dict[str, Tensor]:
        """Compute scalars by name: ``loss``, ``accuracy``, ``balanced_accuracy`` and, where at least two of at most 100
        classes occur, ``auroc``."""
        scores = {"loss": self.loss / self.weight, **super().compute()}
        if not self.logits or int((self.support > 0).sum()) < 2:
            del scores["auroc"]
        return scores


def balanced_weights(datamodule: Any, num_classes: int) -> Tensor:
    """Compute a weight for each class, float32 ``[M]``: N / (M N_c) with N_c of N training samples; 1 where N_c is 0.

    Raises:
        ConfigurationError: the data module does not know its clients' ``class_counts``, as where data are at sites.

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
