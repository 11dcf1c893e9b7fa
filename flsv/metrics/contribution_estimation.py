"""ContributionEstimation: FedCE's estimate of the clients' contributions.

Jiang et al., "Fair Federated Medical Image Segmentation via Client Contribution Estimation", CVPR 2023 (FedCE).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torchmetrics import Metric

from flsv.core import (
    Client,
    ClientMatrix,
    LocalData,
    NoResponse,
    Numbers,
    RespondingClient,
    Round,
    declare_response,
    map_clients,
)
from flsv.core.responses import range_of_score
from flsv.functional.fedce import (
    Combine,
    contribution_estimates,
    leave_one_out_cosines,
    without_own,
)
from flsv.metrics.base import ContributionMetric
from flsv.metrics.cosine_gradient_shapley import parameters_of
from flsv.scores.performance import Measure, Mode, performance_of
from flsv.utilities.declared import Positive
from flsv.utilities.errors import ConfigurationError


def _expected_score(
    client: RespondingClient,
    aggregate: Tensor,
    weight: float,
    performance: Any = "accuracy",
) -> Numbers:
    return Numbers(torch.float64, (), *range_of_score(performance))


def leave_self_out(
    local: LocalData, aggregate: Tensor, weight: float, performance: str | Measure = "accuracy"
) -> Tensor:
    """At a client, score the average of all other clients' models on the client's validation samples. If the others
    have no weight, score the model from which the client started training.
    """
    assert local.start is not None
    assert local.sent is not None
    model_of_others = without_own(aggregate, local.sent, weight)
    if model_of_others is None:  # the other clients have no weight
        model_of_others = local.start
    (score,) = local.utility(model_of_others[None, :], performance)
    # The score may be false, if the client does not report honestly.
    return local.reported("score", score)


declare_response(leave_self_out, _expected_score)


def scores_without_own(
    clients: Sequence[Client],
    aggregate: Tensor,
    weights: Tensor,
    performance: str | Measure,
) -> tuple[Tensor, Tensor]:
    """Request from k clients their scores of the other clients' average model (:func:`leave_self_out`). Return the
    scores ``[r]`` of the r clients that reply, and a mask ``[k]`` of these clients.
    """
    weights_by_id = {client.id: weight for client, weight in zip(clients, weights.tolist())}
    question = partial(leave_self_out, performance=performance)
    request = partial(_request_score, question, aggregate, weights_by_id)
    responses = map_clients(clients, request)
    _check_finite(clients, responses)
    scores = [float(response) for response in responses if response is not None]
    has_score = [response is not None for response in responses]
    return torch.tensor(scores, dtype=torch.float64), torch.tensor(has_score)


def _request_score(
    question: Callable[..., Tensor],
    aggregate: Tensor,
    weights_by_id: Mapping[int, float],
    client: Client,
) -> Tensor | None:
    try:
        response = client.request(question, aggregate, weights_by_id[client.id])
    except NoResponse as reason:
        warnings.warn(f"{reason} Its score of the others is missing in this round.", stacklevel=2)
        return None
    return response.double()


def _check_finite(clients: Sequence[Client], responses: Sequence[Tensor | None]) -> None:
    broken = [
        client.id
        for client, response in zip(clients, responses)
        if response is not None and not response.isfinite()
    ]
    if broken:
        raise ValueError(
            f"the average model of the other clients has a score that is not finite on the validation samples of the "
            f"clients {broken}, so their values would be NaN. Choose a bounded score (performance='accuracy'), or "
            "lower the learning rate."
        )


def _aggregate(round: Round) -> Tensor:
    """Compute the average ``[P]`` of the clients' models, with the aggregation weights scaled to sum to 1."""
    assert round.aggregation_weights is not None
    return round.combine(_shares(round.aggregation_weights).to(round.client_vectors))


def _shares(weights: Tensor) -> Tensor:
    """Normalize weights to sum to 1, float64 ``[k]`` on the CPU. If all are 0, return equal weights.

    Raises:
        ValueError: a weight is below 0.
    """
    weights = weights.cpu().double()
    if bool((weights < 0).any()):
        raise ValueError(
            f"the aggregation weights {weights.tolist()} contain a weight below 0, but this metric can only exclude "
            "clients from averages with weights of at least 0. Use an aggregator with such weights, such as FedAvg."
        )
    total = weights.sum()
    if total > 0:
        return weights / total
    return torch.full_like(weights, 1 / len(weights))


class ContributionEstimation(ContributionMetric):
    r"""FedCE's contribution estimates, see :func:`flsv.functional.contribution_estimates`.

    .. math::
        c_i \propto \Bigl(1 - \overline{\cos}\bigl(d_i, \textstyle\sum_{j \ne i} c_j d_j\bigr)\Bigr) \cdot
        \Bigl(1 - \overline{m}_i\Bigr)

    with :math:`d_i` client *i*'s update, and :math:`m_i` the score, on its validation samples, of the average of the
    other clients' models. Bars are means over rounds. :class:`flsv.aggregation.FedCE` uses the estimates as weights.

    ``compute`` gives ``[num_clients]``, values that sum to 1 up to the floor. NaN for clients that never took part.
    ``diagnostics`` returns the mean cosines and the mean errors.

    Differences from the authors' code: (1) Clients may be absent. Means are over the rounds in which a client took
    part. (2) Clients score the aggregate in the round in which it is computed, not at the beginning of their next
    round. (3) The other clients' updates have their weights in the aggregate, not equal ones. As in the authors' code,
    every client's mean score includes an initial score of 0. If a site does not respond, the round is excluded from its
    estimate.

    When not to use it:
        For payment: it rewards being different. Of six clients one that returns the model unchanged, or whose labels
        are all wrong, has nearly half of the sum. With two clients, which are equally different.

    Args:
        num_clients: n, the number of clients. None inside a ``FederatedLoop``.
        combine: ``"times"``: the product of the two factors, as above. ``"plus"``: their sum.
        performance: the score m, in [0, 1], of which more is better: ``"accuracy"``, ``"balanced_accuracy"``, a value
            that the module logs when it validates, or a torchmetrics metric. See :mod:`flsv.scores.performance`.
        mode: ``"max"`` for a value that the module logs.
        cap: the largest mean error that counts, as a multiple of the median over all clients. Clients report errors
            themselves, and could exaggerate. None, as in the paper: no cap.
        kwargs: arguments of ``torchmetrics.Metric``.

    Raises:
        ConfigurationError: an option is unknown, or less is better for the performance, or before training: a client
            has no validation samples.
        ValueError: a score is outside [0, 1].

    Example:
        >>> from flsv.core import LocalData
        >>> class Scores:  # of models that have one parameter, their accuracy
        ...     def __init__(self, models): self.models = models
        ...     def value(self, metric): return self.models[:, 0].double()
        >>> count = torch.tensor([4])
        >>> clients = []
        >>> for i, model in enumerate([0.6, 0.8, 0.4]):
        ...     data = LocalData(f"client {i}", lambda split: [], count, 3 * count, evaluator=lambda batches: Scores)
        ...     data.set_models(torch.zeros(1), torch.tensor([model]))
        ...     clients.append(Client(i, data))
        >>> metric = ContributionEstimation(num_clients=4)
        >>> updates, weights = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]), torch.full((3,), 1 / 3)
        >>> metric.update(torch.arange(3), updates, weights, torch.tensor([0.6]), clients)
        >>> metric.compute()
        tensor([0.1908, 0.2044, 0.6048,    nan])
    """

    unit = "share, sums to 1"
    sign = "larger: the client's updates and data are less like the others', which bad clients' are, too."
    cost = "one model evaluated at every client of a round, and products of all updates."
    per_class = False
    claims = ("weight",)
    to_pay_by = False
    evaluates = True
    #: Functions ``{argument: f(round)}`` with which a ``FederatedLoop`` computes arguments of ``update``.
    round_fields: ClassVar[dict[str, Any]] = {
        "client_updates": parameters_of,
        "aggregate": _aggregate,
    }
    needs: Sequence[str] | None = (
        "matrix",
        "space",
        "client_vectors",
        "aggregation_weights",
        "combine",
    )
    plot_lower_bound = 0.0

    cosines: Tensor
    scores: Tensor
    participations: Tensor

    def __init__(
        self,
        num_clients: int | None = None,
        combine: Combine = "times",
        performance: str | Metric = "accuracy",
        mode: Mode | None = None,
        cap: Positive | None = None,
        **kwargs: Any,
    ) -> None:
        self.measure = performance_of(self, performance, mode)
        self.performance = self.measure.request
        is_loss = self.measure.called == "negative_loss" or self.measure.mode == "min"
        if is_loss:
            raise ConfigurationError(
                f"{type(self).__name__}(performance={performance!r}): less is better for this performance, but a score "
                'in [0, 1] is needed of which more is better. Use "accuracy" or "balanced_accuracy".'
            )
        self.combine = combine
        self.cap = cap
        super().__init__(num_clients, num_classes=None, **kwargs)

    def init_states(self, num_clients: int, num_classes: int | None) -> None:
        for name in ("cosines", "scores"):
            self.add_state(name, torch.zeros(num_clients), dist_reduce_fx="sum")
        self.add_state(
            "participations", torch.zeros(num_clients, dtype=torch.long), dist_reduce_fx="sum"
        )

    def update(
        self,
        client_ids: Tensor,
        client_updates: Tensor | ClientMatrix,
        aggregation_weights: Tensor,
        aggregate: Tensor,
        clients: Sequence[Client],
    ) -> None:
        """Update the states with one round, and request scores from its clients.

        Args:
            client_ids: ``[k]``, the round's clients.
            client_updates: ``[k, P]``, the clients' updates of the P parameters (without buffers).
            aggregation_weights: ``[k]``, the clients' weights in the round's aggregation.
            aggregate: ``[P]``, the clients' models averaged with these weights.
            clients: the round's clients, in the order of ``client_ids``.
        """
        self._check_asked(client_ids, clients)
        device = client_ids.device
        weights = _shares(aggregation_weights)
        # Some clients may not reply: `scores` has the scores of the others, and `has_score` [k] says which these are.
        scores, has_score = scores_without_own(clients, aggregate, weights, self.measure.request)
        self._check_range(scores)
        gram = self._matrix(client_updates).gram()
        cosines = leave_one_out_cosines(gram, weights).to(device)  # [k]

        has_score = has_score.to(device)
        ids = client_ids[has_score]
        cosines = cosines[has_score].to(self.cosines)
        self.cosines = self.cosines.index_add(0, ids, cosines)
        self.scores = self.scores.index_add(0, ids, scores.to(self.scores))
        self.participations = self.participations.index_add(0, ids, torch.ones_like(ids))

    def _check_range(self, scores: Tensor) -> None:
        scores = scores.to(self.scores)
        if bool(((scores < 0) | (scores > 1)).any()):
            raise ValueError(
                f"FedCE's error is 1 - score and needs scores in [0, 1], but performance={self.measure!r} gave "
                f"{scores.tolist()}. Choose another performance, such as 'accuracy'."
            )

    def compute(self) -> Tensor:
        """Compute the contributions ``[num_clients]``, NaN for clients that never took part."""
        took_part = self.participations > 0
        value = torch.full_like(self.cosines, torch.nan)
        if took_part.any():
            cosines, scores = self._means()
            estimates = contribution_estimates(
                cosines[took_part].cpu(),
                scores[took_part].cpu(),
                self.combine,
                cap=self.cap,
            )
            value[took_part] = estimates.to(value)
        return value

    def diagnostics(self) -> dict[str, Tensor]:
        """Return both factors' means of each client, ``[num_clients]``. ``cosine`` is with the sum of the others'
        updates. ``error`` is 1 - score of the average of the others' models on the client's validation samples.
        """
        cosines, scores = self._means()
        return {"cosine": cosines, "error": 1 - scores}

    def _means(self) -> tuple[Tensor, Tensor]:
        mean_cosines = self.cosines / self.participations
        # A prior score of 0 counts as one round.
        mean_scores = self.scores / (self.participations + 1)
        return mean_cosines, mean_scores.masked_fill(self.participations == 0, torch.nan)
