"""Classes of unequal sizes: scores that a model cannot reach by the largest class alone, and weights for the others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.functional.classification import binary_auroc
from torchmetrics.utilities import dim_zero_cat

from flsv.errors import ConfigurationError


class EpochScores(Metric):
    """Loss, accuracy and balanced accuracy of an epoch, from counts per class; of two classes the AUROC, too.

    - ``loss``: sum of the batches' mean losses, each times its weight, over the sum of weights.
    - ``accuracy``: share of samples that are classified correctly.
    - ``balanced_accuracy``: mean over the classes that occur of the share of their samples that are classified
      correctly. torchmetrics' macro accuracy differs where a class does not occur but is predicted: it counts there
      as recall 0. This one is scikit-learn's ``balanced_accuracy_score``.
    - ``auroc``, of two classes that both occur: how often a sample of class 1 has a larger logit for it than one of
      class 0 has. A model that always gives the rarer class a probability below 1/2 may still tell the two apart.

    Its states are not persistent: they never enter a ``state_dict``.

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
    margins: list[Tensor]
    labels: list[Tensor]

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.add_state("correct", torch.zeros(num_classes, dtype=torch.long), dist_reduce_fx="sum")
        self.add_state("support", torch.zeros(num_classes, dtype=torch.long), dist_reduce_fx="sum")
        self.add_state("loss", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("weight", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("margins", [], dist_reduce_fx="cat")
        self.add_state("labels", [], dist_reduce_fx="cat")

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
        if self.num_classes == 2:
            self.margins.append(logits[:, 1] - logits[:, 0])
            self.labels.append(y)

    def compute(self) -> dict[str, Tensor]:
        """Scalars ``loss``, ``accuracy``, ``balanced_accuracy``, NaN before the first batch, and ``auroc`` if both of
        two classes occur."""
        present = self.support > 0
        both = self.num_classes == 2 and bool(present.all())
        return {
            "loss": self.loss / self.weight,
            "accuracy": self.correct.sum() / self.support.sum(),
            "balanced_accuracy": (self.correct[present] / self.support[present]).mean(),
            **({"auroc": self._auroc()} if both else {}),
        }

    def _auroc(self) -> Tensor:
        # By order: probabilities would round large margins to 1, all alike.
        places = dim_zero_cat(self.margins).cpu().unique(return_inverse=True)[1].double()
        return binary_auroc(places / len(places), dim_zero_cat(self.labels).cpu()).to(self.loss)


def balanced_weights(datamodule: Any, num_classes: int) -> Tensor:
    """A weight for each class, float32 ``[M]``: N / (M N_c) with N_c of all N training samples; 1 where there is none.

    Raises:
        ConfigurationError: the data module does not know its clients' ``class_counts``, as where they are at sites.

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
