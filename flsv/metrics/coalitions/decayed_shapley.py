"""DecayedShapley: the decayed sum of the clients' shares of the rounds' gains.

Guo et al., "A Fair Contribution Measurement Method for Federated Learning", Sensors 24(15), 2024, Algorithm 1.
"""

from __future__ import annotations

from typing import Any, Literal

from flsv.metrics.coalitions.sums import Decay
from flsv.metrics.coalitions.value import CoalitionValue, Weighting

CoalitionWeights = Literal["renormalized", "fixed"]


class DecayedShapley(CoalitionValue, chosen=("num_classes", "value", "fold", "weighting", "per_class")):
    r"""The decayed sum of each client's share of the rounds' gains.

    .. math::
        \phi_i = \sum_{t=1}^{R} \omega^t \frac{\phi_i(t)}{\sum_j \phi_j(t)}

    with :math:`\omega` the decay and :math:`\phi_i(t)` client i's Shapley value in the game of round t. The game's
    coalition models are rebuilt from the round's updates with the weights of the round's aggregation, so the metric is
    updated after the aggregation. A round whose values are all 0 is skipped. Values that sum to 0 or less are divided
    by the sum of their absolute values instead. ``diagnostics`` counts the rounds of either kind. A round with hardly
    any gain has as much weight as any other, and its shares are unbounded if its values have both signs.
    ``normalize=False`` omits the division.

    With FedAvg it covers three baselines of the paper, the sum of the rounds' values (SOR), the multi-round index (MR)
    and the truncated one (TMR): ``DecayedShapley(**MULTI_ROUND_INDICES["MR"])``, see
    :mod:`flsv.functional.shapley.decayed`.

    As input to ``update``: ``client_ids [k]``, a ``utility(masks: bool [K, k]) -> [K]``, a ``generator`` and the
    ``round_index`` from 0. ``compute`` gives ``[num_clients]``; a client that does not take part in a round gets 0 in
    it, and a client that took part in no evaluated round is NaN.

    When not to use it:
        Where late rounds matter: early rounds have the largest weights, and clients that join late get little. Where a
        round's gain may be near 0 or negative: its shares can be arbitrarily large.

    Args:
        num_clients: n, the number of clients. None inside a ``FederatedLoop``, which takes it from the data.
        decay: omega in (0, 1]: round t = 1, 2, ... has the weight omega^t.
        threshold: rounds with omega^t below this number are not evaluated; at most ``decay``.
        estimator: the estimator of Shapley values, as for :class:`flsv.metrics.PartialFederatedShapley`.
        estimator_args: keywords for the estimator, such as ``{"budget": 200}``.
        normalize: divide each round's values by their sum; if False, the value is in the unit of the performance.
        performance: the performance measure of a coalition's model, see :mod:`flsv.games.performance`.
        coalition_weights: the weights of a coalition's updates: ``"renormalized"``, the aggregation's weights, scaled
            to sum to 1 inside the coalition (eq. 4), or ``"fixed"``, the aggregation's weights without scaling
            (Algorithm 1, line 12), so that a small coalition's model moves less.
        mode: whether less (``"min"``) or more (``"max"``) of a logged value is better.
        kwargs: further arguments of ``torchmetrics.Metric``.

    Raises:
        ConfigurationError: the estimator or the kind of weights is unknown, or the decay or threshold is out of range.

    Example:
        >>> import torch
        >>> metric = DecayedShapley(num_clients=3, decay=0.5)
        >>> metric.update(torch.tensor([0, 2]), lambda masks: masks.float() @ torch.tensor([1.0, 3.0]), round_index=0)
        >>> metric.update(torch.tensor([0, 2]), lambda masks: masks.float() @ torch.tensor([1.0, 1.0]), round_index=1)
        >>> metric.compute()
        tensor([0.2500,    nan, 0.5000])
    """

    def __init__(
        self,
        num_clients: int | None = None,
        decay: float = 0.8,
        threshold: float = 0.0,
        normalize: bool = True,
        *,
        coalition_weights: CoalitionWeights = "renormalized",
        **kwargs: Any,
    ) -> None:
        fold, weighting = Decay(decay, threshold, normalize), weighting_of(coalition_weights)
        super().__init__(num_clients, None, value="shapley", fold=fold, weighting=weighting, per_class=False, **kwargs)


def weighting_of(coalition_weights: CoalitionWeights) -> Weighting:
    """Convert ``coalition_weights`` to the argument ``weighting`` of :class:`CoalitionValue`."""
    return "aggregation" if coalition_weights == "renormalized" else "aggregation-fixed"
