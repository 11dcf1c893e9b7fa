"""LowerBoundShapley: a lower confidence bound of the clients' mean Shapley values."""

from __future__ import annotations

from typing import Any

from flsv.functional.confidence import Confidence
from flsv.metrics.coalitions.sums import LowerBound
from flsv.metrics.coalitions.value import CoalitionValue


class LowerBoundShapley(CoalitionValue, chosen=("value", "fold")):
    r"""A one-sided lower confidence bound of a client's mean Shapley value over its rounds.

    .. math:: v_i = \overline{SV}_i - t_{T_i - 1}(\text{confidence})\, \frac{s_i}{\sqrt{T_i}}

    with the mean and the spread over the :math:`T_i` rounds in which the client took part; the spread holds the error
    of a sampled estimate, and how values change in the course of training. In a client's first round the bound
    is its value less its estimator's standard error times the normal quantile. Payment by it covers established
    contributions only: values that vary from round to round, as those of noise and of few samples do, count for less,
    and a client seen seldom for less than one seen often. It is no remedy against a client that registers twice, whose
    values vary no more than one client's: against that take ``estimator="banzhaf"``, under which two copies together
    have the value of one, or ``"beta"`` with ``{"alpha": 1, "beta": 4}``, under which they have less (see
    :mod:`flsv.functional.shapley.semivalues`).

    Inputs are those of :class:`flsv.metrics.PartialFederatedShapley`. ``compute`` gives ``[num_clients]`` or
    ``[num_clients, num_classes]``, in the utility's unit; NaN for clients never seen. ``diagnostics`` holds the means,
    too.

    When not to use it:
        To estimate the contribution itself: the bound is lower the fewer rounds there are, and does not sum to the
        gain. With fewer than some ten rounds of a client.

    Args:
        num_clients: n. None inside a ``FederatedLoop``: taken from the data.
        num_classes: as for :class:`flsv.metrics.PartialFederatedShapley`.
        estimator: likewise.
        estimator_args: likewise.
        performance: likewise.
        weighting: likewise.
        per_class: likewise.
        mode: likewise.
        confidence: in [0.5, 1); 0.5 is the mean itself.
        kwargs: see ``torchmetrics.Metric``.

    Raises:
        ConfigurationError: confidence outside [0.5, 1); the errors of :class:`flsv.metrics.PartialFederatedShapley`.

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
