"""Base of the packaged modules: optimizer and schedule, and the scores of an epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torchmetrics import Metric

from flsv.errors import ConfigurationError


def optimizer_and_scheduler(
    make_optimizer: Callable[[Any], Optimizer], make_scheduler: Callable[[Optimizer], Any] | None, parameters: Iterable
) -> tuple[Optimizer, Any]:
    """Both, the schedule None where there is none.

    Raises:
        ConfigurationError: torch refuses an option of theirs.

    Example:
        >>> import torch
        >>> from functools import partial
        >>> optimizer_and_scheduler(partial(torch.optim.SGD, lr=-1.0), None, [torch.zeros(1)])
        Traceback (most recent call last):
        ...
        flsv.errors.ConfigurationError: the optimizer cannot be made: Invalid learning rate: -1.0. Change its options.
    """
    what = "optimizer"
    try:
        optimizer = make_optimizer(parameters)
        what = "learning-rate schedule"
        return optimizer, None if make_scheduler is None else make_scheduler(optimizer)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"the {what} cannot be made: {error}. Change its options.") from error


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
