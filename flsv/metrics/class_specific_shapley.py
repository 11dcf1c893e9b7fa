"""ClassSpecificShapley: ShapFed's contribution of every client to every class, from the classifier head alone.

Tastan et al., "Redefining Contributions: Shapley-Driven Federated Learning", IJCAI 2024, Algorithm 1, lines 16-17.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from flsv.functional import class_specific_shapley
from flsv.functional.moving_average import momentum_add, momentum_merge, momentum_value
from flsv.metrics.base import ContributionMetric
from flsv.utilities.declared import Momentum


class ClassSpecificShapley(ContributionMetric):
    r"""Class-specific Shapley values (CSSV) of ShapFed, with momentum over rounds.

    .. math::
        \tilde\Gamma_{ij} = \cos(h_{ij}, h_{sj}), \qquad
        \Gamma \leftarrow \mu\,\Gamma + (1 - \mu)\,\tilde\Gamma \quad\text{(the first round as is)}

    where :math:`h_{ij}` is row *j* of client *i*'s classifier head: with ``source="update"`` the change of the weights
    and bias of class *j* in the round, with ``"weights"`` their values after training. :math:`h_{sj}` is the weighted
    average of these rows over the round's clients, and :math:`\mu` the momentum.

    ``compute`` gives ``[num_clients, num_classes]`` in [-1, 1]. 1: the client's update for this class points the same
    way as the aggregate. 0: orthogonal. Negative: opposed. A client that does not take part in a round keeps its row. A
    client that never took part is NaN. ``per_client`` returns the mean over classes. ShapFed weights its aggregation by
    gamma of eq. 6, (1 + mean) / 2, see :func:`flsv.functional.participant_weights`.

    With two classes one row of the head's update is minus the other, so that both have the same value. A warning is
    given before training.

    A cosine does not depend on the amount of data: a client that splits its samples between two names gets nearly twice
    as much. With ``weighting="samples"``, which is not in the paper, ``per_client`` multiplies the mean by the client's
    number of samples, which it claims itself (:class:`flsv.filters.SampleCap` bounds it).

    When not to use it:
        For payment: the metric measures agreement with the majority, not usefulness. With two classes, without a linear
        classifier head, or by the plain mean where clients have different numbers of samples.

    Args:
        num_clients: n, the number of clients. None inside a ``FederatedLoop``.
        num_classes: M, the number of classes. None inside a ``FederatedLoop``.
        momentum: mu in [0, 1), the weight of the past in the moving average. The paper gives no value. The average is
            over the rounds in which the client took part.
        source: whether the head's ``"update"`` or its ``"weights"`` are compared. The authors' code compares weights,
            but after some tens of rounds all cosines of weights are above 0.98, so updates are the default.
        weighting: ``"uniform"``: ``per_client`` gives the plain mean, as in the paper. ``"samples"``: it is multiplied
            by the moving average of the client's number of samples, with the momentum of the cosines.
        head: name of the classifier head as in ``module.named_modules()``. By default timm's ``get_classifier()`` or
            the last ``nn.Linear``, if it is trained.
        kwargs: arguments of ``torchmetrics.Metric``.

    Raises:
        ConfigurationError: the momentum is outside [0, 1), or the source or weighting is unknown.
        ValueError: shapes that do not fit ``num_classes``, unknown or repeated client ids.

    Source:
        Tastan, Fares, Aremu, Horváth, Nandakumar: Redefining Contributions: Shapley-Driven Federated Learning, IJCAI
        2024, eq. 5-6 and Algorithm 1.

    Example:
        >>> metric = ClassSpecificShapley(num_clients=3, num_classes=2)
        >>> heads = torch.tensor([[[1.0, 0.0], [0.0, 1.0]], [[1.0, 0.0], [0.0, -1.0]]])
        >>> metric.update(torch.tensor([0, 2]), heads, torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
        >>> metric.compute()
        tensor([[ 1.,  1.],
                [nan, nan],
                [ 1., -1.]])
        >>> metric = ClassSpecificShapley(num_clients=3, num_classes=2, weighting="samples")
        >>> metric.update(torch.tensor([0, 2]), heads, torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([30, 80]))
        >>> metric.per_client(metric.compute())
        tensor([30., nan,  0.])
    """

    sign = "from -1 to 1: 1 where updates point the same way as the aggregate, negative: opposed, 0: orthogonal."
    cost = "a dot product per client and class; no coalition."
    claims = ("agreement",)
    to_pay_by = False
    history: Tensor

    plot_lower_bound = -1.0
    plot_upper_bound = 1.0

    def __init__(
        self,
        num_clients: int | None = None,
        num_classes: int | None = None,
        momentum: Momentum = 0.9,
        source: Literal["update", "weights"] = "update",
        weighting: Literal["uniform", "samples"] = "uniform",
        head: str | None = None,
        **kwargs: Any,
    ) -> None:
        self.momentum = momentum
        self.source = source
        self.weighting = weighting
        self.head = head
        super().__init__(num_clients, num_classes, **kwargs)

    @property
    def round_fields(self) -> dict[str, str]:
        """``{argument of update: attribute of the round}``, for arguments whose name differs from the attribute's."""
        if self.source == "update":
            return {}
        return {"client_heads": "client_head_weights", "server_head": "server_head_weights"}

    @property
    def _weights_by_samples(self) -> bool:
        return self.weighting == "samples"

    def bind(self, num_clients: int, num_classes: int, *args: Any, **kwargs: Any) -> None:
        super().bind(num_clients, num_classes, *args, **kwargs)
        if num_classes == 2:
            warnings.warn(
                f"{type(self).__name__}: with two classes both have the same value, since the rows of the head mirror "
                "each other. The value is near 1 for all clients except those that oppose the majority, and does not "
                "show how useful clients are. Use ShadowShapley or CumulativeShapley, or for values per class "
                "PartialFederatedShapley(per_class=True).",
                stacklevel=2,
            )

    @property
    def unit(self) -> str:  # type: ignore[override]  # depends on the options
        """Unit of a client's value for a class, for tables and axes."""
        return "cosine with the aggregate" + (
            "; over all classes, times samples" if self._weights_by_samples else ""
        )

    def init_states(self, num_clients: int, num_classes: int | None) -> None:
        assert num_classes is not None
        reduction = partial(momentum_merge, momentum=self.momentum)
        num_columns = num_classes
        if self._weights_by_samples:
            num_columns += 1  # for the samples, with the same momentum
        num_entries = 2 * num_columns + 1  # first values, averages, the number of rounds
        no_history = torch.zeros(num_clients, num_entries)
        self.add_state("history", no_history, dist_reduce_fx=reduction)

    def update(
        self,
        client_ids: Tensor,
        client_heads: Tensor,
        server_head: Tensor,
        num_samples: Tensor | None = None,
    ) -> None:
        """Update the states with one round.

        Args:
            client_ids: ``[k]``, the round's clients.
            client_heads: ``[k, M, D]``, the change, or with ``source="weights"`` the values, of the clients' classifier
                heads: for each of M classes a row of D entries, weights and bias.
            server_head: ``[M, D]``, the same of the aggregate.
            num_samples: ``[k]``, the clients' numbers of samples, needed for ``weighting="samples"``.

        Raises:
            ValueError: shapes do not fit, or client ids are unknown or repeated, ``num_samples`` is missing with
                ``weighting="samples"``.
        """
        if client_heads.ndim != 3 or client_heads.shape[:2] != (len(client_ids), self.num_classes):
            raise ValueError(
                f"expected client_heads [k={len(client_ids)}, M={self.num_classes}, D], got {list(client_heads.shape)}."
            )
        values = class_specific_shapley(client_heads, server_head).to(self.history)
        if self._weights_by_samples:
            samples = _checked_samples(num_samples, len(client_ids)).to(self.history)
            values = torch.cat([values, samples[:, None]], dim=1)  # [k, M + 1]
        self.history = momentum_add(self.history, client_ids, values, self.momentum)

    def compute(self) -> Tensor:
        """Compute the moving averages of the cosines, ``[num_clients, num_classes]``. NaN for clients that never took
        part."""
        return momentum_value(self.history, self.momentum)[:, : self.num_classes]

    def per_client(self, value: Tensor) -> Tensor:
        """Compute each client's mean over the classes ``[num_clients]``, in [-1, 1]. With ``weighting="samples"``
        multiply it by the moving average of the client's number of samples. NaN for clients that never took part.
        """
        mean = super().per_client(value)
        if not self._weights_by_samples:
            return mean
        num_samples = momentum_value(self.history, self.momentum)[:, -1]
        return mean * num_samples.to(mean)


def _checked_samples(num_samples: Tensor | None, num_clients: int) -> Tensor:
    """Return ``num_samples [k]``. Raise ValueError if they are missing or have another shape."""
    if num_samples is not None and num_samples.shape == (num_clients,):
        return num_samples
    shape = None if num_samples is None else list(num_samples.shape)
    raise ValueError(f'weighting="samples" expects num_samples [k={num_clients}], got {shape}.')
