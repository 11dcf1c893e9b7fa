"""The Wasserstein distance between a client's and the server's samples, computed from interpolants only.

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
