"""Divergences of label distributions from a reference, and aggregation weights computed from the divergences.

Guo et al., "A Fair Contribution Measurement Method for Federated Learning", Sensors 24(15), 2024, equation 5 (the
Kullback-Leibler divergence from the uniform distribution) and equation 6 (the weights). The Euclidean distance and
other references are those of Ye et al., "FedDisco: Federated Learning with Discrepancy-Aware Collaboration", ICML 2023,
on whose weights Guo's are built.
"""

from __future__ import annotations

import warnings
from typing import Literal

import torch
from torch import Tensor

from flsv.utilities.declared import checked

Divergence = Literal["kl", "l2"]


@checked
def label_divergence(
    class_counts: Tensor, kind: Divergence = "kl", reference: Literal["uniform", "global"] | Tensor = "uniform"
) -> Tensor:
    """Compute the divergence of label distributions from a reference.

    Args:
        class_counts: the numbers of samples of M classes, ``[M]`` for one client or ``[n, M]`` for n clients; each
            client has at least one sample.
        kind: the divergence of the label distribution p from the reference q: ``"kl"``, sum_j p_j log(p_j / q_j) in
            nats, with 0 log 0 = 0; or ``"l2"``, the Euclidean distance.
        reference: ``"uniform"``: 1/M for each class; ``"global"``: the label distribution of all clients of
            ``class_counts [n, M]`` together; or a tensor ``[M]`` of counts or probabilities.

    Returns:
        float64 ``[]`` or ``[n]``, at least 0. Against the uniform distribution at most log M (``"kl"``) or
        sqrt(1 - 1/M) (``"l2"``), the divergence of a client with a single class.

    Raises:
        ConfigurationError: ``kind`` or ``reference`` is unknown.
        ValueError: the shapes do not fit, a client or the reference has no samples, a count is negative, or the
            reference lacks a class of a client, so that the ``"kl"`` divergence would be infinite.

    Example:
        >>> label_divergence(torch.tensor([[5, 5, 5, 5], [10, 10, 0, 0], [20, 0, 0, 0]]))
        tensor([0.0000, 0.6931, 1.3863], dtype=torch.float64)
        >>> label_divergence(torch.tensor([10, 10, 0, 0]), "l2", torch.tensor([2, 1, 1, 0]))
        tensor(0.3536, dtype=torch.float64)
    """
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
    else:
        q = torch.full((classes,), 1 / classes, dtype=torch.float64, device=p.device)
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
    """Normalize counts ``[..., M]`` to distributions that sum to 1, float64."""
    counts = counts.double()
    totals = counts.sum(-1, keepdim=True)
    if not bool((counts.isfinite() & (counts >= 0)).all() and (totals > 0).all()):
        raise ValueError(f"{name}={counts.tolist()}: expected numbers that are not negative, some of them above 0.")
    return counts / totals


@checked
def divergence_weights(
    num_samples: Tensor, divergence: Tensor, a: float = 0.6, b: float = 0.1, normalize_divergence: bool = True
) -> Tensor:
    r"""Compute aggregation weights from numbers of samples and label divergences (eq. 6).

    .. math:: D_k \propto \max(N_k - a F_k + b, 0), \qquad N_k = |D_k| / |D|

    with D_k the weight of client k, N_k its share of all samples, and F_k the divergence of its labels.

    Departures from the paper, without which the weights are unusable: (1) F is divided by its sum over the clients. Raw
    Kullback-Leibler divergences give negative weights in the paper's own scenarios (for a client with two of ten
    classes, F = 1.61 and 0.2 - 0.6 * 1.61 + 0.1 < 0). (2) Negative weights become 0, as in FedDisco. (3) The weights
    are divided by their sum. As published, with a = 0.6 and b = 0.1, the weights of five equal clients sum to 1.5,
    which only enlarges the server's step (``FedAvg(server_lr=...)``).

    Args:
        num_samples: the clients' numbers of training samples, ``[k]``, not all 0.
        divergence: the clients' divergences F, ``[k]``, see :func:`label_divergence`.
        a: the factor of the divergences: the larger, the less weight a client with unusual labels has.
        b: the number added to every weight: the larger, the more equal the weights are.
        normalize_divergence: whether to divide the divergences by their sum first; if all are 0 they stay 0.

    Returns:
        The weights, float64 ``[k]``, not negative, which sum to 1. If the formula gives no client a positive weight,
        the weights are the clients' shares of the samples, and there is a warning.

    Raises:
        ValueError: the shapes do not fit, a number is negative or not finite, or there are no samples.

    Example:
        >>> divergence_weights(torch.tensor([100, 100, 200]), torch.tensor([0.0, 1.5, 0.5]))
        tensor([0.4375, 0.0000, 0.5625], dtype=torch.float64)
        >>> divergence_weights(torch.tensor([100, 300]), torch.zeros(2), b=0.0)
        tensor([0.2500, 0.7500], dtype=torch.float64)
    """
    if num_samples.ndim != 1 or divergence.shape != num_samples.shape or not len(num_samples):
        raise ValueError(
            f"expected num_samples [k] and divergence [k], got {list(num_samples.shape)} and {list(divergence.shape)}."
        )
    sizes, distances = num_samples.double(), divergence.to(num_samples.device, torch.float64)
    for name, values in (("num_samples", sizes), ("divergence", distances)):
        if not bool((values.isfinite() & (values >= 0)).all()):
            raise ValueError(f"{name}={values.tolist()}: expected finite numbers that are not negative.")
    if sizes.sum() == 0:
        raise ValueError("num_samples are all 0: nobody has anything to weigh.")
    shares = sizes / sizes.sum()
    if normalize_divergence and distances.sum() > 0:
        distances = distances / distances.sum()
    weights = (shares - a * distances + b).clamp_min(0)
    if weights.sum() == 0:
        warnings.warn(
            f"divergence_weights(a={a}, b={b}): no client has a positive weight; falling back to shares of samples.",
            stacklevel=2,
        )
        return shares
    return weights / weights.sum()
