"""The papers' choices as presets of CoalitionValue.

Sun et al., "ShapleyFL: Robust Federated Learning Based on Shapley Value", KDD 2023, definitions 4.1 and 4.2
(PartialFederatedShapley, SurrogateFederatedShapley); Wang et al., "A Principled Approach to Data Valuation for
Federated Learning", 2020, definition 1 (CumulativeShapley); Guo et al., "A Fair Contribution Measurement Method for
Federated Learning", Sensors 24(15), 2024, Algorithm 1 (DecayedShapley).

A preset takes the arguments of CoalitionValue that it does not choose itself.
"""

from __future__ import annotations

from typing import Any, Literal

from flsv.functional.confidence import Confidence
from flsv.functional.shapley.normalize import Normalization
from flsv.metrics.coalitions.folds import Decay, LowerBound, MovingAverage, Sum, SurrogateAverage
from flsv.metrics.coalitions.value import CoalitionValue, Weighting
from flsv.utilities.declared import Momentum, Share

CoalitionWeights = Literal["renormalized", "fixed"]


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
        To pay by for a whole run, since it holds the last rounds only: take :class:`CumulativeShapley`. Without a
        validation set at the server. With weights by samples and clients who may return the model unchanged, unless
        ``weighting="fixed"``.

    Args:
        num_clients: n. None inside a ``FederatedLoop``: taken from the data.
        num_classes: M. Where it is given, values are per class: the game of each class's accuracy.
        estimator: a name in ``flsv.functional.ESTIMATORS``, a function of the same signature, or ``"auto"``:
            exact for up to 10 players, else ``"surrogate"`` with 20 evaluations per player, or with a budget of yours.
        estimator_args: keywords for the estimator, such as ``{"budget": 200}``.
        performance: what a coalition's model is measured by, where values are not per class: ``"accuracy"``,
            ``"balanced_accuracy"``, ``"negative_loss"``, ``"auroc"``, ``"average_precision"``, ``"f1"``, any name that
            the module logs when it validates, or any torchmetrics metric; see :mod:`flsv.games.performance`.
        weighting: how a coalition's updates are averaged: ``"uniform"``, by ``"samples"``, or ``"fixed"``: every update
            counts 1/k, however many are in the coalition. Then an update of zero changes no coalition's model (without
            BatchNorm) and is worth exactly 0. In an average it draws the others' updates towards 0: where local
            training overshoots that is a gain, and a free rider is paid for it.
        momentum: mu in [0, 1) of a moving average over a client's rounds; 0: the last round's value.
        per_class: values per class, with the number of classes taken from the data.
        mode: whether less (``"min"``) or more (``"max"``) of a logged value is better; of a torchmetrics metric where
            it does not say so itself.
        init: the value before a client's first round, from which the moving average starts: a number, or
            ``"uniform"``, 1/n, as in S-FedAvg. Samplers and aggregators take clients never seen to be worth it. None:
            there is none, the average starts at the first round's value.
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


class LeaveOneOut(CoalitionValue, chosen=("value", "estimator", "estimator_args", "fold")):
    r"""The loss of performance if a client's update is left out of the round, by k + 1 evaluations a round.

    .. math::
        v_i = U(C) - U(C \setminus i)

    Inputs and arguments as :class:`PartialFederatedShapley`'s, without the estimator's. ``compute`` gives
    ``[num_clients]``, in the utility's unit, or ``[num_clients, num_classes]``; a client never seen is NaN.

    When not to use it:
        To pay by: of two clients with the same data neither is missed, and both have 0; values do not sum to anything.
        As a check of whom one could do without it is cheap.

    Example:
        >>> import torch
        >>> metric = LeaveOneOut(num_clients=3)
        >>> metric.update(torch.arange(3), lambda masks: masks.float() @ torch.tensor([1.0, 2.0, 3.0]))
        >>> metric.compute()
        tensor([1., 2., 3.])
    """

    to_pay_by = False

    def __init__(
        self, num_clients: int | None = None, num_classes: int | None = None, *, momentum: Momentum = 0.0, **kwargs: Any
    ) -> None:
        super().__init__(
            num_clients,
            num_classes,
            value="leave_one_out",
            estimator="auto",
            estimator_args=None,
            fold=MovingAverage(momentum),
            **kwargs,
        )


class SurrogateFederatedShapley(CoalitionValue, chosen=("num_classes", "value", "fold", "per_class")):
    r"""The surrogate federated Shapley value.

    .. math::
        NSV_i = \frac{SV_i - \min SV}{\max SV - \min SV}, \qquad
        SSV_i \leftarrow \beta\, SSV_i + (1 - \beta)\, NSV_i \quad (i \in C)

    with minimum and maximum over the round's cohort; where all values are equal NSV is 1/2 (the paper leaves it open).
    A client outside the cohort keeps its value; everybody starts at ``init``.

    **Free riders.** As the paper defines it, the value pays a client that returns the model as it got it, for two
    reasons. In an average over the coalition an update of zero makes the others' steps shorter, and where local
    training overshoots that is a gain; and min-max moves the zero, so that whoever does nothing ranks above everybody
    with a negative value. Measured with FedAvg on the digits (8 clients, one of them a free rider, 20 rounds; equal
    data and Dirichlet 0.5, 2 seeds each): the free rider's Shapley values are 0.022 to 0.035 on average, the honest
    clients' 0.002 to 0.004; it ranks first, with 0.18 to 0.21 of the SSV where an equal share is 0.125. Neither remedy
    is enough by itself: ``normalize="positive"`` gives it 0.25 to 0.38, ``weighting="fixed"`` 0.10 to 0.12.
    With ``normalize="positive", weighting="fixed", init=None`` it has exactly 0, and no weight under
    :class:`flsv.aggregation.ShapleyWeighted`. That holds for exact values (cohorts of up to 10 clients), and for
    models without BatchNorm, whose statistics are averaged in every game. A round that gains nothing from anybody
    counts as 0 for all.

    Inputs as for :class:`PartialFederatedShapley`. ``compute`` gives ``[num_clients]`` in [0, 1], NaN for clients never
    seen; samplers and aggregators take those to be worth ``init``, the ``prior``.

    When not to use it:
        To pay by as it is: values are moved to [0, 1], so that whoever harms the model and whoever does nothing have
        some; see free riders above. It is made for sampling and weighting clients.

    Args:
        num_clients: n. None inside a ``FederatedLoop``: taken from the data.
        beta: the weight of the past. The authors' code weighs the present with 0.3, which is beta = 0.7 in their eq. 3.
        init: the value before a client's first round. None: there is none, the average starts at the first round's.
        estimator: as for :class:`PartialFederatedShapley`.
        estimator_args: likewise.
        performance: likewise.
        weighting: likewise.
        normalize: ``"min-max"``, as above, or ``"positive"``: max(SV_i, 0) / max SV; see
            :func:`flsv.functional.normalize_shapley`.
        mode: as for :class:`PartialFederatedShapley`.
        kwargs: see ``torchmetrics.Metric``.

    Raises:
        ConfigurationError: beta outside [0, 1), init outside [0, 1]; an unknown estimator or argument of one, or
            normalization.

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
        fold = SurrogateAverage(beta, init, normalize)
        super().__init__(num_clients, None, value="shapley", fold=fold, per_class=False, **kwargs)


class CumulativeShapley(CoalitionValue, chosen=("value", "fold")):
    r"""FedSV, ``--config fedsv``: the sum of a client's Shapley values over the rounds in which it took part; 0 in all
    others.

    .. math::
        \phi_i = \sum_{t : i \in C_t} SV_i(t)

    Inputs and arguments as for :class:`PartialFederatedShapley`, but for ``momentum`` and ``init``. ``compute`` gives
    ``[num_clients]`` or ``[num_clients, num_classes]``; clients never seen are NaN. The standard errors of the rounds,
    which are independent, add in squares.

    When not to use it:
        Where clients take part in different numbers of rounds and should not be paid for that: whoever is drawn more
        often can have more. Where a single round's loss jumps: its game counts as much as any other. Without a
        validation set at the server.

    Example:
        >>> import torch
        >>> metric = CumulativeShapley(num_clients=3)
        >>> worth = lambda masks: masks.float() @ torch.tensor([1.0, 3.0])
        >>> metric.update(torch.tensor([0, 2]), worth)
        >>> metric.update(torch.tensor([0, 1]), worth)
        >>> metric.compute()
        tensor([2., 3., 3.])
    """

    def __init__(self, num_clients: int | None = None, num_classes: int | None = None, **kwargs: Any) -> None:
        super().__init__(num_clients, num_classes, value="shapley", fold=Sum(), **kwargs)


class LowerBoundShapley(CoalitionValue, chosen=("value", "fold")):
    r"""A one-sided lower confidence bound of a client's mean Shapley value over its rounds.

    .. math:: v_i = \overline{SV}_i - t_{T_i - 1}(\text{confidence})\, \frac{s_i}{\sqrt{T_i}}

    with the mean and the spread over the :math:`T_i` rounds in which the client took part; the spread holds the error
    of a sampled estimate, and how values change in the course of training. A client in its first round has its value
    less its estimator's standard error times the normal quantile. Whoever is paid by it is paid for what is
    established: values that swing from round to round, as those of noise and of few samples do, count for less, and
    a client seen seldom for less than one seen often. It is no remedy against a client that comes as two, whose values
    are as steady as one's: for that take ``estimator="banzhaf"``, under which two copies together have the one's value,
    or ``"beta"`` with ``{"alpha": 1, "beta": 4}``, under which they have less (see
    :mod:`flsv.functional.shapley.beta`).

    Inputs as for :class:`PartialFederatedShapley`. ``compute`` gives ``[num_clients]`` or ``[num_clients,
    num_classes]``, in the utility's unit; NaN for clients never seen. ``diagnostics`` holds the means, too.

    When not to use it:
        To say what somebody has contributed: it is what is established, lower the fewer rounds there are, and does not
        sum to what all have gained. With fewer than some ten rounds of a client.

    Args:
        num_clients: n. None inside a ``FederatedLoop``: taken from the data.
        num_classes: as for :class:`PartialFederatedShapley`.
        estimator: likewise.
        estimator_args: likewise.
        performance: likewise.
        weighting: likewise.
        per_class: likewise.
        mode: likewise.
        confidence: in [0.5, 1); 0.5 is the mean itself.
        kwargs: see ``torchmetrics.Metric``.

    Raises:
        ConfigurationError: confidence outside [0.5, 1); what :class:`PartialFederatedShapley` raises.

    Example:
        >>> import torch
        >>> metric = LowerBoundShapley(num_clients=3)
        >>> for worth in ([1.0, 3.0], [1.0, 5.0]):
        ...     metric.update(torch.tensor([0, 2]), lambda masks: masks.float() @ torch.tensor(worth))
        >>> metric.compute()
        tensor([1.0000,    nan, 0.9223])
    """

    def __init__(
        self,
        num_clients: int | None = None,
        num_classes: int | None = None,
        *,
        confidence: Confidence = 0.9,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_clients, num_classes, value="shapley", fold=LowerBound(confidence), **kwargs)


class DecayedShapley(CoalitionValue, chosen=("num_classes", "value", "fold", "weighting", "per_class")):
    r"""The decayed sum of each client's share of the rounds' gains.

    .. math::
        \phi_i = \sum_{t=1}^{R} \omega^t \frac{\phi_i(t)}{\sum_j \phi_j(t)}

    with :math:`\phi_i(t)` the Shapley value of the game of round t, whose sub-models are rebuilt from the round's
    updates with the weights of the round's own aggregation; so it is updated after that. A round in which nothing
    happens is skipped; in one whose values sum to nothing or less they are divided by the sum of their absolute values.
    Both are counted (``diagnostics``). A round that gains next to nothing counts as much as any other, and nothing
    bounds the shares of one with a small gain and values of both signs: ``normalize=False`` leaves the division out.

    With FedAvg it covers three baselines of the paper, the sum of the rounds' values (SOR), the multi-round index (MR)
    and the truncated one (TMR): ``DecayedShapley(**MULTI_ROUND_INDICES["MR"])``, see
    :mod:`flsv.functional.shapley.decayed`.

    As input to ``update``: ``client_ids [k]``, a ``utility(masks: bool [K, k]) -> [K]``, a ``generator`` and the
    ``round_index`` from 0. ``compute`` gives ``[num_clients]``; a client outside the cohort gets
    nothing in that round, one never seen in an evaluated round is NaN.

    When not to use it:
        Where late rounds matter: early ones count most, and clients who join late get little. Where a round's gains may
        be near 0 or negative, its shares swing.

    Args:
        num_clients: n. None inside a ``FederatedLoop``: taken from the data.
        decay: omega in (0, 1].
        threshold: rounds with decay^t below it are not evaluated at all; at most ``decay``.
        estimator: as for :class:`PartialFederatedShapley`.
        estimator_args: likewise.
        normalize: divide each round's values by their sum; else the value is in the unit of the performance.
        performance: what a coalition's model is measured by, see :mod:`flsv.games.performance`.
        coalition_weights: ``"renormalized"``, the aggregation's weights made to sum to 1 inside a coalition (eq. 4), or
            ``"fixed"``, as they are (Algorithm 1, line 12): a small coalition then makes a small step.
        mode: as for :class:`PartialFederatedShapley`.
        kwargs: see ``torchmetrics.Metric``.

    Raises:
        ConfigurationError: an unknown estimator or kind of weights; decay or threshold out of range.

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
    """How a coalition's updates are averaged by the aggregation's weights."""
    return "aggregation" if coalition_weights == "renormalized" else "aggregation-fixed"
