"""Classification: counts of correct predictions and cross-entropies of several classifiers, batch by batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flsv.games.validation_batches import checked_logits
from flsv.utilities.host_copies import to_host


class Classification:
    """Counts of correct predictions and the mean cross-entropies of c models. :meth:`update` does not wait for a GPU.

    Args:
        num_models: c.
        support: int64 ``[M]``, the number of samples of each class in all batches.
        device: the device of the logits.
    """

    def __init__(
        self,
        num_models: int,
        support: Tensor,
        device: torch.device,
    ) -> None:
        self._support = support
        self._num_models = num_models
        shape = num_models, len(support)
        self._correct = torch.zeros(shape, dtype=torch.int64, device=device)
        self._losses: list[Tensor] = []  # for each batch, the sum of each model's losses [c]

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add a batch: the models' logits ``[c, B, M]`` for the labels ``[B]``."""
        checked_logits(logits[0], labels, len(self._support))
        largest, predicted = logits.max(-1)
        # torch's max takes NaN for the largest number, but a model whose logits are NaN predicts no class.
        is_number = largest == largest  # False for NaN
        is_correct = (predicted == labels) & is_number
        # Add each sample's 0 or 1 to the column of its class.
        self._correct.index_add_(1, labels, is_correct.long())
        self._losses.append(losses_of(logits, labels))

    def compute(self) -> dict[str, Tensor]:
        """Return ``"correct"``, int64 ``[c, M]``, and ``"loss"``, float64 ``[c]``, on the CPU."""
        tensors = to_host([self._correct, *self._losses])
        correct = tensors[0]
        losses_by_batch = tensors[1:]
        total_losses = torch.zeros(self._num_models, dtype=torch.float64)
        # One batch after the other: the rounding of sum() depends on the number of models.
        for batch_losses in losses_by_batch:
            total_losses += batch_losses.double()
        return {"correct": correct, "loss": total_losses / self._support.sum()}


class SortedLabels:
    """Labels of V samples in the order of their classes, against which the outputs of many models are compared.

    Args:
        labels: int64 ``[V]``.
        num_classes: M.

    Attributes:
        order: int64 ``[V]``, the samples in the order of their classes.
    """

    def __init__(self, labels: Tensor, num_classes: int) -> None:
        self.order = labels.argsort(stable=True)
        self._labels = labels[self.order]
        self._support = torch.bincount(labels, minlength=num_classes).tolist()

    def counts(self, logits: Tensor) -> Tensor:
        """Count the correct predictions of each class by c models, from their ``logits [c, V, M]`` for the sorted
        samples, int64 ``[c, M]``.
        """
        counts = [hits.sum(1) for hits in self._hits_by_class(logits)]
        return torch.stack(counts, 1)

    def hits(self, logits: Tensor) -> Tensor:
        """Return which predictions are correct for the sorted samples, bool ``[c, V]``."""
        return torch.cat(self._hits_by_class(logits), 1)

    def losses(self, logits: Tensor) -> Tensor:
        """Return each model's cross-entropy for each of the sorted samples, ``[c, V]``."""
        labels = self._labels.expand(len(logits), -1)
        return F.cross_entropy(logits.movedim(-1, 1), labels, reduction="none")

    def _hits_by_class(self, logits: Tensor) -> list[Tensor]:
        parts = logits.movedim(-1, 1).split(self._support, dim=2)  # [c, M, samples of a class]
        return [are_predicted(label, part) for label, part in enumerate(parts)]


def are_predicted(label: int, logits: Tensor) -> Tensor:
    """Return whether models with the logits ``[c, M, B]`` predict the class ``label``, bool ``[c, B]``.

    The first class with the largest logit is predicted. None is if a logit is NaN.
    """
    logits_of_label = logits[:, label]
    is_predicted = logits_of_label == logits_of_label  # False for NaN
    # The largest logit of other classes is NaN if one of them is, and no number is larger than or equal to NaN.
    if label > 0:
        is_predicted &= logits_of_label > logits[:, :label].amax(1)
    if label + 1 < logits.shape[1]:
        is_predicted &= logits_of_label >= logits[:, label + 1 :].amax(1)
    return is_predicted


def losses_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum each model's cross-entropy over a batch, ``[c]``."""
    is_half = logits.dtype in (torch.bfloat16, torch.float16)
    if is_half:
        logits = logits.float()
    num_models = len(logits)
    flat_logits = logits.flatten(0, 1)  # [c * B, M]
    repeated_labels = labels.repeat(num_models)
    losses = F.cross_entropy(flat_logits, repeated_labels, reduction="none")
    losses = losses.view(num_models, -1)
    dtype = double_dtype(logits.device)
    return losses.sum(-1, dtype=dtype)


def double_dtype(device: torch.device) -> torch.dtype:
    """Return float64 where the device has it, else float32."""
    return torch.float32 if device.type == "mps" else torch.float64
