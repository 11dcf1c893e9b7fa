"""CumulativeShapley: FedSV, the sum of the rounds' Shapley values.

Wang et al., "A Principled Approach to Data Valuation for Federated Learning", 2020, definition 1.
"""

from __future__ import annotations

from typing import Any

from flsv.metrics.coalitions.sums import Sum
from flsv.metrics.coalitions.value import CoalitionValue


class CumulativeShapley(CoalitionValue, chosen=("value", "fold")):
    r"""FedSV, ``--config fedsv``: the sum of a client's Shapley values over the rounds in which it took part.

    .. math::
        \phi_i = \sum_{t : i \in C_t} SV_i(t)

    :math:`SV_i(t)` is client *i*'s Shapley value in the game of round *t*, and :math:`C_t` the clients of that round.
    Inputs and arguments are those of :class:`flsv.metrics.PartialFederatedShapley`, without ``momentum`` and ``init``.
    ``compute`` gives ``[num_clients]`` or ``[num_clients, num_classes]``; clients that never took part are NaN. The
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
        >>> metric.compute() * expected / metric.seen
        tensor([1.3333, 4.0000, 4.0000])
    """

    def __init__(self, num_clients: int | None = None, num_classes: int | None = None, **kwargs: Any) -> None:
        super().__init__(num_clients, num_classes, value="shapley", fold=Sum(), **kwargs)
