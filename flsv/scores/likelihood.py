"""MeanLogLikelihood: the mean log-probability of labels, such as the tokens of a text."""

from __future__ import annotations

from torch import Tensor
from torchmetrics import MeanMetric


class MeanLogLikelihood(MeanMetric):
    """Mean log-probability of the labels, in nats. The module's ``forward(x)`` must return each label's
    log-probability.

    A language model's ``forward(tokens)`` gives ``[B, L - 1]``, each token's log-probability given those before, and
    the labels are ``tokens[:, 1:]``. Outputs of coalitions that were not trained are predicted from these numbers, not
    from logits of a whole vocabulary.

    Args:
        ignore_index: labels of this value do not count.

    Example:
        >>> import torch
        >>> metric = MeanLogLikelihood()
        >>> metric.update(torch.tensor([[-1.0, -3.0, -9.0]]), torch.tensor([[5, 7, -100]]))
        >>> metric.compute()
        tensor(-2.)
    """

    higher_is_better = True  # type: ignore[assignment]  # torchmetrics declares None

    def __init__(self, ignore_index: int = -100) -> None:
        super().__init__()
        self.ignore_index = ignore_index

    def update(self, log_probabilities: Tensor, labels: Tensor) -> None:  # type: ignore[override]
        if log_probabilities.shape != labels.shape or (log_probabilities > 0).any():
            raise ValueError(
                "expected log-probabilities, which are not positive, of the labels' shape."
            )
        super().update(log_probabilities[labels != self.ignore_index])
