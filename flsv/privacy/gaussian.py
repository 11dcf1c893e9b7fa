"""Noise in a client's update: clipping, Gaussian noise, and the rounds that a client's budget allows."""

from __future__ import annotations

import hmac
import math
import warnings
from bisect import bisect_right
from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from annotated_types import Gt, Lt
from torch import Tensor
from torch.linalg import vector_norm

from flsv.core.parameter_space import ParameterSpace
from flsv.privacy.accounting import gaussian_epsilon
from flsv.privacy.secret_noise import add_secret_noise
from flsv.uploads.base import PrivateUpload, UploadContext
from flsv.utilities.arguments import rounded_up
from flsv.utilities.declared import NonNegative, Positive
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.plain_values import digest
from flsv.utilities.seeding import generator_for


class GaussianPrivacy(PrivateUpload):
    r"""Upload transformation that clips a client's update and adds Gaussian noise to it.

    .. math::
        \tilde d = d \min(1, C / \lVert d \rVert_2) + \mathcal N(0, (\sigma C)^2 I)

    with the clipping bound :math:`C` and the noise multiplier :math:`\sigma`. Every client adds the full noise itself:
    the server and the clients that download its model see only noised updates, and need not be trusted.

    **Meaning of epsilon.** Adding or removing a client (its update, or 0 instead) changes the odds of any observation
    by at most a factor exp(epsilon), up to delta. If a client's data are replaced by other data, its clipped update
    changes by up to 2C: for this notion of privacy, epsilon is that of half the noise multiplier. Epsilon holds per
    client, and grows with the rounds in which the client took part. Rare participation does not lower it further (no
    amplification by sampling), because the server sees the cohorts.

    **What leaves a client.** The noised update, the number of samples, the number of steps, and the update's size. If
    training fails or the model is not finite, the update is 0 before noise is added, and cannot be distinguished from
    others. Components by which clients would send more raise an error, and so do personalizers whose clients send
    nothing.

    **Where the noise comes from.** In a simulation it is drawn from the run's seed, so anyone who knows the seed can
    subtract it. At a site (:mod:`flsv.sites`) a cryptographic generator draws it. The generator's key is a
    hash of the site's secret, the server's whole message, the site's stored state and the update itself. Different
    updates never have the same noise, and an update that is requested twice has the same noise twice. Epsilon then
    holds against a server that cannot break SHA-256, and up to the rounding of numbers of 53 bits.

    **Effect on contributions.** Values of metrics contain much noise, too (``docs/results/privacy_contributions.md``).
    A ``FederatedLoop`` warns of this.

    Args:
        clip: C, the largest Euclidean norm of an update, in the unit of the weights.
        noise_multiplier: :math:`\sigma`, the noise's standard deviation divided by ``clip``. With 0 updates are only
            clipped, which gives no privacy guarantee.
        delta: the probability that epsilon does not hold, in (0, 1). It should be far below 1 / (number of clients).
        max_epsilon: the largest epsilon of a client. Training stops when another round would exceed it. None: no limit.

    Raises:
        ConfigurationError: an argument is out of range, ``max_epsilon`` does not suffice for one round, the package
            dp-accounting is not installed.

    Example:
        >>> privacy = GaussianPrivacy(clip=1.0, noise_multiplier=2.0, max_epsilon=8.0)
        >>> round(privacy.epsilon(rounds=5), 2), privacy.affordable_rounds()
        (4.98, 11)
        >>> GaussianPrivacy(clip=1.0, noise_multiplier=0.0).protect(torch.tensor([3.0, 4.0]), torch.Generator())
        tensor([0.6000, 0.8000])
    """

    def __init__(
        self,
        clip: Positive,
        noise_multiplier: NonNegative,
        delta: Annotated[float, Gt(0), Lt(1)] = 1e-5,
        max_epsilon: Positive | None = None,
    ) -> None:
        self.clip = clip
        self.noise_multiplier = noise_multiplier
        self.delta = delta
        self.max_epsilon = max_epsilon
        epsilon_of_round = self.epsilon(1)  # fail early if dp-accounting is broken
        if max_epsilon is not None and epsilon_of_round > max_epsilon:
            sufficient_noise = self._noise_within(max_epsilon)
            raise ConfigurationError(
                f"{self!r}: the first round already has epsilon = {epsilon_of_round:.4g}, which is above max_epsilon. "
                f"Raise noise_multiplier, for example to {rounded_up(sufficient_noise)}, or max_epsilon."
            )

    def _noise_within(self, max_epsilon: float) -> float:
        """Return a noise multiplier with which a round has at most this epsilon."""
        sufficient_noise = self.noise_multiplier or 0.1
        while gaussian_epsilon(sufficient_noise, 1, self.delta) > max_epsilon:
            sufficient_noise *= 2
        return sufficient_noise

    #: Updates are differences from the global model, since a client's own start point is private.
    reference: Literal["start", "global"] = "global"

    def apply(self, update: Tensor, context: UploadContext) -> Tensor:
        """Clip ``update [P]`` and add this round's noise. Return a new tensor."""
        if not context.secret:
            generator = generator_for(context.seed, "privacy", context.round_index, context.client)
            return self.protect(update, generator)

        protected = self._clipped(update)
        if self.noise_multiplier:
            # The key depends on the update: a site that trains again may compute another one, as from changed data.
            key = hmac.digest(context.secret, digest(update), "sha256")
            add_secret_noise(protected, self.noise_multiplier * self.clip, key)
        return protected

    def protect(self, update: Tensor, generator: torch.Generator) -> Tensor:
        """Clip an update, add noise to it, and return the result as a new tensor.

        Args:
            update: the client's model minus a model that all clients know, floating-point ``[P]``, on any device.
            generator: the noise's generator of random numbers, on the CPU.
        """
        protected = self._clipped(update)
        if self.noise_multiplier:
            deviation = self.noise_multiplier * self.clip
            noise = torch.randn(update.shape, generator=generator, dtype=update.dtype)
            protected.add_(noise.to(update.device), alpha=deviation)
        return protected

    def _clipped(self, update: Tensor) -> Tensor:
        # In float32 the norm of 25 million elements would be 0.1 % too small.
        norm = vector_norm(update, dtype=torch.float64).item()
        if not 0 < norm < math.inf:
            return torch.zeros_like(update)
        factor = min(1.0, self.clip / norm)
        clipped = update * factor
        while vector_norm(clipped, dtype=torch.float64) > self.clip:  # because of rounding
            factor *= 1 - torch.finfo(update.dtype).eps
            clipped = update * factor
        return clipped

    def epsilon(self, rounds: int) -> float:
        """Compute the privacy loss epsilon of a client that has taken part in ``rounds`` rounds."""
        return gaussian_epsilon(self.noise_multiplier, rounds, self.delta)

    def affordable_rounds(self) -> int | None:
        """Return in how many rounds a client may take part before its epsilon exceeds ``max_epsilon``. None without a
        limit."""
        if self.max_epsilon is None:
            return None
        return bisect_right(range(1, 10**9), self.max_epsilon, key=self.epsilon)

    def check(self, space: ParameterSpace) -> None:
        """Check that noise can be added to every element of the module's vectors, which ``space`` describes.

        Raises:
            ConfigurationError: the module has floating-point buffers, and noise is added.
        """
        if self.noise_multiplier and space.size > space.num_parameters:
            raise ConfigurationError(
                f"{self!r} adds noise to everything that a client shares, but noise is not possible for buffers such "
                f"as {space.names[-1]!r}: a running variance would become negative. Replace BatchNorm by GroupNorm, or "
                "remove it."
            )


#: Part of a warning: results from docs/results/privacy_contributions.md.
EFFECT_OF_NOISE = (
    "on digits and Fashion-MNIST, below epsilon = 100, SSV and FedSV ranked clients nearly at random (Spearman's "
    "correlation with the values without noise -0.2 to 0.4), CSSV and CGSV no better than numbers of samples do"
)


def warn_of_noise(privacy: PrivateUpload, metrics: Sequence[str]) -> None:
    """Warn that the values of ``metrics`` come from noised updates. Do nothing if there is no noise or no such metric.

    Args:
        privacy: the run's privacy mechanism.
        metrics: names of the metrics that are computed from clients' updates.
    """
    if not privacy.noise_multiplier or not metrics:
        return
    warnings.warn(
        f"metrics {list(metrics)} are computed from noised updates (noise_multiplier={privacy.noise_multiplier:g}): "
        f"{EFFECT_OF_NOISE}. See docs/results/privacy_contributions.md.",
        stacklevel=2,
    )
