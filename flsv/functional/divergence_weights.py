"""Aggregation weights from numbers of samples and label divergences.

Guo et al., "A Fair Contribution Measurement Method for Federated Learning", Sensors 24(15), 2024, equation 6:

    D_k proportional to N_k - a F_k + b,    N_k = |D_k| / |D|.

Departures, without which the formula cannot be used. Raw Kullback-Leibler divergences make it negative in the paper's
own scenarios (two of ten classes: F = 1.61 and 0.2 - 0.6 * 1.61 + 0.1 < 0), so F is first made to sum to 1 over the
clients. Negative weights become 0, as in FedDisco (Ye et al., ICML 2023). The weights are made to sum to 1: as they
are, with a = 0.6 and b = 0.1, those of five clients with all labels equally sum to 1.5, which is a larger step of the
server (``FedAvg(server_lr=...)``) and no better weighting.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from flsv.arguments import check_number


def divergence_weights(
    num_samples: Tensor, divergence: Tensor, a: float = 0.6, b: float = 0.1, normalize_divergence: bool = True
) -> Tensor:
    """N_k - a F_k + b, clipped at 0 and made to sum to 1.

    Args:
        num_samples: ``[k]`` training samples of each client, not all 0.
        divergence: ``[k]``, F, as of :func:`label_divergence`.
        a: how much divergence counts against a client.
        b: what everybody gets; the larger, the more equal the weights.
        normalize_divergence: make F sum to 1 first. Where all F are 0 they stay 0.

    Returns:
        float64 ``[k]``, not negative, sum 1. Where all weights are clipped: N_k, with a warning.

    Raises:
        ValueError: shapes that do not fit, numbers that are negative or not finite.

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
    check_number("divergence_weights", "a", a)
    check_number("divergence_weights", "b", b)
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
