"""LowerBoundShapley: a lower confidence bound of the clients' mean Shapley values."""

from __future__ import annotations

from typing import Any

from flsv.functional.confidence import Confidence
from flsv.metrics.coalitions.sums import LowerBound
from flsv.metrics.coalitions.value import CoalitionValue


class LowerBoundShapley(CoalitionValue, chosen=("value", "fold")):
    r"""A one-sided lower confidence bound of a client's mean Shapley value over its rounds.

    .. math:: v_i = \overline{SV}_i - t_{T_i - 1}(\text{confidence})\, \frac{s_i}{\sqrt{T_i}}

    with the mean :math:`\overline{SV}_i` and the standard deviation :math:`s_i` of the client's values over the
    :math:`T_i` rounds in which it took part, and Student's quantile :math:`t`; the deviation includes the error of a
    sampled estimate, and the change of values in the course of training. In a client's first round the bound is its
    value minus the estimator's standard error times the normal quantile. Payment by the bound covers established
    contributions only: values that vary from round to round, like those of clients with noise or few samples, make the
    bound lower, and so does rare participation. The bound does not protect against a client that registers twice, whose
    values vary no more than a single client's values: against that take ``estimator="banzhaf"``, under which two copies
    together have the value of a single client, or ``"beta"`` with ``{"alpha": 1, "beta": 4}``, under which the two have
    less (see :mod:`flsv.functional.shapley.semivalues`).

    Inputs are those of :class:`flsv.metrics.PartialFederatedShapley`. ``compute`` gives ``[num_clients]`` or
    ``[num_clients, num_classes]``, in the utility's unit; NaN for clients that never took part. ``diagnostics`` also
    returns the means.

    When not to use it:
        To estimate the contribution itself: the bound is lower the fewer rounds there are, and does not sum to the
        gain. With fewer than some ten rounds of a client.

    Args:
        num_clients: n, the number of clients. None inside a ``FederatedLoop``, which takes it from the data.
        num_classes: M, the number of classes. If it is set, values are per class.
        estimator: the estimator of Shapley values, as for :class:`flsv.metrics.PartialFederatedShapley`.
        estimator_args: keywords for the estimator, such as ``{"budget": 200}``.
        performance: the performance measure of a coalition's model, see :mod:`flsv.games.performance`.
        weighting: how a coalition's updates are averaged, as for :class:`flsv.metrics.PartialFederatedShapley`.
        per_class: compute values per class, with the number of classes taken from the data.
        mode: whether less (``"min"``) or more (``"max"``) of a logged value is better.
        confidence: confidence level of the bound, in [0.5, 1); 0.5 gives the mean itself.
        kwargs: further arguments of ``torchmetrics.Metric``.

    Raises:
        ConfigurationError: the confidence is outside [0.5, 1); for other errors see
            :class:`flsv.metrics.PartialFederatedShapley`.

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
