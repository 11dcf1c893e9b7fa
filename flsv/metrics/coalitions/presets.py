"""Presets of CoalitionValue: the choices of published methods."""

from __future__ import annotations

from typing import Any, Literal

from flsv.functional.shapleyfl import Normalization
from flsv.metrics.base import Claims
from flsv.metrics.coalitions.folds import MovingAverage, Sum
from flsv.metrics.coalitions.method_folds import Decay, SurrogateAverage
from flsv.metrics.coalitions.value import CoalitionValue, Weighting
from flsv.utilities.declared import Momentum, Share


class LeaveOneOut(CoalitionValue, chosen=("estimator", "estimator_args", "fold")):
    r"""The decrease of a round's performance without a client's update. A round of k clients takes k + 1 evaluations.

    .. math::
        v_i = U(C) - U(C \setminus i)

    U(S) is the performance of the model of coalition S, and C the round's k clients. Inputs and arguments are those of
    :class:`flsv.metrics.PartialFederatedShapley`, without the arguments of the estimator. ``compute`` gives
    ``[num_clients]``, in the utility's unit, or ``[num_clients, num_classes]``. A client that never took part is NaN.

    When not to use it:
        For payment: two clients with the same data both have 0, since neither is missed without the other. The values
        do not sum to the gain. It is a cheap check of which clients are dispensable.

    Example:
        >>> import torch
        >>> metric = LeaveOneOut(num_clients=3)
        >>> metric.update(torch.arange(3), lambda masks: masks.float() @ torch.tensor([1.0, 2.0, 3.0]))
        >>> metric.compute()
        tensor([1., 2., 3.])
    """

    to_pay_by = False

    def __init__(
        self,
        num_clients: int | None = None,
        num_classes: int | None = None,
        *,
        momentum: Momentum = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            num_clients,
            num_classes,
            estimator="leave_one_out",
            fold=MovingAverage(momentum),
            **kwargs,
        )


class CumulativeShapley(CoalitionValue, chosen=("fold",)):
    r"""The sum of a client's Shapley values over its rounds. This is FedSV (Wang et al., "A Principled Approach to Data
    Valuation for Federated Learning", 2020, definition 1).

    .. math::
        \phi_i = \sum_{t : i \in C_t} SV_i(t)

    :math:`SV_i(t)` is client *i*'s Shapley value in the game of round *t*, and :math:`C_t` the clients of that round.
    Inputs and arguments are those of :class:`flsv.metrics.PartialFederatedShapley`, without ``momentum`` and ``init``.
    ``compute`` gives ``[num_clients]`` or ``[num_clients, num_classes]``. Clients that never took part are NaN. The
    rounds' estimates are independent, so the variance of the sum is the sum of the rounds' variances.

    When not to use it:
        Where it should not matter in how many rounds a client takes part: a client that is drawn more often can have a
        larger sum. Multiplied by E[T] / T, with T the number of its rounds, the sum is an estimate of the value of its
        data instead of its part in this run (example below). Where a single
        round's loss jumps: its game counts as much as any other. Without a validation set at the server.

    Example:
        >>> import torch
        >>> metric = CumulativeShapley(num_clients=3)
        >>> worth = lambda masks: masks.float() @ torch.tensor([1.0, 3.0])
        >>> metric.update(torch.tensor([0, 2]), worth)
        >>> metric.update(torch.tensor([0, 1]), worth)
        >>> metric.compute()
        tensor([2., 3., 3.])

        A sampler had drawn two of three clients for each of these two rounds. A client that it never draws has NaN.

        >>> from flsv.sampling import UniformSampler
        >>> expected = metric.rounds * UniformSampler(2).inclusion_probabilities(3, {})
        >>> metric.compute() * expected / metric.participations
        tensor([1.3333, 4.0000, 4.0000])
    """

    def __init__(
        self, num_clients: int | None = None, num_classes: int | None = None, **kwargs: Any
    ) -> None:
        super().__init__(num_clients, num_classes, fold=Sum(), **kwargs)


class PartialFederatedShapley(CoalitionValue, chosen=("fold",)):
    r"""The Shapley value in each round's coalition game. Its players are the clients of that round (Sun et al.,
    "ShapleyFL", KDD 2023, definition 4.1).

    .. math::
        SV_i = \frac1k \sum_{S \subseteq C \setminus i} \frac{U(S \cup i) - U(S)}{\binom{k-1}{|S|}}

    with C the round's k clients, and U(S) the performance, on the server's validation set, of the model that is
    aggregated from the updates of the clients in S. A client that does not take part in a round keeps its previous
    value. A client that never took part is NaN.

    Inside a ``FederatedLoop`` the utility is the round's coalition game. All metrics of a round share its evaluations.
    ``compute`` gives ``[num_clients]``, in the utility's unit, or ``[num_clients, num_classes]``.

    When not to use it:
        For payment for a whole run, since the value is that of the last round only: take
        :class:`flsv.metrics.CumulativeShapley`. Without a validation set at the server. Where clients may return the
        model unchanged, unless ``weighting="fixed"``.

    Args:
        num_clients: n, the number of clients. None inside a ``FederatedLoop``.
        num_classes: M, the number of classes. If it is set, each class's accuracy is a game of its own.
        estimator: a name in ``flsv.functional.ESTIMATORS``, a function of the same signature, or ``"auto"``: exact for
            up to 10 players, else ``"surrogate"`` with 20 evaluations per player, or with the budget in
            ``estimator_args``.
        estimator_args: its keywords, such as ``{"budget": 200}``.
        performance: the performance measure of a coalition's model if values are not per class: ``"accuracy"``,
            ``"balanced_accuracy"``, ``"negative_loss"``, ``"auroc"``, ``"average_precision"``, ``"f1"``, any name that
            the module logs when it validates, or any torchmetrics metric. See :mod:`flsv.scores.performance`.
        weighting: how a coalition's updates are averaged: ``"uniform"``, by ``"samples"``, or ``"fixed"``: every update
            has the weight 1/k, whatever the size of the coalition. With fixed weights an update of zero changes no
            coalition's model (without BatchNorm) and has value 0. In an average it shrinks the others' updates: if
            local training overshoots, a free rider gets a positive value.
        momentum: mu in [0, 1), the weight of the past in a moving average over a client's rounds. 0 gives the last
            round's value.
        per_class: compute values per class.
        mode: whether less (``"min"``) or more (``"max"``) is better, for a logged value, and for a torchmetrics metric
            without ``higher_is_better``.
        init: the value before a client's first round, from which the moving average starts: a number, or ``"uniform"``,
            1/n, as in S-FedAvg. Samplers and aggregators assume this value for clients that never took part. None: the
            average starts at the first round's value.
        kwargs: arguments of ``torchmetrics.Metric``.

    Raises:
        ConfigurationError: the estimator, its arguments or the weighting are unknown, the momentum is outside [0, 1), a
            logged name has no ``mode``, ``init`` is neither a number nor "uniform", or before the first round: the
            module does not log the name.

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
        fold = MovingAverage(momentum=momentum, init=init)
        super().__init__(num_clients, num_classes, fold=fold, **kwargs)


class SurrogateFederatedShapley(CoalitionValue, chosen=("num_classes", "fold", "per_class")):
    r"""A moving average of Shapley values normalized to [0, 1]. This is SSV (Sun et al., "ShapleyFL", KDD 2023,
    definition 4.2).

    .. math::
        NSV_i = \frac{SV_i - \min SV}{\max SV - \min SV}, \qquad
        SSV_i \leftarrow \beta\, SSV_i + (1 - \beta)\, NSV_i \quad (i \in C)

    with :math:`SV_i` client *i*'s Shapley value in the round's game, minimum and maximum over the round's clients C,
    and :math:`\beta` the weight of the past. If all values are equal, NSV is 1/2. A client that does not take part in a
    round keeps its value. All clients start at ``init``.

    **Free riders.** As the paper defines the value, a client that returns the model unchanged has a positive value:
    min-max moves the zero. With ``normalize="positive", weighting="fixed", init=None`` together its value is exactly 0,
    for exact values and models without BatchNorm.

    Inputs are those of :class:`flsv.metrics.PartialFederatedShapley`. ``compute`` returns ``[num_clients]`` in [0, 1],
    NaN for clients that never took part. Samplers and aggregators assume ``init`` for them.

    When not to use it:
        For payment: clients that do harm or nothing have positive values. It is made for sampling and weighting
        clients.

    Args:
        num_clients: n, the number of clients. None inside a ``FederatedLoop``.
        beta: the weight of the past. The authors' code gives the present round the weight 0.3, which is beta = 0.7 in
            their eq. 3.
        init: the value before a client's first round. None: the average starts at the first round's value.
        estimator: as for :class:`flsv.metrics.PartialFederatedShapley`.
        estimator_args: its keywords, such as ``{"budget": 200}``.
        performance: the performance measure, see :mod:`flsv.scores.performance`.
        weighting: how a coalition's updates are averaged, as for :class:`flsv.metrics.PartialFederatedShapley`.
        normalize: ``"min-max"``, as above, or ``"positive"``: max(SV_i, 0) / max SV. See
            :func:`flsv.functional.normalize_shapley`.
        mode: whether less (``"min"``) or more (``"max"``) of a logged value is better.
        kwargs: arguments of ``torchmetrics.Metric``.

    Raises:
        ConfigurationError: ``beta`` is outside [0, 1) or ``init`` outside [0, 1], the estimator, its arguments or the
            normalization are unknown.

    Example:
        >>> import torch
        >>> metric = SurrogateFederatedShapley(num_clients=3)
        >>> metric.update(torch.tensor([0, 2]), lambda masks: masks.float() @ torch.tensor([1.0, 3.0]))
        >>> metric.compute()
        tensor([0.3500,    nan, 0.6500])
    """

    to_pay_by = False

    def __init__(
        self,
        num_clients: int | None = None,
        beta: Momentum = 0.7,
        init: Share | None = 0.5,
        *,
        normalize: Normalization = "min-max",
        **kwargs: Any,
    ) -> None:
        fold = SurrogateAverage(momentum=beta, init=init, normalize=normalize)
        super().__init__(num_clients, num_classes=None, fold=fold, per_class=False, **kwargs)


CoalitionWeights = Literal["renormalized", "fixed"]


class DecayedShapley(CoalitionValue, chosen=("num_classes", "fold", "weighting", "per_class")):
    r"""The decayed sum of each client's share of the rounds' gains. Guo et al. (Sensors 24(15), 2024, Algorithm 1)
    propose it.

    .. math::
        \phi_i = \sum_{t=1}^{R} \omega^t \frac{\phi_i(t)}{\sum_j \phi_j(t)}

    with :math:`\omega` the decay and :math:`\phi_i(t)` client i's Shapley value in the game of round t. The game's
    coalition models are rebuilt from the round's updates with the weights of the round's aggregation, so the metric is
    updated after the aggregation. A round whose values are all 0 is skipped. Values that sum to 0 or less are divided
    by the sum of their absolute values instead. ``diagnostics`` counts the rounds of either kind. ``normalize=False``
    omits the division.

    With FedAvg it covers three baselines of the paper, the sum of the rounds' values (SOR), the multi-round index (MR)
    and the truncated one (TMR): ``DecayedShapley(**MULTI_ROUND_INDICES["MR"])``, see
    :mod:`flsv.functional.shapley.decayed`.

    ``compute`` gives ``[num_clients]``. A client that does not take part in a round gets 0 in it, and a client that
    took part in no evaluated round is NaN.

    When not to use it:
        Where late rounds matter: early rounds have the largest weights, and clients that join late get little. Where a
        round's gain may be near 0 or negative: its shares can be arbitrarily large.

    Args:
        num_clients: n, the number of clients. None inside a ``FederatedLoop``.
        decay: omega in (0, 1]: round t = 1, 2, ... has the weight omega^t.
        threshold: rounds with omega^t below this number are not evaluated. At most ``decay``.
        estimator: as for :class:`flsv.metrics.PartialFederatedShapley`.
        estimator_args: its keywords, such as ``{"budget": 200}``.
        normalize: divide each round's values by their sum. False: the value is in the unit of the performance.
        performance: the performance measure, see :mod:`flsv.scores.performance`.
        coalition_weights: the weights of a coalition's updates: ``"renormalized"``, the aggregation's weights, scaled
            to sum to 1 inside the coalition (eq. 4), or ``"fixed"``, the aggregation's weights without scaling
            (Algorithm 1, line 12), so that a small coalition's model moves less.
        mode: whether less (``"min"``) or more (``"max"``) of a logged value is better.
        kwargs: arguments of ``torchmetrics.Metric``.

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

    claims: Claims = ("effect",)

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
        super().__init__(
            num_clients,
            num_classes=None,
            fold=Decay(decay=decay, threshold=threshold, normalize=normalize),
            weighting=weighting_of(coalition_weights),
            per_class=False,
            **kwargs,
        )


def weighting_of(coalition_weights: CoalitionWeights) -> Weighting:
    """Convert ``coalition_weights`` to the argument ``weighting`` of :class:`CoalitionValue`."""
    return "aggregation" if coalition_weights == "renormalized" else "aggregation-fixed"
