"""PartialFederatedShapley: the Shapley values of the last round's coalition game.

Sun et al., "ShapleyFL: Robust Federated Learning Based on Shapley Value", KDD 2023, definition 4.1.
"""

from __future__ import annotations

from typing import Any, Literal

from flsv.metrics.coalitions.moving_average import MovingAverage
from flsv.metrics.coalitions.value import CoalitionValue
from flsv.utilities.declared import Momentum


class PartialFederatedShapley(CoalitionValue, chosen=("value", "fold")):
    r"""The Shapley value of a round's coalition game, whose players are the cohort.

    .. math::
        SV_i = \frac1k \sum_{S \subseteq C \setminus i} \frac{U(S \cup i) - U(S)}{\binom{k-1}{|S|}}

    with U(S) the performance, on the server's validation set, of the model made of the updates of S. A client outside
    the cohort keeps its value; one never seen is NaN.

    As input to ``update``: ``client_ids [k]``, a ``utility(masks: bool [K, k]) -> [K]`` (or ``[K, M]``) and a
    ``generator``. Inside a ``FederatedLoop`` the utility is the round's coalition game; all metrics of a round share
    its evaluations. ``compute`` gives ``[num_clients]``, in the utility's unit, or ``[num_clients, num_classes]``.

    When not to use it:
        For payment for a whole run, since it has the last rounds only: take :class:`flsv.metrics.CumulativeShapley`.
        Without a validation set at the server. Where clients may return the model unchanged, unless
        ``weighting="fixed"``.

    Args:
        num_clients: n. None inside a ``FederatedLoop``: taken from the data.
        num_classes: M. Where it is set, values are per class: the game of each class's accuracy.
        estimator: a name in ``flsv.functional.ESTIMATORS``, a function of the same signature, or ``"auto"``:
            exact for up to 10 players, else ``"surrogate"`` with 20 evaluations per player, or with your budget.
        estimator_args: keywords for the estimator, such as ``{"budget": 200}``.
        performance: the performance measure of a coalition's model, where values are not per class: ``"accuracy"``,
            ``"balanced_accuracy"``, ``"negative_loss"``, ``"auroc"``, ``"average_precision"``, ``"f1"``, any name that
            the module logs when it validates, or any torchmetrics metric; see :mod:`flsv.games.performance`.
        weighting: how a coalition's updates are averaged: ``"uniform"``, by ``"samples"``, or ``"fixed"``: every update
            counts 1/k, however many are in the coalition. Then an update of zero changes no coalition's model (without
            BatchNorm) and has value 0. In an average it shrinks the others' updates: where local training overshoots,
            that is a gain, and a free rider gets a positive value.
        momentum: mu in [0, 1) of a moving average over a client's rounds; 0: the last round's value.
        per_class: values per class, with the number of classes taken from the data.
        mode: whether less (``"min"``) or more (``"max"``) of a logged value is better; of a torchmetrics metric where
            it does not say so itself.
        init: the value before a client's first round, from which the moving average starts: a number, or
            ``"uniform"``, 1/n, as in S-FedAvg. Samplers and aggregators assume it for clients never seen. None: the
            average starts at the first round's value.
        kwargs: see ``torchmetrics.Metric``.

    Raises:
        ConfigurationError: an unknown estimator, weighting or argument of an estimator, momentum outside [0, 1), a
            logged name without ``mode``, an ``init`` that is no number and not "uniform"; before the first round, a
            name that the module does not log.

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
