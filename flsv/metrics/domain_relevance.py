"""DomainRelevance: a matrix of scores of how useful each client's model is to each other client (pFedSV).

Wu et al., "Rethinking Personalized Client Collaboration in Federated Learning", IEEE Transactions on Mobile Computing,
2024, equation 5 and figure 7.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from flsv.functional.moving_average import momentum_add, momentum_merge, momentum_value
from flsv.functional.pfedsv import label_overlap, relevance_auroc
from flsv.metrics.base import ContributionMetric
from flsv.utilities.declared import Momentum


class DomainRelevance(ContributionMetric):
    r"""pFedSV's relevance scores of all pairs of clients.

    .. math:: \phi^i_j \leftarrow \alpha\,\phi^i_j + (1 - \alpha)\,\varphi^i_j

    for the clients *j* whose models client *i* evaluated in this round. Scores start from 0. :math:`\varphi^i_j` is the
    Shapley value of *j*'s model in *i*'s game, in units of accuracy on *i*'s validation samples, and :math:`\alpha` the
    weight of the old score.

    The scores come from a personalizer such as :class:`flsv.personalization.PFedSV`. ``compute`` gives ``[num_clients,
    num_clients]``, row i with client i's scores of the others. NaN for pairs that were never evaluated. ``per_client``
    returns the mean of the scores that other clients gave to a client's model. In a ``FederatedLoop``, ``diagnostics``
    returns ``auroc``, the probability that among the evaluated pairs a relevant pair has a higher score than a pair
    that is not relevant, and ``found``, the share of relevant pairs that were evaluated. Relevant are clients with
    labels in common (:func:`flsv.functional.label_overlap`), which no real client knows.

    When not to use it:
        For one value per client: the metric has one value per pair. Where clients have no validation data of their own,
        and where tens of clients would each have to receive many models.

    Args:
        num_clients: n, the number of clients. None inside a ``FederatedLoop``.
        alpha: in [0, 1), the weight of the old score. The paper gives no value.
        kwargs: arguments of ``torchmetrics.Metric``.

    Raises:
        ConfigurationError: ``alpha`` is outside [0, 1).
        ValueError: shapes do not fit, or client ids are unknown or repeated.

    Example:
        >>> metric = DomainRelevance(num_clients=3)
        >>> nan = float("nan")
        >>> metric.update(torch.tensor([0, 1]), torch.tensor([[0.6, 0.4, -0.2], [nan, 0.8, 0.0]]))
        >>> metric.compute()
        tensor([[ 0.3000,  0.2000, -0.1000],
                [    nan,  0.4000,  0.0000],
                [    nan,     nan,     nan]])
    """

    unit = "gain in accuracy"
    sign = "positive: the row's client does better with the column's model; negative: worse; 0: no difference."
    cost = "none beside that of the personalizer, which evaluates the models."
    per_class = False
    uses_ground_truth = True
    history: Tensor

    def __init__(
        self,
        num_clients: int | None = None,
        alpha: Momentum = 0.5,
        **kwargs: Any,
    ) -> None:
        self.alpha = alpha
        super().__init__(num_clients, **kwargs)

    def init_states(self, num_clients: int, num_classes: int | None) -> None:
        # A row per pair, see flsv.functional.moving_average.
        reduction = partial(momentum_merge, momentum=self.alpha)
        self.add_state("history", torch.zeros(num_clients**2, 3), dist_reduce_fx=reduction)

    def update(self, client_ids: Tensor, peer_values: Tensor) -> None:
        """Update the states with one round.

        Args:
            client_ids: ``[k]``, the round's clients.
            peer_values: ``[k, n]``. Entry (i, j) is the value of client j's model to the i-th of the round's k clients,
                NaN if this client has not evaluated the model.
        """
        n = self.num_clients
        assert n is not None
        if peer_values.shape != (len(client_ids), n):
            raise ValueError(
                f"expected peer_values [k={len(client_ids)}, n={n}], got {list(peer_values.shape)}."
            )
        values = self.history.new_full((n, n), torch.nan)
        values[client_ids] = peer_values.to(values)
        # The history has a row per pair of clients.
        pair_values = values.flatten()
        was_evaluated = ~pair_values.isnan()
        new_values = pair_values[was_evaluated].unsqueeze(1)  # [pairs, 1]
        self.history = momentum_add(self.history, was_evaluated, new_values, self.alpha)

    def compute(self) -> Tensor:
        """Compute the scores ``[num_clients, num_clients]``, NaN for pairs that were never evaluated."""
        assert self.num_clients is not None
        return momentum_value(self.history, self.alpha, init=0.0).view(self.num_clients, -1)

    def per_client(self, value: Tensor) -> Tensor:
        """Compute the mean of the scores that other clients gave to each client's model, ``[num_clients]``. NaN for a
        model without a score.
        """
        scores_by_others = value.clone()
        scores_by_others.fill_diagonal_(torch.nan)
        return scores_by_others.nanmean(0)

    def diagnostics(self) -> dict[str, Tensor]:
        """Return ``auroc``, how well the scores separate relevant pairs from others, and ``found``, the share of
        relevant pairs that were evaluated. Return an empty dictionary if the clients' classes are not known.
        """
        if self.class_counts is None:
            return {}
        scores = self.compute().cpu()
        is_relevant = label_overlap(self.class_counts.cpu()) > 0  # [n, n]
        is_relevant.fill_diagonal_(False)
        was_evaluated = ~scores[is_relevant].isnan()
        return {
            "auroc": relevance_auroc(scores, is_relevant),
            "found": was_evaluated.float().mean(),
        }

    def columns(self) -> list[str]:
        return list(self.client_names or map(str, range(self.num_clients or 0)))
