"""Presets of CoalitionValue that keep a round's value, or a moving average: PartialFederatedShapley, LeaveOneOut and
SurrogateFederatedShapley.

Sun et al., "ShapleyFL: Robust Federated Learning Based on Shapley Value", KDD 2023, definitions 4.1 and 4.2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from torchmetrics import Metric

from flsv.arguments import check_number
from flsv.functional.shapley import ShapleyEstimate
from flsv.functional.shapley.normalize import Normalization
from flsv.games.performance import Mode
from flsv.metrics.coalitions.folds import MovingAverage, SurrogateAverage
from flsv.metrics.coalitions.value import CoalitionValue, Weighting


class PartialFederatedShapley(CoalitionValue):
    r"""The Shapley value of a round's coalition game, whose players are the cohort.

    .. math::
        SV_i = \frac1k \sum_{S \subseteq C \setminus i} \frac{U(S \cup i) - U(S)}{\binom{k-1}{|S|}}

    with U(S) the performance, on the server's validation set, of the model made of the updates of S. A client outside
    the cohort keeps its value; one never seen is NaN.

    As input to ``update``: ``client_ids [k]``, a ``utility(masks: bool [K, k]) -> [K]`` (or ``[K, M]``) and a
    ``generator``. Inside a ``FederatedLoop`` the utility is the round's coalition game; all metrics of a round share
    its evaluations. ``compute`` gives ``[num_clients]``, in the utility's unit, or ``[num_clients, num_classes]``.

    Args:
        num_clients: n. None inside a ``FederatedLoop``: taken from the data.
        num_classes: M. Where it is given, values are per class: the game of each class's accuracy.
        estimator: a name in ``flsv.functional.shapley.ESTIMATORS``, a function of the same signature, or ``"auto"``:
            exact for up to 10 players, else ``"surrogate"`` with 20 evaluations per player.
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

    def __init__(
        self,
        num_clients: int | None = None,
        num_classes: int | None = None,
        estimator: str | Callable[..., ShapleyEstimate] = "auto",
        estimator_args: dict[str, Any] | None = None,
        performance: str | Metric = "accuracy",
        weighting: Weighting = "uniform",
        momentum: float = 0.0,
        per_class: bool = False,
        mode: Mode | None = None,
        init: float | Literal["uniform"] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            num_clients,
            num_classes,
            performance,
            estimator=estimator,
            estimator_args=estimator_args,
            fold=MovingAverage(momentum, init),
            weighting=weighting,
            per_class=per_class,
            mode=mode,
            **kwargs,
        )


class LeaveOneOut(CoalitionValue):
    """The loss of performance if a client's update is left out of the round: U(C) - U(C without i). k + 1 evaluations a
    round.

    Arguments as :class:`PartialFederatedShapley`'s, without the estimator's.

    Example:
        >>> import torch
        >>> metric = LeaveOneOut(num_clients=3)
        >>> metric.update(torch.arange(3), lambda masks: masks.float() @ torch.tensor([1.0, 2.0, 3.0]))
        >>> metric.compute()
        tensor([1., 2., 3.])
    """

    def __init__(
        self,
        num_clients: int | None = None,
        num_classes: int | None = None,
        performance: str | Metric = "accuracy",
        weighting: Weighting = "uniform",
        momentum: float = 0.0,
        per_class: bool = False,
        mode: Mode | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            num_clients,
            num_classes,
            performance,
            "leave_one_out",
            fold=MovingAverage(momentum),
            weighting=weighting,
            per_class=per_class,
            mode=mode,
            **kwargs,
        )


class SurrogateFederatedShapley(CoalitionValue):
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
            normalisation.

    Example:
        >>> import torch
        >>> metric = SurrogateFederatedShapley(num_clients=3)
        >>> metric.update(torch.tensor([0, 2]), lambda masks: masks.float() @ torch.tensor([1.0, 3.0]))
        >>> metric.compute()
        tensor([0.3500,    nan, 0.6500])
    """

    def __init__(
        self,
        num_clients: int | None = None,
        beta: float = 0.7,
        init: float | None = 0.5,
        estimator: str | Callable[..., ShapleyEstimate] = "auto",
        estimator_args: dict[str, Any] | None = None,
        performance: str | Metric = "accuracy",
        weighting: Weighting = "uniform",
        normalize: Normalization = "min-max",
        mode: Mode | None = None,
        **kwargs: Any,
    ) -> None:
        check_number(self, "beta", beta, least=0, below=1)
        super().__init__(
            num_clients,
            None,
            performance,
            estimator=estimator,
            estimator_args=estimator_args,
            fold=SurrogateAverage(beta, init, normalize),
            weighting=weighting,
            mode=mode,
            **kwargs,
        )
