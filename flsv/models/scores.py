"""What the evaluation of a classifier reports: loss, accuracy and balanced accuracy, in one pass over the data."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric


class EpochScores(Metric):
    """Loss, accuracy and balanced accuracy of an epoch, from counts per class.

    - ``loss``: sum of the batches' mean losses, each times its weight, over the sum of weights.
    - ``accuracy``: share of samples that are classified correctly.
    - ``balanced_accuracy``: mean over the classes that occur of the share of their samples that are classified
      correctly. torchmetrics' macro accuracy differs where a class does not occur but is predicted: it counts there
      as recall 0. This one is scikit-learn's ``balanced_accuracy_score``.

    Its states are sums and not persistent: they never enter a ``state_dict``.

    Args:
        num_classes: M.

    Example:
        >>> scores = EpochScores(num_classes=3)
        >>> logits = torch.tensor([[2.0, 0, 0], [2, 0, 0], [0, 2, 0], [0, 0, 2]])
        >>> scores.update(logits, torch.tensor([0, 0, 1, 1]), loss=torch.tensor(0.5), weight=4)
        >>> {name: value.item() for name, value in scores.compute().items()}
        {'loss': 0.5, 'accuracy': 0.75, 'balanced_accuracy': 0.75}
    """

    is_differentiable = False
    higher_is_better = None  # the accuracies: yes; the loss: no
    full_state_update = False

    correct: Tensor
    support: Tensor
    loss: Tensor
    weight: Tensor

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.add_state("correct", torch.zeros(num_classes, dtype=torch.long), dist_reduce_fx="sum")
        self.add_state("support", torch.zeros(num_classes, dtype=torch.long), dist_reduce_fx="sum")
        self.add_state("loss", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("weight", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, logits: Tensor, y: Tensor, loss: Tensor, weight: Tensor | float) -> None:
        """Count a batch.

        Args:
            logits: ``[B, M]``.
            y: classes ``[B]``, integers.
            loss: mean loss of the batch, a scalar.
            weight: what that mean was divided by: B, or the sum of the samples' weights.
        """
        # bincount and boolean indices would make the host wait for the device.
        y = y.long()  # cross_entropy takes bytes, too
        self.support.index_add_(0, y, torch.ones_like(y))
        self.correct.index_add_(0, y, (logits.argmax(dim=1) == y).long())
        self.loss += loss * weight
        self.weight += weight

    def compute(self) -> dict[str, Tensor]:
        """Scalars ``loss``, ``accuracy`` and ``balanced_accuracy``; NaN before the first batch."""
        present = self.support > 0
        return {
            "loss": self.loss / self.weight,
            "accuracy": self.correct.sum() / self.support.sum(),
            "balanced_accuracy": (self.correct[present] / self.support[present]).mean(),
        }
