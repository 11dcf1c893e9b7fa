"""Divergences of label distributions from the uniform one, and aggregation weights computed from them.

Guo et al., "A Fair Contribution Measurement Method for Federated Learning", Sensors 24(15), 2024, equations 5 and 6.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from flsv.utilities.declared import checked


def label_divergence(class_counts: Tensor) -> Tensor:
    """Compute the Kullback-Leibler divergence of label distributions from the uniform one (eq. 5).

    Args:
        class_counts: the numbers of samples of M classes, ``[M]`` for one client or ``[n, M]`` for n clients. Each
            client has at least one sample.

    Returns:
        float64 ``[]`` or ``[n]`` in nats, from 0 to log M, the divergence of a client with a single class.

    Raises:
        ValueError: the shape does not fit, a client has no samples, or a count is negative.

    Example:
        >>> label_divergence(torch.tensor([[5, 5, 5, 5], [10, 10, 0, 0], [20, 0, 0, 0]]))
        tensor([0.0000, 0.6931, 1.3863], dtype=torch.float64)
    """
    counts = class_counts.double()  # [M] or [n, M]
    totals = counts.sum(-1, keepdim=True)
    is_valid = counts.isfinite() & (counts >= 0)
    have_samples = (totals > 0).all()
    if counts.ndim not in (1, 2) or not is_valid.all() or not have_samples:
        raise ValueError(
            "expected class_counts [M] or [n, M] of at least 0, with a sample at every client, but got "
            f"{class_counts.tolist()}."
        )
    # The Kullback-Leibler divergence of the classes' shares from the uniform distribution.
    shares = counts / totals
    uniform_share = 1 / counts.shape[-1]
    ratios = torch.where(shares > 0, shares / uniform_share, 1.0)  # 0 log 0 = 0
    terms = shares * ratios.log()
    return terms.sum(-1).clamp_min(0)


@checked
def divergence_weights(
    num_samples: Tensor,
    divergence: Tensor,
    a: float = 0.6,
    b: float = 0.1,
) -> Tensor:
    r"""Compute aggregation weights from numbers of samples and label divergences (eq. 6).

    .. math:: D_k \propto \max(N_k - a F_k + b, 0), \qquad N_k = |D_k| / |D|

    with D_k the weight of client k, N_k its share of all samples, and F_k the divergence of its labels.

    Departures from the paper, without which the weights are unusable: (1) F is divided by its sum over the clients. If
    all are 0 they stay 0. Raw
    Kullback-Leibler divergences give negative weights in the paper's own scenarios (for a client with two of ten
    classes, F = 1.61 and 0.2 - 0.6 * 1.61 + 0.1 < 0). (2) Negative weights become 0, as in FedDisco. (3) The weights
    are divided by their sum. As published, with a = 0.6 and b = 0.1, the weights of five equal clients sum to 1.5,
    which only enlarges the server's step (``FedAvg(server_lr=...)``).

    Args:
        num_samples: the clients' numbers of training samples, ``[k]``, not all 0.
        divergence: the clients' divergences F, ``[k]``, see :func:`label_divergence`.
        a: the factor of the divergences: the larger, the less weight a client with unusual labels has.
        b: the number added to every weight: the larger, the more equal the weights are.

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
    sizes, distances = _checked_inputs(num_samples, divergence)
    shares = sizes / sizes.sum()
    if distances.sum() > 0:
        distances = distances / distances.sum()
    weights = (shares - a * distances + b).clamp_min(0)
    if weights.sum() == 0:
        warnings.warn(
            f"divergence_weights(a={a}, b={b}): no client has a positive weight, so shares of samples are returned.",
            stacklevel=2,
        )
        return shares
    return weights / weights.sum()


def _checked_inputs(num_samples: Tensor, divergence: Tensor) -> tuple[Tensor, Tensor]:
    has_valid_shape = num_samples.ndim == 1 and len(num_samples) > 0
    if not has_valid_shape or divergence.shape != num_samples.shape:
        raise ValueError(
            f"expected num_samples [k] and divergence [k], got {list(num_samples.shape)} and {list(divergence.shape)}."
        )
    sizes = num_samples.double()
    distances = divergence.to(num_samples.device, torch.float64)
    _check_not_negative("num_samples", sizes)
    _check_not_negative("divergence", distances)
    if sizes.sum() == 0:
        raise ValueError("expected a client with samples, but num_samples are all 0.")
    return sizes, distances


def _check_not_negative(name: str, values: Tensor) -> None:
    is_valid = values.isfinite() & (values >= 0)
    if not is_valid.all():
        raise ValueError(
            f"{name}={values.tolist()}: expected finite numbers that are not negative."
        )
