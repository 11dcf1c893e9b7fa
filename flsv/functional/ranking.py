"""How well a classifier's outputs rank the samples of each class before all others: the macro AUROC.

The area under the receiver operating characteristic is the chance that a sample of the class has a larger score than
one of another class, ties counting half (Hanley, McNeil, "The meaning and use of the area under a receiver operating
characteristic (ROC) curve", Radiology 143, 1982), and so follows from the samples' ranks (Mann, Whitney, "On a test of
whether one of two random variables is stochastically larger than the other", Annals of Mathematical Statistics 18,
1947).
"""

from __future__ import annotations

import torch
from scipy.stats import rankdata
from torch import Tensor


def log_odds(logits: Tensor) -> Tensor:
    """Of logits ``[N, M]`` the log-odds ``[N, M]``, float64, of each class against all others together.

    They are in the order of the softmax's probabilities, and still apart where these round to 1.

    Example:
        >>> log_odds(torch.tensor([[80.0, 0.0], [81.0, 0.0]])).tolist()
        [[80.0, -80.0], [81.0, -81.0]]
    """
    logits = logits.detach().double()
    best = logits.argmax(1, keepdim=True)
    others = logits.scatter(1, best, -torch.inf).logsumexp(1, keepdim=True)
    first = logits.gather(1, best) - others
    log_p = logits.log_softmax(1)
    # Of all but the most probable class p is at most 1/2: nothing is lost in 1 - p.
    return (log_p - torch.log1p(-log_p.exp().clamp(max=0.5))).scatter(1, best, first)


def macro_auroc(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean over the classes that occur of the area under the ROC curve of each against the rest.

    Of two classes both areas are the same: class 1's.

    Args:
        logits: ``[N, M]``; or anything that is in their order in each column, through :func:`log_odds`.
        labels: integer classes ``[N]`` in 0 .. M-1.

    Returns:
        A float64 scalar in [0, 1] on the CPU; NaN where fewer than two classes occur, or a logit is NaN.

    Example:
        >>> macro_auroc(torch.tensor([[2.0, 1.0], [1.0, 1.5], [0.0, 1.0]]), torch.tensor([0, 0, 1])).item()
        1.0
    """
    labels = labels.cpu().long()
    occur = labels.unique()
    if len(occur) < 2:
        return torch.tensor(float("nan"), dtype=torch.float64)
    scores = log_odds(logits).cpu()[:, occur]
    ranks = torch.from_numpy(rankdata(scores.numpy(), axis=0))
    of_class = labels[:, None] == occur
    count = of_class.sum(0).double()
    larger = (ranks * of_class).sum(0) - count * (count + 1) / 2
    return (larger / (count * (len(labels) - count))).mean()
