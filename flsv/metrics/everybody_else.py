"""EverybodyElse: each client's share of the others' gains, from the others' reports and sums of updates only.

After the idea of Jaramillo-Velez et al., "Private and Robust Contribution Evaluation in Federated Learning", arXiv
2602.21721, 2026; the formula is ours, see :mod:`flsv.functional.peers`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from flsv.arguments import check_number
from flsv.errors import ConfigurationError
from flsv.functional.peers import everybody_else
from flsv.games.performance import Mode, performance_of
from flsv.metrics.base import ContributionMetric
from flsv.metrics.contribution_estimation import asked_scores
from flsv.metrics.guide import Guide
from flsv.metrics.leave_self_out import leave_self_out, secure_sum, shares
from flsv.participants import Client


class EverybodyElse(ContributionMetric):
    r"""Each client's share of what the other clients have gained from models without their own part.

    .. math::
        g_j = u_j\Bigl(\sum_{i \ne j} \frac{w_i}{1 - w_j} x_i\Bigr) - u_j(x), \qquad
        v_i = \frac1{k-1} \sum_{j \ne i} g_j

    with :math:`u_j` the score on client *j*'s own validation samples, :math:`x_i` the models of the round and
    :math:`w_i` their weights in its aggregate. The values of a round sum to all that clients have gained from each
    other, and no client's value holds its own report. Over rounds, values are summed; absent clients get 0.

    **Sums only.** The server is told the sum of the models and a number by each client. A client takes its own part out
    of the sum itself: nobody else can. So the metric works under secure aggregation, where no metric of single updates
    does. It does not make an aggregation secure: the engines here still send every update by itself.

    **What it cannot tell.** It has no null player: whoever does nothing shares in what the others gain from each other,
    and with k clients all values lie within a range of 1/(k-1) of the largest gain. A client gains little, and so is
    worth much, where its data are unlike all others': because they are rare, or because they are wrong. A client cannot
    raise its own value by its report; a low report lowers the others', and so raises its share of what is paid: one of
    six that says it has lost everything takes nearly all of it (``docs/results/stress.md``). ``trim=1`` leaves the
    largest and the smallest report out of every mean, at the cost of values that no longer sum to the gains. Measured
    on the digits (FedAvg, 6 equal clients, 8 rounds, one run each): by the loss a free rider has 0.750 and the honest
    clients 0.757 to 0.781, a client with wrong labels 0.699 and the others 0.722 to 0.742: last, and paid nearly as
    much. By the accuracy neither is told from the rest.

    As input to ``update``: ``client_ids [k]``, ``aggregation_weights [k]``, ``aggregate [P]`` (the models' average by
    these weights) and the ``clients``. ``compute`` gives ``[num_clients]``, in the score's unit; NaN for clients never
    seen. ``diagnostics`` holds what each client has gained, in the rounds in which it has said so.

    A client at a site of its own that does not answer leaves the mean over the others' gains to those that do; its own
    value needs no report of its own.

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
    over_rounds = "sum"

    total: Tensor
    gains: Tensor
    seen: Tensor

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

    @property
    def round_fields(self) -> dict[str, Any]:
        """Where a ``FederatedLoop`` finds the arguments of ``update``."""
        return {"aggregate": secure_sum}

    def guide(self) -> Guide:
        return Guide(
            unit="gain in the performance, summed over rounds",
            sign="positive: the others' models are better with the client; 0: they have gained nothing.",
            needs="validation samples at every client; the server sees sums of updates and one number per client.",
            cost="one model evaluated at every client of a round.",
        )

    def check(self, num_samples: Tensor) -> None:
        super().check(num_samples)
        if self.trim and len(num_samples) < 2 * self.trim + 2:
            raise ConfigurationError(
                f"EverybodyElse(trim={self.trim}) leaves none of the others' reports of {len(num_samples)} clients. "
                f"Lower it, or have at least {2 * self.trim + 2} clients in every round."
            )

    def init_states(self, num_clients: int, num_classes: int | None) -> None:
        for name in ("total", "gains"):
            self.add_state(name, torch.zeros(num_clients), dist_reduce_fx="sum")
        self.add_state("seen", torch.zeros(num_clients, dtype=torch.long), dist_reduce_fx="sum")

    def update(
        self, client_ids: Tensor, aggregation_weights: Tensor, aggregate: Tensor, clients: Sequence[Client]
    ) -> None:
        """Add one round; shapes ``[k]``, ``[k]``, ``[P]``."""
        self._check_clients(client_ids)
        if [client.id for client in clients] != client_ids.tolist():
            raise ValueError(f"clients {[c.id for c in clients]} are not those of client_ids={client_ids.tolist()}.")
        question = partial(leave_self_out, performance=self.performance, gain=True)
        gains, said = asked_scores(clients, aggregate, shares(aggregation_weights), question)
        gains, said = gains.to(self.gains), said.to(self.gains.device)
        self.total, self.gains, self.seen = self.total.clone(), self.gains.clone(), self.seen.clone()
        self.gains[client_ids[said.to(client_ids.device)]] += gains
        reports = self.gains.new_full((len(said),), float("nan")).masked_scatter(said, gains)
        values = everybody_else(reports, self.trim)
        known = ~values.isnan()
        client_ids, values = client_ids[known.to(client_ids.device)], values[known]
        self.total[client_ids] += values
        self._note(client_ids, values)
        self.seen[client_ids] += 1
        self.rounds += 1

    def compute(self) -> Tensor:
        """``[num_clients]``, NaN for clients never seen."""
        return self.total.masked_fill(self.seen == 0, float("nan"))

    def diagnostics(self) -> dict[str, Tensor]:
        """What each client has gained from everybody else, over its rounds, ``[num_clients]``."""
        return {"gain": self.gains.masked_fill(self.seen == 0, float("nan"))}
