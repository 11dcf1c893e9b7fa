"""The federated Wasserstein distance, from interpolating measures of both sides.

Interpolating measures: points on the Wasserstein geodesic between two sets of samples.

Li et al., "Data Valuation and Detections in Federated Learning" (FedBary), CVPR 2024, definition 4 and equation 6,
after Rakotomamonjy et al., "Federated Wasserstein Distance", ICLR 2024 (arXiv 2310.01973).

With as many points on both sides the optimal plan is a permutation, and moving each point along it (McCann) is the
geodesic itself. With S points on one side only, each of them moves towards the mean of what it is matched with: a
barycentric projection, which stays near the geodesic and averages m/S samples into a point.

The Wasserstein distance between a client's and the server's samples, computed from interpolants only.

Li et al., "Data Valuation and Detections in Federated Learning" (FedBary), CVPR 2024, equations 5 to 8 and Algorithm 1
with a validation set; Rakotomamonjy et al., "Federated Wasserstein Distance", ICLR 2024 (arXiv 2310.01973).

An iteration: the server sends S points gamma; the client answers with eta_P, the interpolant of its samples P and
gamma, and W(P, gamma); the server forms eta_Q from gamma and its samples Q, and the next gamma from eta_P and eta_Q. By
the triangle inequality W(P, gamma) + W(gamma, Q) is never below W(P, Q), and is equal to it where gamma is on the
geodesic.

What crosses: S interpolated points and one number a way. A point is a mean of m/S of the client's samples and of a
point that the server has sent, who takes that off again. With S >= m it is left with the samples themselves, with
S >= m/2 with points in which one sample weighs half and more (``docs/results/fedbary_reconstruction.md``). A client
therefore answers fewer than m/2 points, unless it is told otherwise; the distance is then biased upwards. That is no
proof: many iterations give many means. Labels cross as part of the points, if both sides pass
:func:`label_embedding`'s: as averages of class means and deviations, which of a class of one sample are the sample.

The Wasserstein barycenter of the clients' samples is the target where there is no validation set: Algorithm 1 without
one, with the step of Cuturi and Doucet, "Fast Computation of Wasserstein Barycenters", ICML 2014, for its support
points:

    X_Q <- sum_i lambda_i S pi(X_Q, gamma_i) gamma_i.

Theorem 1's monotone objective does not hold for this step. Support points that start equal (the paper's zeros) stay
equal for ever; ours start as samples of the clients' first interpolants.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from flsv.functional.transport.cost import (
    Exponent,
    Place,
    check_pair,
    check_points,
    check_support,
    squared_distances,
)
from flsv.functional.transport.solvers import transport_plan
from flsv.utilities.declared import Count, checked
from flsv.utilities.errors import ConfigurationError


@checked
def interpolating_measure(x: Tensor, x2: Tensor, *, t: Place = 0.5, p: Exponent = 2) -> Tensor:
    """The points of ``x``, moved to the place t on the way to ``x2`` (eq. 6): on the geodesic if m2 = m.

    Args:
        x: ``[m, d]`` samples, equally heavy.
        x2: ``[m2, d]``.
        t: 0 is ``x``, 1 is ``x2``.
        p: the exponent of the plan's cost.

    Returns:
        ``[m, d]`` in the dtype of ``x``.

    Raises:
        ConfigurationError: wrong samples, t or p.

    Example:
        >>> interpolating_measure(torch.tensor([[0.0], [1.0]]), torch.tensor([[5.0], [2.0]]), t=0.25)
        tensor([[0.5000],
                [2.0000]])
    """
    check_pair(x, x2)
    return interpolate_along(x, x2, matching(x, x2, p)[0], len(x), t)


def matching(x: Tensor, x2: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """The optimal plan ``[m, m2]`` between two sets of points, and W_p."""
    plan, distance = transport_plan(squared_distances(x, x2), p)
    return plan.to(x), distance.to(x)


def interpolate_along(x: Tensor, x2: Tensor, plan: Tensor, support: int, t: float) -> Tensor:
    """Equation 6 on the side that has ``support`` points."""
    if support == len(x):
        return torch.lerp(x, len(x) * (plan @ x2), t)
    return torch.lerp(len(x2) * (plan.T @ x), x2, t)


# Two optimal plans in a row need not compose to an optimal one: from a wide first gamma the protocol ends in some
# pairing of P and Q that no iteration improves. From a point, eta_P and eta_Q are small
# copies of P and Q, their matching is that of P and Q, and it stays. The spread only breaks ties.
SPREAD = 1e-4


@checked
class TransportClient:
    """The client's role: it holds its samples and answers the server's points.

    Args:
        x: ``[m, d]`` samples (or their embeddings).
        t: the place of its interpolants between its samples (0) and the server's points (1).
        p: exponent of the distance.
        allow_reconstruction: answer any number of points, also so many that its samples can be read off the answer.

    Example:
        >>> client = TransportClient(torch.tensor([[0.0], [2.0]]), allow_reconstruction=True)
        >>> client.answer(torch.tensor([[4.0], [6.0]]))
        (tensor([[2.],
                [4.]]), tensor(4.))
    """

    def __init__(self, x: Tensor, *, t: Place = 0.5, p: Exponent = 2, allow_reconstruction: bool = False) -> None:
        check_points(x)
        self._x, self.t, self.p, self._allow = x.detach(), t, p, allow_reconstruction

    @property
    def dim(self) -> int:
        """The dimension of its points, which the server needs to know."""
        return self._x.shape[1]

    def answer(self, gamma: Tensor) -> tuple[Tensor, Tensor]:
        """eta_P ``[S, d]`` and W(P, gamma) for the server's points ``[S, d]``.

        Raises:
            ConfigurationError: points of another dimension, or so many that they would show its samples.
        """
        check_pair(self._x, gamma, "the client's samples", "gamma")
        if not self._allow:
            check_support(len(gamma), len(self._x))
        gamma = gamma.to(self._x)
        plan, distance = matching(self._x, gamma, self.p)
        return interpolate_along(self._x, gamma, plan, len(gamma), self.t), distance


@checked
class TransportServer:
    """The server's role towards one client: it holds the validation samples, gamma and the estimate.

    Args:
        x2: ``[m2, d]`` validation samples (or their embeddings).
        t: the place of its interpolants, towards its own samples; 0.5 is the paper's. Above it gamma ends nearer Q, at
            t^2 / (t^2 + (1 - t)^2) of the way, and shows more of it; the client must use the same.
        p: exponent of the distance.

    Attributes:
        gamma: ``[S, d]``, what it sends next; None before :meth:`start`.
        eta: ``[S, d]``, eta_Q of the last step, between its gamma and Q; None before.
        distance: W(P, gamma) + W(gamma, Q) of the last step; NaN before.

    Example:
        >>> server = TransportServer(torch.tensor([[4.0], [6.0]]))
        >>> client = TransportClient(torch.tensor([[0.0], [2.0]]), allow_reconstruction=True)
        >>> gamma = server.start(2, generator=torch.Generator().manual_seed(0))
        >>> for _ in range(20):
        ...     gamma = server.step(*client.answer(gamma))
        >>> server.distance
        tensor(4.)
    """

    def __init__(self, x2: Tensor, *, t: Place = 0.5, p: Exponent = 2) -> None:
        check_points(x2, "x2")
        self._x, self.t, self.p = x2.detach(), t, p
        self.gamma: Tensor | None = None
        self.eta: Tensor | None = None
        self.distance = x2.new_tensor(torch.nan)

    def start(self, support: int, dim: int | None = None, generator: torch.Generator | None = None) -> Tensor:
        """The first gamma: S normal points close to the mean of the server's samples (their deviation times 1e-4).

        Args:
            support: S, at least 1.
            dim: the dimension of the client's points, if it has told.
            generator: None: torch's default.

        Raises:
            ConfigurationError: the dimensions differ, or S is below 1.
        """
        if dim is not None and dim != self._x.shape[1]:
            raise ConfigurationError(
                f"the client's samples have {dim} features and the server's have {self._x.shape[1]}: both sides "
                f"must use the same features."
            )
        if support < 1:
            raise ConfigurationError(f"support={support}: a measure needs at least one point.")
        noise = torch.randn(support, self._x.shape[1], generator=generator, dtype=self._x.dtype).to(self._x.device)
        self.gamma = self._x.mean(0) + SPREAD * noise * self._x.std(0, unbiased=False)
        return self.gamma

    def step(self, eta: Tensor, distance: Tensor) -> Tensor:
        """The next gamma ``[S, d]``, from the client's eta_P ``[S, d]`` and W(P, gamma).

        Raises:
            ConfigurationError: before :meth:`start`, or an answer that does not fit gamma.
        """
        if self.gamma is None or eta.shape != self.gamma.shape:
            wanted = "start() first" if self.gamma is None else f"eta_P {list(self.gamma.shape)}"
            raise ConfigurationError(f"TransportServer.step: expected {wanted}, got eta_P {list(eta.shape)}.")
        support = len(self.gamma)
        plan, own = matching(self.gamma, self._x, self.p)
        self.eta = interpolate_along(self.gamma, self._x, plan, support, self.t)
        self.distance = distance.to(own) + own
        self.gamma = interpolating_measure(eta.to(self.eta), self.eta, t=self.t, p=self.p)
        return self.gamma


@dataclass(frozen=True)
class FederatedDistance:
    """The result of the protocol.

    Attributes:
        distance: W(P, gamma) + W(gamma, Q) at the last iteration, in feature units; not below W(P, Q).
        gamma: ``[S, d]``, the interpolating measure after the last iteration.
        history: ``[iterations]``, the distance at each.
        eta: ``[S, d]``, the server's last eta_Q.
    """

    distance: Tensor
    gamma: Tensor
    history: Tensor
    eta: Tensor


@checked
def federated_wasserstein(
    x: Tensor,
    x2: Tensor,
    *,
    support: int,
    iterations: Count,
    t: Place = 0.5,
    p: Exponent = 2,
    generator: torch.Generator | None = None,
    allow_reconstruction: bool = False,
) -> FederatedDistance:
    """Wire a :class:`TransportClient` that holds ``x`` to a :class:`TransportServer` that holds ``x2``.

    The error about halves per iteration where S = m = m2.

    Args:
        x: ``[m, d]`` the client's samples.
        x2: ``[m2, d]`` the server's.
        support: S, points that cross.
        iterations: K, at least 1.
        t: place of the interpolants; 0.5 is the middle.
        p: exponent of the distance.
        generator: draws the first gamma; None: torch's default.
        allow_reconstruction: take S >= m/2, too, from which the client's samples can be worked out.

    Returns:
        See :class:`FederatedDistance`.

    Raises:
        ConfigurationError: wrong samples or settings, or such an S that is not allowed.

    Example:
        >>> x = torch.tensor([[0.0], [1.0], [2.0]])
        >>> generator = torch.Generator().manual_seed(0)
        >>> result = federated_wasserstein(
        ...     x, x + 3, support=3, iterations=20, generator=generator, allow_reconstruction=True
        ... )
        >>> result.distance, result.gamma.sort(0).values.T
        (tensor(3.), tensor([[1.5000, 2.5000, 3.5000]]))
    """
    client = TransportClient(x, t=t, p=p, allow_reconstruction=allow_reconstruction)
    server = TransportServer(x2, t=t, p=p)
    gamma = server.start(support, client.dim, generator)
    history = []
    for _ in range(iterations):
        gamma = server.step(*client.answer(gamma))
        history.append(server.distance)
    assert server.eta is not None
    return FederatedDistance(server.distance, gamma, torch.stack(history), server.eta)


class AnsweringClient(Protocol):
    """The part of a client that the barycenter needs; :class:`TransportClient` has it."""

    @property
    def dim(self) -> int: ...

    def answer(self, gamma: Tensor) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True)
class FederatedBarycenter:
    """The result of the protocol.

    Attributes:
        support_points: ``[S, d]``, equally heavy.
        distances: ``[n]``, W(P_i, gamma_i) + W(gamma_i, X_Q) of the last iteration, in feature units.
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
    """Free-support barycenter of the clients' samples, from interpolants and distances only.

    Args:
        clients: n of them, each with ``answer(gamma)`` as :class:`TransportClient` has it.
        support: S.
        iterations: K, at least 1.
        weights: ``[n]`` lambda, at least 0 (sample counts, say); None: equal. They are made to sum to 1.
        generator: draws, also the first points sent to all clients: normal, next to 0 (see :class:`TransportServer`).
            None: torch's default.
        p: exponent of the distance; the support's step is the one for 2.

    Returns:
        See :class:`FederatedBarycenter`.

    Raises:
        ConfigurationError: no clients, clients of different dimensions, or wrong settings.

    Example:
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
    # Each point from a client drawn by weight: the mixture of the gammas.
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
    shares = torch.ones(len(clients)) if weights is None else weights.detach().cpu().double()
    if shares.shape != (len(clients),) or not bool(((shares >= 0) & shares.isfinite()).all()) or not shares.sum() > 0:
        raise ConfigurationError(f"weights: expected {len(clients)} finite numbers of at least 0, not all 0.")
    return shares / shares.sum()
