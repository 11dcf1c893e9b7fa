"""PartialFederatedShapley: the Shapley values of the last round's coalition game.

Sun et al., "ShapleyFL: Robust Federated Learning Based on Shapley Value", KDD 2023, definition 4.1.
"""

from __future__ import annotations

from typing import Any, Literal

from flsv.metrics.coalitions.moving_average import MovingAverage
from flsv.metrics.coalitions.value import CoalitionValue
from flsv.utilities.declared import Momentum


class PartialFederatedShapley(CoalitionValue, chosen=("value", "fold")):
    r"""The Shapley value of each round's coalition game, whose players are the clients of that round.

    .. math::
        SV_i = \frac1k \sum_{S \subseteq C \setminus i} \frac{U(S \cup i) - U(S)}{\binom{k-1}{|S|}}

    with C the round's k clients, and U(S) the performance, on the server's validation set, of the model that is
    aggregated from the updates of the clients in S. A client that does not take part in a round keeps its previous
    value; a client that never took part is NaN.

    As input to ``update``: ``client_ids [k]``, a ``utility(masks: bool [K, k]) -> [K]`` that returns the utilities of K
    coalitions (or ``[K, M]`` for M classes), and a ``generator``. Inside a ``FederatedLoop`` the utility is the round's
    coalition game; all metrics of a round share its evaluations. ``compute`` gives ``[num_clients]``, in the utility's
    unit, or ``[num_clients, num_classes]``.

    When not to use it:
        For payment for a whole run, since the value is that of the last round only: take
        :class:`flsv.metrics.CumulativeShapley`. Without a validation set at the server. Where clients may return the
        model unchanged, unless ``weighting="fixed"``.

    Args:
        num_clients: n, the number of clients. None inside a ``FederatedLoop``, which takes it from the data.
        num_classes: M, the number of classes. If it is set, values are per class: each class's accuracy is a game of
            its own.
        estimator: a name in ``flsv.functional.ESTIMATORS``, a function of the same signature, or ``"auto"``: exact for
            up to 10 players, else ``"surrogate"`` with 20 evaluations per player, or with the budget in
            ``estimator_args``.
        estimator_args: keywords for the estimator, such as ``{"budget": 200}``.
        performance: the performance measure of a coalition's model if values are not per class: ``"accuracy"``,
            ``"balanced_accuracy"``, ``"negative_loss"``, ``"auroc"``, ``"average_precision"``, ``"f1"``, any name that
            the module logs when it validates, or any torchmetrics metric; see :mod:`flsv.games.performance`.
        weighting: how a coalition's updates are averaged: ``"uniform"``, by ``"samples"``, or ``"fixed"``: every update
            has the weight 1/k, whatever the size of the coalition. With fixed weights an update of zero changes no
            coalition's model (without BatchNorm) and has value 0. In an average an update of zero shrinks the others'
            updates: if local training overshoots, this improves the model, and a free rider gets a positive value.
        momentum: mu in [0, 1), the weight of the past in a moving average over a client's rounds; 0 gives the last
            round's value.
        per_class: compute values per class, with the number of classes taken from the data.
        mode: whether less (``"min"``) or more (``"max"``) is better, for a logged value, and for a torchmetrics metric
            without ``higher_is_better``.
        init: the value before a client's first round, from which the moving average starts: a number, or ``"uniform"``,
            1/n, as in S-FedAvg. Samplers and aggregators assume this value for clients that never took part. None: the
            average starts at the first round's value.
        kwargs: further arguments of ``torchmetrics.Metric``.

    Raises:
        ConfigurationError: the estimator, its arguments or the weighting are unknown; the momentum is outside [0, 1); a
            logged name has no ``mode``; ``init`` is neither a number nor "uniform"; before the first round: the module
            does not log the name.

    Example:
        >>> import torch
        >>> metric = PartialFederatedShapley(num_clients=4, estimator="exact")
        >>> glove = lambda masks: (masks[:, 0] & masks[:, 1:].any(1)).float()  # one left glove, two right ones
        >>> metric.update(torch.tensor([0, 1, 3]), glove)
        >>> metric.compute()
        tensor([0.6667, 0.1667,    nan, 0.1667])
        >>> metric.diagnostics()["evaluations"]
        tensor(8)
    """

    to_pay_by = False

    def __init__(
        self,
        num_clients: int | None = None,
        num_classes: int | None = None,
        *,
        momentum: Momentum = 0.0,
        init: float | Literal["uniform"] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_clients, num_classes, value="shapley", fold=MovingAverage(momentum, init), **kwargs)
