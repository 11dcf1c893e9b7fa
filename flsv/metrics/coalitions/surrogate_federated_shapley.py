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
    r"""The surrogate federated Shapley value.

    .. math::
        NSV_i = \frac{SV_i - \min SV}{\max SV - \min SV}, \qquad
        SSV_i \leftarrow \beta\, SSV_i + (1 - \beta)\, NSV_i \quad (i \in C)

    with minimum and maximum over the round's cohort; where all values are equal NSV is 1/2 (the paper leaves it open).
    A client outside the cohort keeps its value; all clients start at ``init``.

    **Free riders.** As the paper defines it, a client that returns the model unchanged has a positive value, for two
    reasons. In an average over the coalition an update of zero makes the others' steps shorter, and where local
    training overshoots that is a gain; and min-max moves the zero, so that a client that does nothing ranks above all
    clients with a negative value. Measured with FedAvg on the digits (8 clients, one of them a free rider, 20 rounds;
    equal data and Dirichlet 0.5, 2 seeds each): the free rider's Shapley values are 0.022 to 0.035 on average, the
    honest clients' 0.002 to 0.004; it ranks first, with 0.18 to 0.21 of the SSV where an equal share is 0.125. Neither
    remedy is enough by itself: ``normalize="positive"`` gives it 0.25 to 0.38, ``weighting="fixed"`` 0.10 to 0.12. With
    ``normalize="positive", weighting="fixed", init=None`` it has exactly 0, and no weight under
    :class:`flsv.aggregation.ShapleyWeighted`. That holds for exact values (cohorts of up to 10 clients), and for models
    without BatchNorm, whose statistics are averaged in every game. A round without a positive value counts as 0 for all
    clients.

    Inputs are those of :class:`flsv.metrics.PartialFederatedShapley`. ``compute`` gives ``[num_clients]`` in [0, 1],
    NaN for clients never seen; samplers and aggregators assume ``init`` for these, the ``prior``.

    When not to use it:
        For payment as it is: values are mapped to [0, 1], so that clients that harm the model or do nothing have
        positive ones; see free riders above. It is made for sampling and weighting clients.

    Args:
        num_clients: n. None inside a ``FederatedLoop``: taken from the data.
        beta: the weight of the past. The authors' code weighs the present with 0.3, which is beta = 0.7 in their eq. 3.
        init: the value before a client's first round. None: the average starts at the first round's.
        estimator: as for :class:`flsv.metrics.PartialFederatedShapley`.
        estimator_args: likewise.
        performance: likewise.
        weighting: likewise.
        normalize: ``"min-max"``, as above, or ``"positive"``: max(SV_i, 0) / max SV; see
            :func:`flsv.functional.normalize_shapley`.
        mode: as for :class:`flsv.metrics.PartialFederatedShapley`.
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
