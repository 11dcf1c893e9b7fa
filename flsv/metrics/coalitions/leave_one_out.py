"""LeaveOneOut: how much a round loses without each client's update."""

from __future__ import annotations

from typing import Any

from flsv.metrics.coalitions.moving_average import MovingAverage
from flsv.metrics.coalitions.value import CoalitionValue
from flsv.utilities.declared import Momentum


class LeaveOneOut(CoalitionValue, chosen=("value", "estimator", "estimator_args", "fold")):
    r"""The decrease of a round's performance if a client's update is left out. A round of k clients takes k + 1
    evaluations.

    .. math::
        v_i = U(C) - U(C \setminus i)

    U(S) is the performance of the model of coalition S, and C the round's k clients. Inputs and arguments are those of
    :class:`flsv.metrics.PartialFederatedShapley`, without the arguments of the estimator. ``compute`` gives
    ``[num_clients]``, in the utility's unit, or ``[num_clients, num_classes]``; a client that never took part is NaN.

    When not to use it:
        For payment: two clients with the same data both have 0, since neither is missed without the other; the values
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
