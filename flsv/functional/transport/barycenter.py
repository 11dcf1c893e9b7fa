"""The Wasserstein barycenter of the clients' samples, which replaces the validation set if there is none.

Li et al., "Data Valuation and Detections in Federated Learning" (FedBary), CVPR 2024, Algorithm 1 without a validation
set, with the step of Cuturi and Doucet, "Fast Computation of Wasserstein Barycenters", ICML 2014, for its support
points.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from flsv.functional.transport.checks import Exponent
from flsv.functional.transport.federated import SPREAD
from flsv.functional.transport.interpolation import interpolate_along, interpolating_measure, matching
from flsv.utilities.declared import Count, checked
from flsv.utilities.errors import ConfigurationError


class AnsweringClient(Protocol):
    """Protocol of the clients of :func:`wasserstein_barycenter`, with the members ``dim`` and ``answer`` of
    :class:`TransportClient`."""

    @property
    def dim(self) -> int: ...

    def answer(self, gamma: Tensor) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True)
class FederatedBarycenter:
    """The result of :func:`wasserstein_barycenter`.

    Attributes:
        support_points: the S points of the barycenter, ``[S, d]``, equally heavy.
        distances: ``[n]``, each client's distance in the last iteration, in feature units: the Wasserstein distance
            from its samples to its interpolating measure plus that from there to the barycenter.
    """

    support_points: Tensor
    distances: Tensor


@checked
def wasserstein_barycenter(
    clients: Sequence[AnsweringClient],
    *,
    support: Count,
    iterations: Count,
    weights: Tensor | None = None,
    generator: torch.Generator | None = None,
    p: Exponent = 2,
) -> FederatedBarycenter:
    """Compute a free-support barycenter of the clients' samples, from interpolants and distances only.

    In each iteration the S support points X_Q become

        X_Q <- sum_i lambda_i S pi(X_Q, gamma_i) gamma_i

    with lambda_i the weight of client i, gamma_i the interpolating measure between its samples and X_Q, and pi the
    optimal plan between X_Q and gamma_i. Contrary to the paper's theorem 1, this step can increase the objective. Equal
    support points (the paper starts with zeros) would stay equal; here they start as random points of the clients'
    first interpolants.

    Args:
        clients: the n clients, each with ``answer(gamma)`` and ``dim`` like :class:`TransportClient`.
        support: S, the number of support points.
        iterations: the number of iterations, at least 1.
        weights: the clients' weights lambda, ``[n]``, at least 0 (such as sample counts), which are normalized to sum
            to 1; None: equal weights.
        generator: the random generator of the points that are first sent to all clients (normal, close to 0) and of the
            choice of the start points X_Q. None: torch's default.
        p: the exponent of the Wasserstein distance; the step of the support points is that for p = 2.

    Returns:
        The support points and the clients' distances, see :class:`FederatedBarycenter`.

    Raises:
        ConfigurationError: there are no clients; clients have different dimensions; a client has so few samples that
            its answer would reveal them; a weight is negative, or all are 0; or an option is out of range.

    Example:
        >>> from flsv.functional import TransportClient
        >>> x = torch.tensor([[0.0], [1.0], [2.0]])
        >>> clients = [TransportClient(points, allow_reconstruction=True) for points in (x, x + 6)]
        >>> generator = torch.Generator().manual_seed(0)
        >>> found = wasserstein_barycenter(clients, support=3, iterations=25, generator=generator)
        >>> found.support_points.sort(0).values.T.round(decimals=2), found.distances.round(decimals=2)
        (tensor([[3., 4., 5.]]), tensor([3., 3.]))
    """
    shares = _shares(clients, weights)
    start = SPREAD * torch.randn(support, clients[0].dim, generator=generator)
    gammas = [client.answer(start)[0] for client in clients]
    # Each support point comes from a client drawn by weight: a sample of the mixture of the gammas.
    owner = torch.multinomial(shares, support, replacement=True, generator=generator).tolist()
    place = torch.randperm(support, generator=generator).tolist()
    center = torch.stack([gammas[i][j] for i, j in zip(owner, place)])
    distances = center.new_full((len(clients),), torch.nan)
    for _ in range(iterations):
        moved = torch.zeros_like(center)
        for i, client in enumerate(clients):
            answer, distance = client.answer(gammas[i])
            plan, own = matching(gammas[i], center, p)
            distances[i] = distance + own
            ours = interpolate_along(gammas[i], center, plan, support, 0.5)
            gammas[i] = interpolating_measure(answer.to(ours), ours, p=p)
            moved += shares[i].to(center) * support * (matching(center, gammas[i], p)[0] @ gammas[i])
        center = moved
    return FederatedBarycenter(center, distances)


def _shares(clients: Sequence[AnsweringClient], weights: Tensor | None) -> Tensor:
    """Normalize the clients' weights, equal by default, to sum to 1."""
    shares = torch.ones(len(clients)) if weights is None else weights.detach().cpu().double()
    if shares.shape != (len(clients),) or not bool(((shares >= 0) & shares.isfinite()).all()) or not shares.sum() > 0:
        raise ConfigurationError(f"weights: expected {len(clients)} finite numbers of at least 0, not all 0.")
    return shares / shares.sum()
