"""How far a client's label distribution is from a reference.

Guo et al., "A Fair Contribution Measurement Method for Federated Learning", Sensors 24(15), 2024, equation 5 (the
Kullback-Leibler divergence, from the uniform distribution). The Euclidean distance and other references are those of
Ye et al., "FedDisco: Federated Learning with Discrepancy-Aware Collaboration", ICML 2023, whose weights Guo's follow.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Divergence = Literal["kl", "l2"]


def label_divergence(
    class_counts: Tensor, kind: Divergence = "kl", reference: Literal["uniform", "global"] | Tensor = "uniform"
) -> Tensor:
    """The divergence of label distributions from a reference.

    Args:
        class_counts: ``[M]``, one client's samples of each class, or ``[n, M]``, everybody's; each client needs one.
        kind: ``"kl"``, sum_j p_j log(p_j / q_j) in nats, with 0 log 0 = 0; or ``"l2"``, the Euclidean distance.
        reference: q: ``"uniform"``, 1/M; ``"global"``, the label distribution of all clients of ``class_counts [n, M]``
            together; or counts or probabilities ``[M]`` of your own, such as the whole federation's counts.

    Returns:
        float64 ``[]`` or ``[n]``, at least 0. Against the uniform distribution at most log M (``"kl"``) or
        sqrt(1 - 1/M) (``"l2"``), which is that of a client with a single class.

    Raises:
        ValueError: another kind or reference, shapes that do not fit, a client or a reference without samples, negative
            counts, ``"kl"`` from a reference without a class that a client has (it would be infinite).

    Example:
        >>> label_divergence(torch.tensor([[5, 5, 5, 5], [10, 10, 0, 0], [20, 0, 0, 0]]))
        tensor([0.0000, 0.6931, 1.3863], dtype=torch.float64)
        >>> label_divergence(torch.tensor([10, 10, 0, 0]), "l2", torch.tensor([2, 1, 1, 0]))
        tensor(0.3536, dtype=torch.float64)
    """
    if kind not in ("kl", "l2"):
        raise ValueError(f'label_divergence(kind={kind!r}): expected "kl" or "l2".')
    if class_counts.ndim not in (1, 2) or class_counts.shape[-1] == 0:
        raise ValueError(f"expected class_counts [M] or [n, M], got {list(class_counts.shape)}.")
    p = _distributions(class_counts, "class_counts")
    classes = class_counts.shape[-1]
    if isinstance(reference, Tensor):
        if reference.shape != (classes,):
            raise ValueError(f"expected reference [{classes}], as many as classes, got {list(reference.shape)}.")
        q = _distributions(reference, "reference").to(p.device)
    elif reference == "global":
        if class_counts.ndim != 2:
            raise ValueError(
                'label_divergence(reference="global") needs the class_counts [n, M] of all clients; for a single one, '
                "give the federation's counts as reference [M]."
            )
        q = _distributions(class_counts.sum(0), "class_counts")
    elif reference == "uniform":
        q = torch.full((classes,), 1 / classes, dtype=torch.float64, device=p.device)
    else:
        raise ValueError(f'label_divergence(reference={reference!r}): expected "uniform", "global" or a tensor [M].')
    if kind == "l2":
        return (p - q).norm(dim=-1)
    if ((p > 0) & (q == 0)).any():
        raise ValueError(
            'label_divergence(kind="kl"): a client has a class that the reference has not, so that its divergence is '
            'infinite. Use kind="l2" or a reference with all classes.'
        )
    ratio = torch.where(p > 0, p / q, 1.0)
    return (p * ratio.log()).sum(-1).clamp_min(0)


def _distributions(counts: Tensor, name: str) -> Tensor:
    """``[..., M]`` numbers as shares that sum to 1, float64."""
    counts = counts.double()
    totals = counts.sum(-1, keepdim=True)
    if not bool((counts.isfinite() & (counts >= 0)).all() and (totals > 0).all()):
        raise ValueError(f"{name}={counts.tolist()}: expected numbers that are not negative, some of them above 0.")
    return counts / totals
