"""Who is of use to the others: clients are asked how good the aggregate is without their own part in it.

ContributionEstimation: Jiang et al., "Fair Federated Medical Image Segmentation via Client Contribution Estimation",
CVPR 2023 (FedCE). EverybodyElse: after the idea of Jaramillo-Velez et al., "Private and Robust Contribution Evaluation
in Federated Learning", arXiv 2602.21721, 2026; the formula is ours, see :mod:`flsv.functional.peers`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torchmetrics import Metric

from flsv.arguments import check_number
from flsv.errors import ConfigurationError
from flsv.functional.peers import Combine, contribution_estimates, everybody_else, leave_one_out_cosines, without_own
from flsv.games.performance import Mode, ModelScore, performance_of
from flsv.metrics.asked import asked_scores, secure_sum, shares
from flsv.metrics.base import ContributionMetric, Guide, parameters_of
from flsv.participants import Client, LocalData
from flsv.round import ClientMatrix


def leave_self_out(
    local: LocalData,
    aggregate: Tensor,
    weight: float | None,
    performance: str | ModelScore = "accuracy",
    gain: bool = False,
    sum_weight: float | None = None,
) -> Tensor:
    """At the client: a number ``[]``, float64, the score on its validation samples of the others' average.

    Args:
        local: the client's; it has taken part in the round.
        aggregate: ``[P]``, the average of all.
        weight: the client's in it; None: its training samples, of ``sum_weight``.
        performance: what models are measured by.
        gain: less the score of the model that it started the round from.
        sum_weight: all clients' weights, where the server does not know the client's.

    Where nobody else has any weight, the others' average is the model that it started from.
    """
    assert local.start is not None
    assert local.sent is not None
    if weight is None:
        assert sum_weight is not None
        weight = int(local.class_counts.sum()) / sum_weight
    others = without_own(aggregate, local.sent, weight)
    models = torch.stack([local.start if others is None else others, local.start][: 2 if gain else 1])
    scores = local.utility(models, performance)
    return local.told("gain", scores[0] - scores[1]) if gain else local.told("score", scores[0])


class ContributionEstimation(ContributionMetric):
    r"""FedCE's contribution estimates, see :mod:`flsv.functional.peers`.

    .. math::
        c_i \propto \Bigl(1 - \overline{\cos}\bigl(d_i, \textstyle\sum_{j \ne i} c_j d_j\bigr)\Bigr) \cdot
        \Bigl(1 - \overline{m}_i\Bigr)

    A client counts for more the less its update points where the others' do, and the worse the others' model does on
    its own validation samples: it is paid for what it alone brings. Noise, too, is what only one client brings: the
    estimate says how different a client is and not how useful, and is no safeguard against free riders and bad data.
    Measured on the digits (FedAvg, 6 equal clients, 8 rounds, one run each): a client that returns the model as it got
    it has 0.45, the honest ones 0.10 to 0.13; one whose labels are all wrong 0.44, the others 0.09 to 0.13. Under
    :class:`flsv.aggregation.FedCE` these are the weights.

    As input to ``update``: ``client_ids [k]``, ``client_updates [k, P]`` (parameters only), ``aggregation_weights
    [k]``, ``aggregate [P]`` (the models' average by these weights) and the ``clients``, which are asked for the score
    of the aggregate without their part. ``compute`` gives ``[num_clients]``, which sum to 1 up to the floor; NaN for
    clients never seen. ``diagnostics`` holds the mean cosines and the mean errors.

    Departures from the authors' code, which has all clients in all rounds: means are over a client's own rounds;
    the aggregate is judged in its own round, where the client judges it at the beginning of its next one, and the score
    0 that every client's mean starts with there is part of the mean here; the others' directions are weighed as they
    are in the aggregate (``consensus="weights"``), which is what the code's comments say, while the code has equal
    weights in all rounds (``"uniform"``). A client at a site of its own that does not answer has no score: in its own
    estimate the round does not count.

    When not to use it:
        To pay by: it rewards being different, so noise, wrong labels and updates of nothing have high values. With two
        clients, who are equally different. It is made for FedCE's weights.

    Args:
        num_clients: n. None inside a ``FederatedLoop``: taken from the data.
        combine: ``"times"``, as above, or ``"plus"``: the sum of the two.
        performance: m, a score in [0, 1] of which more is better: ``"accuracy"``, ``"balanced_accuracy"``, a value that
            the module logs when it validates, or a torchmetrics metric; see :mod:`flsv.games.performance`.
        consensus: how the others' updates are weighed: ``"weights"`` or ``"uniform"``.
        floor: no share is below it.
        mode: ``"max"`` for a value that the module logs.
        cap: no client's mean error counts for more than so many medians of the clients', whatever it tells; None, as in
            the paper: what is told counts.
        kwargs: see ``torchmetrics.Metric``.

    Raises:
        ConfigurationError: an unknown word; a performance of which less is better; before training, a client without
            validation samples.
        ValueError: a score outside [0, 1].

    Example:
        >>> from flsv.participants import LocalData
        >>> class Scores:  # of models that have one parameter, their accuracy
        ...     def __init__(self, models): self.models = models
        ...     def value(self, metric): return self.models[:, 0].double()
        >>> count = torch.tensor([4])
        >>> clients = []
        >>> for i, model in enumerate([0.6, 0.8, 0.4]):
        ...     data = LocalData(f"client {i}", lambda split: [], count, 3 * count, evaluator=lambda batches: Scores)
        ...     data.visit(torch.zeros(1), torch.tensor([model]))
        ...     clients.append(Client(i, data))
        >>> metric = ContributionEstimation(num_clients=4)
        >>> updates, weights = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]), torch.full((3,), 1 / 3)
        >>> metric.update(torch.arange(3), updates, weights, torch.tensor([0.6]), clients)
        >>> metric.compute()
        tensor([0.1908, 0.2044, 0.6048,    nan])
    """

    per_class = False
    to_pay_by = False
    evaluates = True
    #: Where a ``FederatedLoop`` finds the arguments of ``update``.
    round_fields: ClassVar[dict[str, Any]] = {"client_updates": parameters_of, "aggregate": secure_sum}
    # No over_rounds, and so no intervals: shares by means over rounds are no mean of the rounds' shares.
    plot_lower_bound = 0.0

    cosines: Tensor
    scores: Tensor
    seen: Tensor

    def __init__(
        self,
        num_clients: int | None = None,
        combine: Combine = "times",
        performance: str | Metric = "accuracy",
        consensus: Literal["weights", "uniform"] = "weights",
        floor: float = 1e-3,
        mode: Mode | None = None,
        cap: float | None = None,
        **kwargs: Any,
    ) -> None:
        who = type(self).__name__
        if combine not in ("times", "plus"):
            raise ConfigurationError(f'{who}(combine={combine!r}): expected "times" or "plus".')
        if consensus not in ("weights", "uniform"):
            raise ConfigurationError(f'{who}(consensus={consensus!r}): expected "weights" or "uniform".')
        check_number(self, "floor", floor, least=0, below=1)
        if cap is not None:
            check_number(self, "cap", cap, above=0)
        self.performance = performance_of(self, performance, mode)
        if self.performance == "negative_loss" or getattr(self.performance, "mode", "max") == "min":
            raise ConfigurationError(
                f"{who}(performance={performance!r}): the error is 1 - score, of a score in [0, 1] of which more is "
                'better. Use "accuracy" or "balanced_accuracy".'
            )
        self.combine, self.consensus, self.floor, self.cap = combine, consensus, floor, cap
        super().__init__(num_clients, None, **kwargs)

    def guide(self) -> Guide:
        return Guide(
            unit="share, sums to 1",
            sign="larger: the client's updates and data are less like the others', which bad clients' are, too.",
            needs="validation samples at every client.",
            cost="one model evaluated at every client of a round, and products of all updates.",
        )

    def init_states(self, num_clients: int, num_classes: int | None) -> None:
        for name in ("cosines", "scores"):
            self.add_state(name, torch.zeros(num_clients), dist_reduce_fx="sum")
        self.add_state("seen", torch.zeros(num_clients, dtype=torch.long), dist_reduce_fx="sum")

    def update(
        self,
        client_ids: Tensor,
        client_updates: Tensor | ClientMatrix,
        aggregation_weights: Tensor,
        aggregate: Tensor,
        clients: Sequence[Client],
    ) -> None:
        """Add one round; shapes ``[k]``, ``[k, P]``, ``[k]``, ``[P]``."""
        self._check_asked(client_ids, clients)
        self._check_lengths(client_ids, aggregation_weights=aggregation_weights)
        weights = shares(aggregation_weights)
        scores, said = asked_scores(clients, aggregate, weights, partial(leave_self_out, performance=self.performance))
        scores, said = scores.to(self.scores), said.to(client_ids.device)
        if bool(((scores < 0) | (scores > 1)).any()):
            raise ValueError(
                f"FedCE's error is 1 - score, of a score in [0, 1]; performance={self.performance!r} gave "
                f"{scores.tolist()}."
            )
        consensus = weights if self.consensus == "weights" else torch.full_like(weights, 1 / len(weights))
        gram = self._matrix(client_ids, client_updates).gram()
        cosines = leave_one_out_cosines(gram, consensus).to(client_ids.device)[said]
        client_ids = client_ids[said]
        self.cosines = self.cosines.index_add(0, client_ids, cosines.to(self.cosines))
        self.scores = self.scores.index_add(0, client_ids, scores)
        self.seen = self.seen.index_add(0, client_ids, torch.ones_like(client_ids))

    def compute(self) -> Tensor:
        """``[num_clients]``, NaN for clients never seen."""
        known = self.seen > 0
        value = torch.full_like(self.cosines, float("nan"))
        if known.any():
            cosines, scores = self._means()
            means = cosines[known].cpu(), scores[known].cpu()
            estimates = contribution_estimates(*means, self.combine, self.floor, self.cap)
            value[known] = estimates.to(value)
        return value

    def diagnostics(self) -> dict[str, Tensor]:
        """Each client's mean cosine with the others, and mean error of the others' model, ``[num_clients]``."""
        cosines, scores = self._means()
        return {"cosine": cosines, "error": 1 - scores}

    def _means(self) -> tuple[Tensor, Tensor]:
        means = self.cosines / self.seen, self.scores / (self.seen + 1)
        return means[0], means[1].masked_fill(self.seen == 0, float("nan"))


class EverybodyElse(ContributionMetric):
    r"""Each client's share of what the other clients have gained from models without their own part.

    .. math::
        g_j = u_j\Bigl(\sum_{i \ne j} \frac{w_i}{1 - w_j} x_i\Bigr) - u_j(x), \qquad
        v_i = \frac1{k-1} \sum_{j \ne i} g_j

    with :math:`u_j` the score on client *j*'s own validation samples, :math:`x_i` the models of the round and
    :math:`w_i` their weights in its aggregate. The values of a round sum to all that clients have gained from each
    other, and no client's value holds its own report. Over rounds, values are summed; absent clients get 0.

    **Sums only.** The server is told the sum of the models and a number by each client. A client takes its own part out
    of the sum itself: nobody else can. So the metric works under secure sums (:class:`flsv.engines.remote.SecureSums`),
    where no metric of single updates does. Each client's gain is told, and follows from the values anyway.

    **What it cannot tell.** It has no null player: whoever does nothing shares in what the others gain from each other,
    and with k clients all values lie within a range of 1/(k-1) of the largest gain. A client gains little, and so is
    worth much, where its data are unlike all others': because they are rare, or because they are wrong. A client cannot
    raise its own value by its report; a low report lowers the others', and so raises its share of what is paid: one of
    six that says it has lost everything takes nearly all of it. ``trim=1`` leaves the
    largest and the smallest report out of every mean, at the cost of values that no longer sum to the gains. Measured
    on the digits (FedAvg, 6 equal clients, 8 rounds, one run each): by the loss a free rider has 0.750 and the honest
    clients 0.757 to 0.781, a client with wrong labels 0.699 and the others 0.722 to 0.742: last, and paid nearly as
    much. By the accuracy neither is told from the rest.

    As input to ``update``: ``client_ids [k]``, ``aggregation_weights [k]``, ``aggregate [P]`` (the models' average by
    these weights) and the ``clients``; where the weights are the clients' secret (NaN), their ``sum_weight``.
    ``compute`` gives ``[num_clients]``, in the score's unit; NaN for clients never
    seen. ``diagnostics`` holds what each client has gained, in the rounds in which it has said so.

    A client at a site of its own that does not answer leaves the mean over the others' gains to those that do; its own
    value needs no report of its own.

    When not to use it:
        Where clients' own validation sets are small or not to be trusted: it rests on their reports alone. To find free
        riders: values lie close together.

    Args:
        num_clients: n. None inside a ``FederatedLoop``: taken from the data.
        performance: u, see :mod:`flsv.games.performance`.
        mode: whether less (``"min"``) or more of a logged value is better.
        trim: how many of the largest and of the smallest reports are left out of every mean: as many clients may lie.
        kwargs: see ``torchmetrics.Metric``.

    Raises:
        ConfigurationError: a wrong performance; before training, a client without validation samples.

    Example:
        >>> from flsv.participants import LocalData
        >>> class Scores:  # of models that have one parameter, their accuracy
        ...     def __init__(self, models): self.models = models
        ...     def value(self, metric): return self.models[:, 0].double()
        >>> count = torch.tensor([4])
        >>> clients = []
        >>> for i, model in enumerate([0.6, 0.8, 0.4]):
        ...     data = LocalData(f"client {i}", lambda split: [], count, 3 * count, evaluator=lambda batches: Scores)
        ...     data.visit(torch.zeros(1), torch.tensor([model]))
        ...     clients.append(Client(i, data))
        >>> metric = EverybodyElse(num_clients=4)
        >>> metric.update(torch.arange(3), torch.full((3,), 1 / 3), torch.tensor([0.6]), clients)
        >>> metric.compute()
        tensor([0.6000, 0.6500, 0.5500,    nan])
    """

    per_class = False
    evaluates = True
    #: Where a ``FederatedLoop`` finds the arguments of ``update``.
    round_fields: ClassVar[dict[str, Any]] = {"aggregate": secure_sum}
    over_rounds = "sum"

    total: Tensor
    gains: Tensor
    seen: Tensor
    answered: Tensor

    def __init__(
        self,
        num_clients: int | None = None,
        performance: str | Metric = "accuracy",
        mode: Mode | None = None,
        trim: int = 0,
        **kwargs: Any,
    ) -> None:
        check_number(self, "trim", trim, least=0, whole=True)
        self.trim = trim
        self.performance = performance_of(self, performance, mode)
        super().__init__(num_clients, None, **kwargs)

    def guide(self) -> Guide:
        return Guide(
            unit="gain in the performance, summed over rounds",
            sign="positive: the others' models are better with the client; 0: they have gained nothing.",
            needs="validation samples at every client; the server sees sums of updates and one number per client.",
            cost="one model evaluated at every client of a round.",
        )

    def check(self, num_samples: Tensor) -> None:
        if self.trim and len(num_samples) < 2 * self.trim + 2:
            raise ConfigurationError(
                f"EverybodyElse(trim={self.trim}) leaves none of the others' reports of {len(num_samples)} clients. "
                f"Lower it, or have at least {2 * self.trim + 2} clients in every round."
            )

    def init_states(self, num_clients: int, num_classes: int | None) -> None:
        for name in ("total", "gains"):
            self.add_state(name, torch.zeros(num_clients), dist_reduce_fx="sum")
        for name in ("seen", "answered"):
            self.add_state(name, torch.zeros(num_clients, dtype=torch.long), dist_reduce_fx="sum")

    def update(
        self,
        client_ids: Tensor,
        aggregation_weights: Tensor,
        aggregate: Tensor,
        clients: Sequence[Client],
        sum_weight: float | None = None,
    ) -> None:
        """Add one round; shapes ``[k]``, ``[k]``, ``[P]``."""
        self._check_asked(client_ids, clients)
        self._check_lengths(client_ids, aggregation_weights=aggregation_weights)
        question = partial(leave_self_out, performance=self.performance, gain=True)
        weights = None if sum_weight is not None else shares(aggregation_weights)
        question = question if sum_weight is None else partial(question, sum_weight=sum_weight)
        gains, said = asked_scores(clients, aggregate, weights, question)
        gains, said = gains.to(self.gains), said.to(self.gains.device)
        told = client_ids[said.to(client_ids.device)]
        self.gains = self.gains.index_add(0, told, gains)
        self.answered = self.answered.index_add(0, told, torch.ones_like(told))
        reports = self.gains.new_full((len(said),), float("nan")).masked_scatter(said, gains)
        values = everybody_else(reports, self.trim)
        known = ~values.isnan()
        client_ids, values = client_ids[known.to(client_ids.device)], values[known]
        self.total = self.total.index_add(0, client_ids, values)
        self.seen = self.seen.index_add(0, client_ids, torch.ones_like(client_ids))
        self.note_round(client_ids, values)

    def compute(self) -> Tensor:
        """``[num_clients]``, NaN for clients never seen."""
        return self.total.masked_fill(self.seen == 0, float("nan"))

    def diagnostics(self) -> dict[str, Tensor]:
        """What each client has gained from everybody else, in the rounds in which it has said so, ``[n]``."""
        return {"gain": self.gains.masked_fill(self.answered == 0, float("nan"))}
