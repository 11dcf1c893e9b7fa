"""SurrogateFederatedShapley: ShapleyFL's moving average of normalized Shapley values.

Sun et al., "ShapleyFL: Robust Federated Learning Based on Shapley Value", KDD 2023, definition 4.2.
"""

from __future__ import annotations

from typing import Any

from flsv.functional.shapley.normalize import Normalization
from flsv.metrics.coalitions.moving_average import SurrogateAverage
from flsv.metrics.coalitions.value import CoalitionValue
from flsv.utilities.declared import Momentum, Share


class SurrogateFederatedShapley(CoalitionValue, chosen=("num_classes", "value", "fold", "per_class")):
    r"""The surrogate federated Shapley value: a moving average of Shapley values normalized to [0, 1] in each round.

    .. math::
        NSV_i = \frac{SV_i - \min SV}{\max SV - \min SV}, \qquad
        SSV_i \leftarrow \beta\, SSV_i + (1 - \beta)\, NSV_i \quad (i \in C)

    with :math:`SV_i` client *i*'s Shapley value in the round's game, minimum and maximum over the round's clients C,
    and :math:`\beta` the weight of the past; if all values are equal, NSV is 1/2 (the paper does not specify this
    case). A client that does not take part in a round keeps its value; all clients start at ``init``.

    **Free riders.** As the paper defines the value, a client that returns the model unchanged has a positive value, for
    two reasons. First, in an average over the coalition an update of zero shrinks the others' updates, which improves
    the model if local training overshoots. Second, min-max normalization moves the zero, so that a client that does
    nothing ranks above all clients with a negative value. Measured with FedAvg on the digits (8 clients, one of them a
    free rider, 20 rounds; equal data and Dirichlet 0.5, 2 seeds each): the free rider's Shapley values are 0.022 to
    0.035 on average, the honest clients' 0.002 to 0.004; it ranks first, with 0.18 to 0.21 of the sum of all SSV, where
    an equal share is 0.125. There are two remedies, and neither is enough by itself: with ``normalize="positive"`` the
    free rider has 0.25 to 0.38 of the sum, with ``weighting="fixed"`` 0.10 to 0.12. With ``normalize="positive",
    weighting="fixed", init=None`` it has exactly 0, and no weight under :class:`flsv.aggregation.ShapleyWeighted`. That
    holds for exact values (cohorts of up to 10 clients), and for models without BatchNorm, whose statistics are
    averaged in every game. In a round without a positive value all clients then have 0.

    Inputs are those of :class:`flsv.metrics.PartialFederatedShapley`. ``compute`` returns ``[num_clients]`` in [0, 1],
    NaN for clients that never took part; samplers and aggregators assume ``init`` for them.

    When not to use it:
        For payment as it is: values are mapped to [0, 1], so that clients that harm the model or do nothing can have
        positive values; see free riders above. The metric is meant for sampling and weighting clients.

    Args:
        num_clients: n, the number of clients. None inside a ``FederatedLoop``, which takes it from the data.
        beta: the weight of the past. The authors' code gives the present round the weight 0.3, which is beta = 0.7 in
            their eq. 3.
        init: the value before a client's first round. None: the average starts at the first round's value.
        estimator: the estimator of Shapley values, as for :class:`flsv.metrics.PartialFederatedShapley`.
        estimator_args: keywords for the estimator, such as ``{"budget": 200}``.
        performance: the performance measure of a coalition's model, see :mod:`flsv.games.performance`.
        weighting: how a coalition's updates are averaged, as for :class:`flsv.metrics.PartialFederatedShapley`.
        normalize: ``"min-max"``, as above, or ``"positive"``: max(SV_i, 0) / max SV; see
            :func:`flsv.functional.normalize_shapley`.
        mode: whether less (``"min"``) or more (``"max"``) of a logged value is better.
        kwargs: further arguments of ``torchmetrics.Metric``.

    Raises:
        ConfigurationError: ``beta`` is outside [0, 1) or ``init`` outside [0, 1]; the estimator, its arguments or the
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
        fold = SurrogateAverage(beta, init, normalize)
        super().__init__(num_clients, None, value="shapley", fold=fold, per_class=False, **kwargs)
