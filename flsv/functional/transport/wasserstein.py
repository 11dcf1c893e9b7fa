"""Exact optimal transport between samples: shares, and the federated distance and barycenter.

Li et al., "Data Valuation and Detections in Federated Learning" (FedBary), CVPR 2024, equations 1 and 5 to 8,
definition 4, section 4.2, Algorithm 1. Rakotomamonjy et al., "Federated Wasserstein Distance", ICLR 2024. Cuturi and
Doucet, ICML 2014."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Protocol

import numpy as np
import torch
from annotated_types import Ge, Gt, Lt
from torch import Tensor

from flsv.functional.distances import squared_distances
from flsv.functional.transport.cost import check_pair, check_points, check_support
from flsv.utilities.declared import Count, checked
from flsv.utilities.errors import ConfigurationError

#: The exponent of the Wasserstein distance.
Exponent = Annotated[float, Ge(1)]
# POT's default of 100 000 pivots is too few from about 2000 samples on either side.
MAX_PIVOTS = 100_000_000
#: Position of the points in both sides' responses: halfway between their samples and gamma.
HALFWAY = 0.5


def contribution_shares(distances: Tensor) -> Tensor:
    """Compute clients' contribution shares, which are inversely proportional to their distances.

        (1/W_i) / sum_j (1/W_j)    for the distance W_i of client i

    Args:
        distances: the clients' distances, ``[n]``, at least 0 (possibly inf). NaN for a client without a distance.

    Returns:
        The shares, ``[n]``, which sum to 1. NaN for clients without a distance, which are excluded. If some clients
        have distance 0, they have equal shares and all others 0.

    Example:
        >>> contribution_shares(torch.tensor([1.0, 2.0, float("nan"), 2.0]))
        tensor([0.5000, 0.2500,    nan, 0.2500])
        >>> contribution_shares(torch.tensor([0.0, 2.0, 0.0]))
        tensor([0.5000, 0.0000, 0.5000])
    """
    is_negative = distances < 0
    if distances.ndim != 1 or is_negative.any():
        raise ConfigurationError(
            f"distances: expected a vector of numbers of at least 0, but got {distances}."
        )
    is_valid = ~distances.isnan()
    if not is_valid.any():
        return torch.full_like(distances, torch.nan)
    smallest_distance = distances[is_valid].min()
    is_nearest = distances == smallest_distance
    # Weights relative to the nearest client's, so that 1/1e-300 does not overflow. If the smallest distance is 0 or
    # infinite, the nearest clients' quotients are NaN.
    quotients = smallest_distance / distances
    weights = torch.where(is_nearest, 1.0, quotients)
    return weights / weights[is_valid].sum()


@checked
def interpolating_measure(
    x: Tensor,
    x2: Tensor,
    *,
    t: Annotated[float, Gt(0), Lt(1)] = HALFWAY,
    p: Exponent = 2,
) -> Tensor:
    """Move each point of ``x`` towards the mean of its partners in ``x2`` (eq. 6).

    If both sides have the same number of points, the result is on the Wasserstein geodesic between them.

    Args:
        x: equally weighted samples, ``[m, d]``.
        x2: equally weighted samples, ``[m2, d]``.
        t: the position between ``x`` (0) and ``x2`` (1), in (0, 1).
        p: the exponent of the distance in the optimal plan's cost, at least 1.

    Returns:
        The interpolating measure's points, ``[m, d]``, in the dtype of ``x``.

    Example:
        >>> interpolating_measure(torch.tensor([[0.0], [1.0]]), torch.tensor([[5.0], [2.0]]), t=0.25)
        tensor([[0.5000],
                [2.0000]])
    """
    check_pair(x, x2)
    plan, _ = matching(x, x2, p)
    return interpolate_along(x, x2, plan, num_points=len(x), t=t)


def matching(
    x: Tensor,
    x2: Tensor,
    p: float,
) -> tuple[Tensor, Tensor]:
    """Compute an optimal transport plan ``[m, m2]`` between two point sets, and their distance W_p. Points have equal
    weights."""
    import ot  # slow to import, since it imports scikit-learn and pandas

    cost = squared_distances(x, x2).detach().cpu().double().numpy()
    if p != 2:
        cost = cost ** (p / 2)
    num_rows, num_columns = cost.shape
    row_masses = np.full(num_rows, 1 / num_rows)
    column_masses = np.full(num_columns, 1 / num_columns)
    plan = ot.emd(row_masses, column_masses, cost, numItermax=MAX_PIVOTS)
    total_cost = max(float((plan * cost).sum()), 0.0)
    distance = total_cost ** (1 / p)
    return torch.from_numpy(plan).to(x), x.new_tensor(distance)


def interpolate_along(
    x: Tensor,
    x2: Tensor,
    plan: Tensor,
    num_points: int,
    t: float,
) -> Tensor:
    """Interpolate between ``x`` at t = 0 and ``x2`` at t = 1 along a transport plan (eq. 6). Return ``num_points``
    points."""
    # With equally many points the plan is a permutation, and the result the geodesic itself (McCann). Otherwise it is
    # a barycentric projection, which stays near it and averages m/S samples into a point.
    if num_points == len(x):
        # The rows of the plan sum to 1/m: each point's partner is a mean of points of x2.
        partners_in_x2 = len(x) * (plan @ x2)
        return torch.lerp(x, partners_in_x2, t)
    # The columns of the plan sum to 1/m2.
    partners_in_x = len(x2) * (plan.T @ x)
    return torch.lerp(partners_in_x, x2, t)


# The standard deviation of the first gamma, relative to that of the server's samples. The composition of two optimal
# plans need not be optimal: from a widely spread gamma, the protocol ends in a pairing of P and Q that no iteration
# improves. From nearly a single point, eta_P and eta_Q are small copies of P and Q in all iterations, so that their
# optimal plan is that of P and Q. With a spread of 0 there would be ties.
INITIAL_SPREAD = 1e-4


@checked
class TransportClient:
    """Client's side of the federated Wasserstein distance.

    Each point of a response is the mean of m/S of the client's m samples, averaged with a point that the server has
    sent and can subtract again. With S >= m the server can reconstruct the samples, with S >= m/2 points that are
    mostly one sample (``docs/results/fedbary.md``). So a client responds only to S < m/2 points. This does not
    guarantee privacy, since many iterations send many means.

    Args:
        x: the client's samples (or their embeddings), ``[m, d]``.
        p: the exponent of the Wasserstein distance.
        allow_reconstruction: whether to respond to any number of points, even if the response reveals the samples.

    Example:
        >>> client = TransportClient(torch.tensor([[0.0], [2.0]]), allow_reconstruction=True)
        >>> client.respond(torch.tensor([[4.0], [6.0]]))
        (tensor([[2.],
                [4.]]), tensor(4.))
    """

    def __init__(
        self,
        x: Tensor,
        *,
        p: Exponent = 2,
        allow_reconstruction: bool = False,
    ) -> None:
        check_points(x)
        self.p = p
        self._x = x.detach()
        self._allow_reconstruction = allow_reconstruction

    @property
    def dim(self) -> int:
        """Return the dimension of the client's points."""
        return self._x.shape[1]

    def respond(self, gamma: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the response to the server's points: interpolated points and a distance.

        Args:
            gamma: the server's points, ``[S, d]``.

        Returns:
            The points between the client's samples and ``gamma``, ``[S, d]``, and the Wasserstein distance between the
            samples and ``gamma``.
        """
        check_pair(self._x, gamma, "the client's samples", "gamma")
        num_points = len(gamma)
        if not self._allow_reconstruction:
            check_support(num_points, len(self._x))
        gamma = gamma.to(self._x)
        plan, distance = matching(self._x, gamma, self.p)
        points = interpolate_along(self._x, gamma, plan, num_points=num_points, t=HALFWAY)
        return points, distance


@checked
class TransportServer:
    """Server's side of the federated Wasserstein distance to one client.

    Args:
        x2: the validation samples (or their embeddings), ``[m2, d]``.
        p: the exponent of the Wasserstein distance.

    Attributes:
        gamma: the points to send next, ``[S, d]``. None before :meth:`start`.
        eta: the points between gamma and the server's samples in the last step, ``[S, d]``. None before the first step.
        distance: the estimated distance after the last step: from the client's samples to gamma, plus from gamma to the
            server's samples. NaN before the first step.

    Example:
        >>> server = TransportServer(torch.tensor([[4.0], [6.0]]))
        >>> client = TransportClient(torch.tensor([[0.0], [2.0]]), allow_reconstruction=True)
        >>> gamma = server.start(2, generator=torch.Generator().manual_seed(0))
        >>> for _ in range(20):
        ...     gamma = server.step(*client.respond(gamma))
        >>> server.distance
        tensor(4.)
    """

    def __init__(
        self,
        x2: Tensor,
        *,
        p: Exponent = 2,
    ) -> None:
        check_points(x2, "x2")
        self.p = p  # exponent of the distance
        self.gamma: Tensor | None = None  # the points to send next
        self.eta: Tensor | None = None  # interpolated points, as in the client's response
        self.distance = x2.new_tensor(torch.nan)
        self._x = x2.detach()

    def start(
        self,
        support: int,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Draw the first points to send: normal points close to the mean of the server's samples.

        Their standard deviation is 1e-4 times that of the samples.

        Args:
            support: the number S of points, at least 1.
            generator: the random generator that draws the points. None: torch's default.

        Returns:
            The points gamma, ``[S, d]``.
        """
        num_features = self._x.shape[1]
        noise = torch.randn(support, num_features, generator=generator, dtype=self._x.dtype)
        noise = noise.to(self._x.device)
        deviations = self._x.std(0, unbiased=False)
        self.gamma = self._x.mean(0) + INITIAL_SPREAD * noise * deviations
        return self.gamma

    def step(self, eta: Tensor, distance: Tensor) -> Tensor:
        """Compute the next points to send from a client's response.

        Args:
            eta: the client's interpolated points, ``[S, d]``, see :meth:`TransportClient.respond`.
            distance: the distance from the client's samples to the points sent last, from the same response.

        Returns:
            The next points, gamma, ``[S, d]``.
        """
        if self.gamma is None:
            raise ConfigurationError(
                "TransportServer.step was called before start(), which draws the first points. Call start() first."
            )
        if eta.shape != self.gamma.shape:
            raise ConfigurationError(
                f"TransportServer.step: expected eta {list(self.gamma.shape)}, but got shape {list(eta.shape)}."
            )
        # The server computes the same response as a client: points between the points sent last and its samples.
        num_points = len(self.gamma)
        plan, server_distance = matching(self.gamma, self._x, self.p)
        self.eta = interpolate_along(self.gamma, self._x, plan, num_points=num_points, t=HALFWAY)
        self.distance = distance.to(server_distance) + server_distance
        # The next points lie between the client's response and the server's.
        client_eta = eta.to(self.eta)
        self.gamma = interpolating_measure(client_eta, self.eta, p=self.p)
        return self.gamma


class RespondingClient(Protocol):
    """Interface of the clients of :func:`wasserstein_barycenter`, such as :class:`TransportClient`."""

    @property
    def dim(self) -> int: ...
    def respond(self, gamma: Tensor) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True)
class FederatedBarycenter:
    """The result of :func:`wasserstein_barycenter`.

    Attributes:
        support_points: the S points of the barycenter, ``[S, d]``, equally weighted.
        distances: ``[n]``, each client's distance in the last iteration, in feature units: the Wasserstein distance
            from its samples to its interpolating measure plus that from there to the barycenter.
    """

    support_points: Tensor
    distances: Tensor


@checked
def wasserstein_barycenter(
    clients: Sequence[RespondingClient],
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
    support points (the paper starts with zeros) would stay equal. Here they start as random points of the clients'
    first interpolants.

    Args:
        clients: the n clients, each with ``respond(gamma)`` and ``dim`` like :class:`TransportClient`.
        support: S, the number of support points.
        iterations: the number of iterations, at least 1.
        weights: the clients' weights lambda, ``[n]``, at least 0 (such as sample counts), which are normalized to sum
            to 1. None: equal weights.
        generator: the random generator of the points that are first sent to all clients (normal, close to 0) and of the
            choice of the start points X_Q. None: torch's default.
        p: the exponent of the Wasserstein distance. The step of the support points is that for p = 2.

    Returns:
        The support points and the clients' distances, see :class:`FederatedBarycenter`.

    Raises:
        ConfigurationError: there are no clients, clients have different dimensions, a client has so few samples that
            its response would reveal them, a weight is negative, or all are 0, or an option is out of range.

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
    noise = torch.randn(support, clients[0].dim, generator=generator)
    gammas = []
    for client in clients:
        gamma, _ = client.respond(INITIAL_SPREAD * noise)
        gammas.append(gamma)
    center = _initial_center(gammas, shares, support, generator)
    distances = center.new_full((len(clients),), torch.nan)
    for _ in range(iterations):
        for index, client in enumerate(clients):
            gammas[index], distances[index] = _next_gamma(client, gammas[index], center, p)
        center = _next_center(center, gammas, shares, p)
    return FederatedBarycenter(center, distances)


def _next_center(center: Tensor, gammas: Sequence[Tensor], shares: Tensor, p: float) -> Tensor:
    # X_Q <- sum_i lambda_i S pi(X_Q, gamma_i) gamma_i
    next_center = torch.zeros_like(center)
    for gamma, share in zip(gammas, shares):
        plan, _ = matching(center, gamma, p)
        next_center += share.to(center) * len(center) * (plan @ gamma)
    return next_center


def _next_gamma(
    client: RespondingClient,
    gamma: Tensor,
    center: Tensor,
    p: float,
) -> tuple[Tensor, Tensor]:
    # Both sides respond with points halfway to gamma. The next gamma lies halfway between the two responses.
    client_points, client_distance = client.respond(gamma)
    plan, center_distance = matching(gamma, center, p)
    center_points = interpolate_along(gamma, center, plan, num_points=len(center), t=HALFWAY)
    next_gamma = interpolating_measure(client_points.to(center_points), center_points, p=p)
    return next_gamma, client_distance + center_distance


def _initial_center(
    points_by_client: Sequence[Tensor],
    shares: Tensor,
    support: int,
    generator: torch.Generator | None,
) -> Tensor:
    """Draw support points ``[S, d]`` from the mixture of the clients' points."""
    owners = torch.multinomial(shares, support, replacement=True, generator=generator)
    positions = torch.randperm(support, generator=generator)
    points = [
        points_by_client[owner][position]
        for owner, position in zip(owners.tolist(), positions.tolist())
    ]
    return torch.stack(points)


def _shares(clients: Sequence[RespondingClient], weights: Tensor | None) -> Tensor:
    """Normalize the clients' weights, equal by default, to sum to 1."""
    num_clients = len(clients)
    if weights is None:
        shares = torch.ones(num_clients)
    else:
        shares = weights.detach().cpu().double()
    is_valid = (shares >= 0) & shares.isfinite()
    total = shares.sum()
    if shares.shape != (num_clients,) or not is_valid.all() or not total > 0:
        raise ConfigurationError(
            f"weights: expected {num_clients} finite numbers of at least 0, not all 0, but got {shares.tolist()}."
        )
    return shares / total
