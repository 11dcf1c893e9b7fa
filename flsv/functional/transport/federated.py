"""The federated Wasserstein distance between a client's and the server's samples, from interpolants only.

Li et al., "Data Valuation and Detections in Federated Learning" (FedBary), CVPR 2024, equations 5 to 8 and Algorithm 1
with a validation set; Rakotomamonjy et al., "Federated Wasserstein Distance", ICLR 2024 (arXiv 2310.01973).

In an iteration the server sends S points gamma; the client answers with eta_P, the interpolant of its samples P and
gamma, and with W(P, gamma); the server forms eta_Q from gamma and its samples Q, and the next gamma from eta_P and
eta_Q. By the triangle inequality W(P, gamma) + W(gamma, Q) is never below W(P, Q), and is equal to it if gamma is on
the geodesic.

Both ways S interpolated points and one number are sent. A point is a mean of m/S of the client's samples and of a point
that the server has sent and can subtract again. With S >= m the server then has the samples themselves, with S >= m/2
points in which one sample has half of the weight or more (``docs/results/fedbary_reconstruction.md``). A client
therefore answers fewer than m/2 points, unless ``allow_reconstruction`` is set; the distance is then biased upwards.
This is no proof of privacy: many iterations send many means. If both sides pass embeddings of :func:`label_embedding`,
labels are sent as part of the points: as averages of class means and deviations, which for a class of one sample are
the sample.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flsv.functional.transport.checks import Exponent, Place, check_pair, check_points, check_support
from flsv.functional.transport.interpolation import interpolate_along, interpolating_measure, matching
from flsv.utilities.declared import Count, checked
from flsv.utilities.errors import ConfigurationError

# Two optimal plans in a row need not compose to an optimal one: from a wide first gamma the protocol ends in some
# pairing of P and Q that no iteration improves. If gamma starts as nearly a point, eta_P and eta_Q are small copies of
# P and Q, whose matching is that of P and Q, and stays so. The spread only breaks ties.
SPREAD = 1e-4


@checked
class TransportClient:
    """The client of the protocol: it holds its samples and answers the server's points.

    Args:
        x: ``[m, d]`` samples (or their embeddings).
        t: the place of the interpolants between the client's samples (0) and the server's points (1).
        p: exponent of the distance.
        allow_reconstruction: answer any number of points, even if they reveal the samples.

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
        """Return the dimension of the client's points."""
        return self._x.shape[1]

    def answer(self, gamma: Tensor) -> tuple[Tensor, Tensor]:
        """Answer the server's points with interpolants and a distance.

        Args:
            gamma: ``[S, d]``, the server's points.

        Returns:
            eta_P ``[S, d]`` and W(P, gamma).

        Raises:
            ConfigurationError: points of another dimension, or so many that the answer would reveal samples.
        """
        check_pair(self._x, gamma, "the client's samples", "gamma")
        if not self._allow:
            check_support(len(gamma), len(self._x))
        gamma = gamma.to(self._x)
        plan, distance = matching(self._x, gamma, self.p)
        return interpolate_along(self._x, gamma, plan, len(gamma), self.t), distance


@checked
class TransportServer:
    """The server of the protocol, towards one client: it holds the validation samples, gamma and the estimate.

    Args:
        x2: ``[m2, d]`` validation samples (or their embeddings).
        t: the place of the interpolants on the way to the server's samples; 0.5 is the paper's. Above 0.5 gamma ends
            nearer to Q, at t^2 / (t^2 + (1 - t)^2) of the way, and reveals more of it; the client must use the same t.
        p: exponent of the distance.

    Attributes:
        gamma: ``[S, d]``, the points to send next; None before :meth:`start`.
        eta: ``[S, d]``, eta_Q of the last step, between gamma and Q; None before the first step.
        distance: W(P, gamma) + W(gamma, Q) of the last step; NaN before the first step.

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
        """Draw the first gamma: S normal points close to the mean of the server's samples.

        Their standard deviation is 1e-4 times that of the samples.

        Args:
            support: S, at least 1.
            dim: the dimension of the client's points, if known.
            generator: draws the points; None: torch's default.

        Returns:
            ``[S, d]``.

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
        """Compute the next gamma from a client's answer.

        Args:
            eta: ``[S, d]``, the client's eta_P.
            distance: W(P, gamma).

        Returns:
            ``[S, d]``, the next gamma.

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
    """The result of :func:`federated_wasserstein`.

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
    """Compute the Wasserstein distance of two sets of samples by the protocol.

    A :class:`TransportClient` holds ``x``, a :class:`TransportServer` holds ``x2``.

    If S = m = m2 the error about halves per iteration.

    Args:
        x: ``[m, d]`` the client's samples.
        x2: ``[m2, d]`` the server's samples.
        support: S, the points that are sent.
        iterations: K, at least 1.
        t: place of the interpolants; 0.5 is the middle.
        p: exponent of the distance.
        generator: draws the first gamma; None: torch's default.
        allow_reconstruction: allow S >= m/2, from which the client's samples can be reconstructed.

    Returns:
        See :class:`FederatedDistance`.

    Raises:
        ConfigurationError: wrong samples or settings, or S >= m/2 without ``allow_reconstruction``.

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
