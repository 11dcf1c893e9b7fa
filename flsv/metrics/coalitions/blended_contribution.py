"""BlendedContribution: the mean of a client's share of the rounds' gains and its share of agreement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flsv.core import ClientMatrix
from flsv.functional.gradient_agreement import gradient_agreement
from flsv.functional.shapley.game import Utility
from flsv.metrics.coalitions.presets import DecayedShapley
from flsv.metrics.cosine_gradient_shapley import cosines_with_sum, parameters_of


class BlendedContribution(
    DecayedShapley,
    chosen=(
        "num_classes",
        "fold",
        "weighting",
        "per_class",
        "threshold",
        "normalize",
        "coalition_weights",
    ),
):
    r"""The mean of a client's shares of the rounds' gains and of agreement.

    .. math::
        u_i = \sum_t \omega^t \phi_i(t), \qquad a_i = \overline{\cos(d_i^t, d_N^t)}, \qquad
        \psi_i = \frac12 \frac{\max(u_i, 0)}{\sum_j \max(u_j, 0)} + \frac12 \frac{\max(a_i, 0)}{\sum_j \max(a_j, 0)}

    with :math:`\phi_i(t)` client i's Shapley value in the game of round t, :math:`\omega` the decay, :math:`d_i^t`
    client i's update, and :math:`d_N^t` the sum of the updates, each scaled to length 1 and weighted as in the round's
    aggregation, see :class:`flsv.metrics.CosineGradientShapley`. The two halves fail in different federations: the
    Shapley values where a round's gains are noise or classes are learned one after another, the cosines where the
    majority is wrong. This method is not from a paper. Both halves and the decay were chosen on the benchmark's
    tuning federations (docs/benchmark.md).

    If no client has a positive gain u, the cosines alone determine the values. If no client has a positive mean cosine
    a, the gains alone. If neither, all values are 0. In a round in which it does not take part a client has no gain and
    no cosine. A client that never took part is NaN.

    ``compute`` gives ``[num_clients]``, shares that sum to 1.

    When not to use it:
        Where money depends on it: take :class:`flsv.metrics.ShadowShapley` or ``flsv retrain``. A client that copies
        another's updates gets as much, and one that splits its samples between two names nearly twice as much. Clients
        that join late get little of the first half.

    Args:
        num_clients: n, the number of clients. None inside a ``FederatedLoop``.
        decay: omega in (0, 1]: round t = 1, 2, ... has the weight omega^t.
        estimator: as for :class:`flsv.metrics.PartialFederatedShapley`.
        estimator_args: its keywords, such as ``{"budget": 200}``.
        performance: the performance measure, see :mod:`flsv.scores.performance`.
        mode: whether less (``"min"``) or more (``"max"``) of a logged value is better.
        kwargs: arguments of ``torchmetrics.Metric``.

    Raises:
        ConfigurationError: the estimator is unknown, or the decay is out of range.
        ValueError: shapes do not fit, or client ids are unknown or repeated.

    Example:
        >>> metric = BlendedContribution(num_clients=4)
        >>> updates = torch.tensor([[2.0, 0.0], [1.0, 0.0], [-1.0, 0.0]])
        >>> game = lambda masks: masks.float() @ torch.tensor([3.0, 1.0, 0.0])
        >>> metric.update(torch.tensor([0, 1, 3]), game, updates)
        >>> metric.compute()
        tensor([0.6250, 0.3750,    nan, 0.0000])
    """

    claims = ("effect", "weight")
    unit = "share"
    sign = "larger: the client's updates improve the model more, and agree with the cohort's."
    cost = "a validation of every coalition's model, and two products with the matrix of updates."
    plot_lower_bound = 0.0
    plot_upper_bound = 1.0

    total: Tensor
    participations: Tensor
    cosine: Tensor

    def __init__(self, num_clients: int | None = None, decay: float = 0.8, **kwargs: Any) -> None:
        super().__init__(num_clients, decay, normalize=False, **kwargs)

    @property
    def needs(self) -> Sequence[str]:  # type: ignore[override]  # depends on the weighting
        """Names of attributes of a :class:`flsv.Round` that the functions in :attr:`round_fields` read."""
        return (*super().needs, "matrix", "space")

    @property
    def round_fields(self) -> dict[str, Any]:
        """Functions ``{argument: f(round)}`` with which a ``FederatedLoop`` computes arguments of ``update``."""
        return {**super().round_fields, "client_updates": parameters_of}

    def init_states(self, num_clients: int, num_classes: int | None) -> None:
        super().init_states(num_clients, num_classes)
        self.add_state(
            "cosine", torch.zeros(num_clients, dtype=torch.float64), dist_reduce_fx="sum"
        )

    def update(  # type: ignore[override]  # torchmetrics' update takes anything
        self,
        client_ids: Tensor,
        utility: Utility,
        client_updates: Tensor | ClientMatrix,
        generator: torch.Generator | None = None,
        round_index: int = 0,
        aggregation_weights: Tensor | None = None,
    ) -> None:
        """Update the states with one round.

        Args:
            client_ids: ``[k]``, the round's clients.
            utility: the round's coalition game, ``utility(masks: bool [K, k]) -> [K]``, for K coalitions.
            client_updates: ``[k, P]``, the clients' updates of the P parameters (without buffers). A ``FederatedLoop``
                passes the round's :class:`ClientMatrix`.
            generator: the estimator's generator of random numbers.
            round_index: the round's index, from 0.
            aggregation_weights: ``[k]``, the clients' weights in the round's aggregation. None: equal weights.
        """
        super().update(client_ids, utility, generator, round_index, aggregation_weights)
        matrix = self._matrix(client_updates)
        norms = matrix.norms()
        if aggregation_weights is None:
            weights = torch.ones_like(norms)
        else:
            weights = aggregation_weights.to(norms)
        cosine = cosines_with_sum(matrix, norms, weights)
        self.cosine = self.cosine.index_add(0, client_ids, cosine.to(self.cosine))

    def compute(self) -> Tensor:
        """Compute the shares ``[num_clients]``, NaN for clients that never took part."""
        return gradient_agreement(super().compute(), self.cosine / self.participations).to(
            self.total
        )

    def diagnostics(self) -> dict[str, Tensor]:
        """Return the parts of each client's value. ``gain`` is its decayed sum :math:`u_i`, ``cosine`` its mean cosine
        :math:`a_i`, both ``[num_clients]``. The rest is from :class:`flsv.metrics.DecayedShapley`.
        """
        return {
            **super().diagnostics(),
            "gain": super().compute(),
            "cosine": self.cosine / self.participations,
        }
